"""Data parallel: a layer that one rank uses, accumulation without synchronising, clipping, NaN."""

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
inputs = torch.randn(dist.get_world_size(), 24, 20, 4)[rank]
result = {"loss": [], "norm": [], "gradients": []}

for step, x in enumerate(inputs):
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    first, second = x.chunk(2)
    if step % 3:
        with model.no_sync():
            F.mse_loss(model(first, False), first[:, :2].sin()).backward()
    loss = F.mse_loss(model(second, rank == step % 2), second[:, :2].sin())
    if step == 20 and rank == 1:
        loss = loss * float("nan")
    loss.backward()
    result["loss"].append(loss.item())
    result["gradients"].append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    result["norm"].append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    optimizer.step()

result["parameters"] = [p.detach() for p in model.parameters()]
