"""The same by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.seldom, self.never = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, seldom):
        x = torch.tanh(self.trunk(x))
        return self.head(torch.tanh(self.seldom(x)) if seldom else x)


torch.manual_seed(0)
rank = dist.get_rank()
model = DistributedDataParallel(Model(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", INIT_SCALE, growth_interval=GROWTH_INTERVAL, enabled=DTYPE is torch.float16)


def call(*args):
    with torch.autocast("cpu", DTYPE):
        out = model(*args)
    return out.float()


inputs = torch.randn(dist.get_world_size(), 24, 20, 4)[rank]
result = {"loss": [], "norm": [], "gradients": []}

for step, x in enumerate(inputs):
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    first, second = x.chunk(2)
    if step % 3:
        with model.no_sync():
            scaler.scale(F.mse_loss(call(first, False), first[:, :2].sin())).backward()
    loss = F.mse_loss(call(second, rank == step % 2), second[:, :2].sin())
    if step == 20 and rank == 1:
        loss = loss * float("nan")
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    result["loss"].append(loss.item())
    result["gradients"].append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    result["norm"].append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    scaler.step(optimizer)
    scaler.update()

result["parameters"] = [p.detach() for p in model.parameters()]
