"""The optimizers step inside backward, parameter by parameter: no gradient outlives it."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
optimizers = {p: torch.optim.AdamW([p], lr=0.01, foreach=False) for p in model.parameters()}
order = {p: index for index, p in enumerate(optimizers)}
inputs = torch.randn(24, 10, 4)
result = {"loss": [], "norms": [[] for _ in optimizers]}


def step(parameter):
    norms = result["norms"][order[parameter]]
    norms.append(nn.utils.clip_grad_norm_([parameter], 0.01).item())
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step)

for x in inputs:
    loss = 0.2 * F.mse_loss(model(x), x[:, :2].sin())
    loss.backward()
    assert all(p.grad is None for p in model.parameters())
    result["loss"].append(loss.item())

result["parameters"] = [p.detach() for p in model.parameters()]
