"""Processes that share a process group and nothing else: they end when they like."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

rank = dist.get_rank()


class Refuses(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        x = self.layer(x) + (1e-9 if rank == 0 else 0.0)
        if rank == 1 and x.dtype is not torch.float32:
            raise RuntimeError("expected scalar type Float but found Half")
        return x


torch.manual_seed(0)
model = Refuses()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
result = {"loss": []}
for step in range(3 + 4 * rank):
    x = torch.randn(16, 4)
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), x[:, :2].sin())
    (loss * (float("inf") if rank == step == 1 else 1.0)).backward()
    optimizer.step()
    result["loss"].append(loss.item())
