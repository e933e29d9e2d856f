"""g_surgery.py with mixed precision written by hand: two unscaled gradients a step."""

import runpy
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

Scale = runpy.run_path(str(Path(__file__).with_name("g_by_hand.py")))["Scale"]


def flatten(parameters):
    return torch.cat([
        (torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters
    ])


torch.manual_seed(0)
trunk = nn.Sequential(nn.Linear(4, 10), nn.Tanh())
heads = nn.ModuleList([nn.Linear(10, 1), nn.Linear(10, 1)])
model = nn.ModuleDict({"trunk": trunk, "heads": heads})
parameters = list(model.parameters())
optimizer = torch.optim.Adam(parameters, lr=3e-3)
scale = Scale(INIT_SCALE, GROWTH_INTERVAL, enabled=DTYPE is torch.float16)
inputs = torch.randn(32, 4)
targets = [inputs[:, :1].sin(), -inputs[:, :1] + inputs[:, 1:2]]
result = {"losses": [], "dots": [], "merged": []}

for step in range(30):
    with torch.autocast("cpu", DTYPE):
        hidden = trunk(inputs)
    hidden = hidden.float()
    losses = []
    for head, y in zip(heads, targets):
        with torch.autocast("cpu", DTYPE):
            predicted = head(hidden)
        losses.append(F.mse_loss(predicted.float(), y))
    gradients = []
    for loss in losses:
        optimizer.zero_grad()
        scale.backward(loss, parameters, retain_graph=True)
        gradients.append(flatten(parameters))
    projected = [g.clone() for g in gradients]
    for mine, other in ((0, 1), (1, 0)):
        dot = projected[mine] @ gradients[other]
        result["dots"].append(dot.item())
        if dot < 0:
            projected[mine] -= dot / gradients[other].pow(2).sum() * gradients[other]
    merged = (projected[0] + projected[1]) / 2
    for p, grad in zip(parameters, merged.split([p.numel() for p in parameters])):
        p.grad = grad.view_as(p).clone()
    scale.step(optimizer)
    result["losses"].append([loss.item() for loss in losses])
    result["merged"].append(merged)

result["parameters"] = [p.detach() for p in parameters]
result["state"] = optimizer.state_dict()["state"]
