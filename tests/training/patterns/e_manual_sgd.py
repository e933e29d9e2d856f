"""Gradient descent by hand, momentum and all; a summed loss."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
velocity = [torch.zeros_like(p) for p in model.parameters()]
inputs = torch.randn(12, 16, 4)
result = {"loss": [], "norm": [], "gradients": []}

for step, x in enumerate(inputs):
    for part in x.chunk(2):  # accumulated
        loss = (model(part) - 8 * part.sum(1, keepdim=True).sin()).pow(2).sum()
        loss.backward()
        result["loss"].append(loss.item())
    norm = nn.utils.clip_grad_norm_(model.parameters(), 50.0, error_if_nonfinite=True)
    result["norm"].append(norm.item())
    result["gradients"].append([p.grad / 50 for p in model.parameters()])
    with torch.no_grad():
        for p, v in zip(model.parameters(), velocity):
            v.mul_(0.9).add_(p.grad)
            p.sub_(0.001 * v)
    if step % 2:
        model.zero_grad()
    else:
        model.zero_grad(set_to_none=False)

result["parameters"] = [p.detach() for p in model.parameters()]
