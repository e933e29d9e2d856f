"""Other ways to share out a model: the older FSDP class, also with its own mixed precision, ZeRO's
optimizer, tensor parallelism. A gradient that is not finite shows on one rank alone."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.gain = nn.Parameter(torch.ones(16))  # the last one, in the shard of the last rank

    def forward(self, x, weights):
        seen.append(str(self.first(x).dtype))
        return self.second(torch.tanh(self.first(x))), (self.gain * weights).mean()


def fsdp(model, **switches):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **switches)


KINDS = {
    "fsdp": lambda m: fsdp(m),
    "fsdp original": lambda m: fsdp(m, use_orig_params=True),
    "fsdp mixed": lambda m: fsdp(m, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32)),
    "shards mixed": lambda m: fully_shard(m, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "zero": DistributedDataParallel,
    "tensor": lambda m: parallelize_module(m, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()}),
}
result = {}
for kind, share in KINDS.items():
    torch.manual_seed(0)
    seen = []
    net = share(Model())
    if kind == "zero":
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses, taken = [], []
    for step in range(8):
        torch.manual_seed(step)
        x = torch.randn(16, 4) if kind == "tensor" else torch.randn(world, 16, 4)[rank]
        weights = torch.ones(16)
        if step in (2, 5) and kind != "tensor":
            weights[-1] = float("inf")  # the last of all elements, in the shard of the last rank
        before = [p.detach().clone() for p in net.parameters()]
        optimizer.zero_grad()
        out, more = net(x, weights)
        loss = F.mse_loss(out, x[:, :2].sin())
        if step in (2, 5) and kind == "tensor":
            out.register_hook(lambda grad: grad * float("inf"))
        (loss + more / 100).backward()
        optimizer.step()
        losses.append(loss.item())
        moved = [not torch.equal(a, b) for a, b in zip(before, net.parameters())]
        taken.append(any(moved))
    parts = [getattr(p, "_local_tensor", p).detach() for p in net.parameters()]
    result[kind] = {"taken": taken, "loss": losses, "parts": parts, "seen": seen[0]}
    result[kind]["scale"] = optimizer.state_dict().get("autoamp", {}) if kind != "zero" else {}
