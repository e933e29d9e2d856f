"""One rank alone meets what half precision breaks; both exchange what their layers have made."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

rank, world = dist.get_rank(), dist.get_world_size()


class Silent(nn.Module):
    """Adds what half precision cannot hold, on one rank."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        x = self.layer(x).abs()
        return (x + (1e-9 if rank == 1 else 1e-3)).sqrt()


class Loud(nn.Module):
    """Refuses half precision, on one rank, from some step on."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        x = self.layer(x)
        if rank == 1 and step >= 2 and x.dtype is not torch.float32:
            raise RuntimeError("expected scalar type Float but found Half")
        return x


class Centred(nn.Module):
    """Takes the first row of all ranks away, exchanged in the dtype that it has."""

    def forward(self, x):
        row = x.detach()[0].clone()
        result["met"].append(str(row.dtype))
        dist.all_reduce(row)
        return x - row / world


class Late(nn.Module):
    """Has exchanged something when it fails on one rank: it cannot begin again alone."""

    def __init__(self, loudly):
        super().__init__()
        self.layer, self.loudly = nn.Linear(4, 4), loudly

    def forward(self, x):
        x = self.layer(x).abs()
        dist.all_reduce(torch.ones(3))
        if rank == 1 and self.loudly and x.dtype is not torch.float32:
            raise RuntimeError("expected scalar type Float but found Half")
        return (x + (1e-9 if rank == 1 else 1e-3)).sum()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), Silent(), Centred(), nn.Linear(8, 8), Loud(), Centred(), nn.Linear(8, 2))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
inputs = torch.randn(world, 6, 16, 4)[rank]
result = {"met": [], "loss": [], "grads": []}

for step, x in enumerate(inputs):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), x[:, :2].sin())
    loss.backward()
    result["loss"].append(loss.item())
    result["grads"].append([p.grad.clone() for p in model.parameters()])
    optimizer.step()

result["parameters"] = [p.detach() for p in model.parameters()]
result["late"] = []
for loudly in (False, True):
    try:
        result["late"].append(Late(loudly)(torch.randn(3, 4)).item() > 0)
    except RuntimeError as error:
        result["late"].append(str(error))
    together = torch.ones(2)
    dist.all_reduce(together)
    result["late"].append(together.tolist())
