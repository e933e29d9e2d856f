"""What could part the loss scales of ranks: checkpoints loaded on one of them only, a model that a
rank trains for itself, gradients that it asks for, and a rank whose model has no loss."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
own, of_nobody = nn.Linear(4, 2), nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
local = torch.optim.SGD(own.parameters(), lr=0.1)
inputs = torch.randn(world, 12, 16, 4)[rank]
result = {"scale": [], "own": [], "parameters": []}

for step, x in enumerate(inputs):
    state = optimizer.state_dict()
    if rank == 1 and step == 6 and "autoamp" in state:
        state["autoamp"].update(scale=256.0, growth_tracker=1)
        optimizer.load_state_dict(state)
    optimizer.zero_grad()
    F.mse_loss(model(x), x[:, :2].sin()).backward()
    optimizer.step()
    if rank == 1:
        local.zero_grad()
        loss = F.mse_loss(own(x), x[:, :2].sin())
        (loss * (1e35 if step in (3, 4) else 1.0)).backward()
        local.step()
        torch.autograd.grad((of_nobody(x) * 1e3).square().sum() * 1e3, of_nobody.weight)
    else:
        with torch.no_grad():
            own(x)
    result["scale"].append(optimizer.state_dict().get("autoamp"))
    result["own"].append([p.detach().clone() for p in own.parameters()])
    result["parameters"].append([p.detach().clone() for p in model.parameters()])
