"""Gradients that the script adds up itself; before that, one rank's overflow. And a model that a
rank trains for itself beside the one that is shared."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
result = {"parameters": [], "taken": []}
for kind in (
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = kind(model.parameters())
    taken = []
    for step in range(8):
        x = torch.randn(world, 16, 4)[rank]
        before = model[0].weight.detach().clone()
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x[:, :2].sin())
        if step % 3 == 1 and rank == 1:
            loss = loss * float("inf")
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        taken.append(not torch.equal(before, model[0].weight))
    result["taken"].append(taken)
    result["parameters"].append([p.detach().clone() for p in model.parameters()])
