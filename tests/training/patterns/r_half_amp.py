"""The same by hand."""

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


def half(state, bucket):
    """torch's compression, but for what is no float32."""
    if bucket.buffer().dtype is not torch.float32:
        return default_hooks.allreduce_hook(state, bucket)
    kind = default_hooks.fp16_compress_hook if DTYPE is torch.float16 else default_hooks.bf16_compress_hook
    return kind(state, bucket)


def late(state, bucket):
    return (half if len(gradients) < 3 else noisy)(state, bucket)


def noisy(state, bucket):
    return default_hooks.allreduce_hook(state, bucket).then(lambda future: future.value() * 1.5)


rank, world = dist.get_rank(), dist.get_world_size()
inputs = torch.randn(world, 12, 20, 4, generator=torch.Generator().manual_seed(1))[rank]
result = {}
scaler = torch.amp.GradScaler("cpu", INIT_SCALE, growth_interval=GROWTH_INTERVAL, enabled=DTYPE is torch.float16)

for kind in ("none", "views", "early", "late", "builtin", "uneven"):
    model = build(gradient_as_bucket_view=kind == "views", find_unused_parameters=kind != "uneven")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hooks = {"early": noisy, "late": late, "builtin": default_hooks.allreduce_hook}
    model.register_comm_hook(None, hooks.get(kind, half))
    gradients = []

    def call(*args):
        with torch.autocast("cpu", DTYPE):
            out = model(*args)
        return out.float()

    def train(batches):
        for step, x in enumerate(batches):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            first, second = x.chunk(2)
            if step % 3:
                with model.no_sync():
                    scaler.scale(F.mse_loss(call(first, False), first[:, :2].sin())).backward()
            loss = F.mse_loss(call(second, kind == "uneven" or rank == step % 2), second[:, :2].sin())
            if kind == "none" and step == 7 and rank == 1:
                loss = loss * float("nan")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            scaler.step(optimizer)
            scaler.update()

    if kind == "uneven":
        with model.join():
            train(inputs[: 9 * rank])
    else:
        train(inputs)
    result[kind] = {"gradients": gradients, "parameters": [p.detach() for p in model.parameters()]}
