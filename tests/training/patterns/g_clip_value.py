"""Gradients are clipped by value: after every micro-step at first, only at the end later."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
inputs, labels = torch.randn(60, 10, 4), torch.randint(3, (60, 10))
result = {"loss": [], "gradients": []}

for step in range(30):
    optimizer.zero_grad(set_to_none=step % 3 == 0)
    for batch in (2 * step, 2 * step + 1):
        loss = F.cross_entropy(model(inputs[batch]), labels[batch])
        loss.backward()
        if step % 2:
            nn.utils.clip_grad_value_(model.parameters(), 0.02)
        result["loss"].append(loss.item())
    nn.utils.clip_grad_value_(model.parameters(), 0.03)
    result["gradients"].append([p.grad.clone() for p in model.parameters()])
    optimizer.step()

result["parameters"] = [p.detach() for p in model.parameters()]
