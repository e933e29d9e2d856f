"""A network that solves u'' = -u on [0, 2], u(0) = 0, u'(0) = 1: a loss made of derivatives."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
t = torch.linspace(0, 2, 16)[:, None].requires_grad_()
result = {"loss": [], "first": [], "second": []}

for step in range(24):
    u = model(t)
    (du,) = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)
    (ddu,) = torch.autograd.grad(du, t, torch.ones_like(du), create_graph=True)
    loss = 0.05 * ((ddu + u).pow(2).mean() + u[0, 0].pow(2) + (du[0, 0] - 1).pow(2))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    result["loss"].append(loss.item())
    result["first"].append(du.detach().clone())
    result["second"].append(ddu.detach().clone())

result["parameters"] = [p.detach() for p in model.parameters()]
