"""A trunk that two optimizers own: both step after one backward, then each after its own task's."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
trunk = nn.Sequential(nn.Linear(6, 10), nn.Tanh())
heads = [nn.Linear(10, 1), nn.Linear(10, 1)]
optimizers = [
    torch.optim.SGD([*trunk.parameters(), *heads[0].parameters()], lr=0.05, momentum=0.5),
    torch.optim.Adam([*trunk.parameters(), *heads[1].parameters()], lr=5e-3),
]
inputs = torch.randn(40, 6)
targets = [inputs[:, :1].sin(), inputs[:, 1:2] * inputs[:, :1]]
result = {"losses": [], "parameters": []}

for step in range(24):
    for optimizer in optimizers:
        optimizer.zero_grad()
    hidden = trunk(inputs)
    losses = [F.mse_loss(head(hidden), y) for head, y in zip(heads, targets)]
    sum(losses).backward()
    for optimizer in optimizers:
        optimizer.step()
    result["losses"].append([loss.item() for loss in losses])

for step in range(24):
    task = step % 2
    optimizers[task].zero_grad()
    loss = F.mse_loss(heads[task](trunk(inputs)), targets[task])
    loss.backward()
    optimizers[task].step()
    result["losses"].append(loss.item())
    result["parameters"].append([p.detach().clone() for p in trunk.parameters()])

result["heads"] = [p.detach() for head in heads for p in head.parameters()]
