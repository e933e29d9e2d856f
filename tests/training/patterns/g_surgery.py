"""Gradient surgery between two tasks (PCGrad): conflicting parts are projected out, `.grad` is
assigned."""

import torch
from torch import nn
from torch.nn import functional as F


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
inputs = torch.randn(32, 4)
targets = [inputs[:, :1].sin(), -inputs[:, :1] + inputs[:, 1:2]]
result = {"losses": [], "dots": [], "merged": []}

for step in range(30):
    hidden = trunk(inputs)
    losses = [F.mse_loss(head(hidden), y) for head, y in zip(heads, targets)]
    gradients = []
    for loss in losses:
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
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
    optimizer.step()
    result["losses"].append([loss.item() for loss in losses])
    result["merged"].append(merged)

result["parameters"] = [p.detach() for p in parameters]
result["state"] = optimizer.state_dict()["state"]
