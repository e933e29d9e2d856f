"""What has been accumulated so far is clipped by its norm after every micro-step."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.15)
inputs = torch.randn(9, 10, 4)
targets = inputs.sum(-1, keepdim=True).sin()
result = {"loss": [], "norm": [], "gradients": []}

for step in range(30):
    optimizer.zero_grad()
    for micro_step in range(3):
        batch = (3 * step + micro_step) % 9
        loss = F.mse_loss(model(inputs[batch]), targets[batch]) / 3
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        result["loss"].append(loss.item())
        result["norm"].append(norm.item())
        result["gradients"].append([p.grad.clone() for p in model.parameters()])
    optimizer.step()

result["parameters"] = [p.detach() for p in model.parameters()]
