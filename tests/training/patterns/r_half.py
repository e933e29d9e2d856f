"""Gradients that travel in half: accumulation, unused layers, NaN on one rank, uneven inputs, and
hooks that the script registers itself."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.seldom, self.exact = nn.Linear(8, 8), nn.Linear(2, 2).double()

    def forward(self, x, seldom):
        x = torch.tanh(self.trunk(x))
        x = self.head(torch.tanh(self.seldom(x)) if seldom else x)
        return x + self.exact(x.double()).float()


def build(**switches):  # a rank that joins with nothing has no map of what it used
    torch.manual_seed(0)
    return DistributedDataParallel(Model(), **switches)


def noisy(state, bucket):
    return default_hooks.allreduce_hook(state, bucket).then(lambda future: future.value() * 1.5)


rank, world = dist.get_rank(), dist.get_world_size()
inputs = torch.randn(world, 12, 20, 4, generator=torch.Generator().manual_seed(1))[rank]
result = {}

for kind in ("none", "views", "early", "late", "builtin", "uneven"):
    model = build(gradient_as_bucket_view=kind == "views", find_unused_parameters=kind != "uneven")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "early":
        model.register_comm_hook(None, noisy)
    if kind == "builtin":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    gradients = []

    def train(batches):
        for step, x in enumerate(batches):
            if kind == "late" and step == 3:
                model.register_comm_hook(None, noisy)
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            first, second = x.chunk(2)
            if step % 3:
                with model.no_sync():
                    F.mse_loss(model(first, False), first[:, :2].sin()).backward()
            loss = F.mse_loss(model(second, kind == "uneven" or rank == step % 2), second[:, :2].sin())
            if kind == "none" and step == 7 and rank == 1:
                loss = loss * float("nan")
            loss.backward()
            gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            optimizer.step()

    if kind == "uneven":
        with model.join():
            train(inputs[: 9 * rank])
    else:
        train(inputs)
    result[kind] = {"gradients": gradients, "parameters": [p.detach() for p in model.parameters()]}
