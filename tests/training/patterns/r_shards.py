"""Sharded parameters, also uneven ones: accumulation, clipping, two optimizers, a shared norm."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 1)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def whole(tensor):
    return tensor.detach().full_tensor().clone()


torch.manual_seed(0)
rank = dist.get_rank()
model = Model()
for block in model.blocks[:2]:
    fully_shard(block)
fully_shard(model, reshard_after_forward=False)
last = [*model.norm.parameters(), *model.head.parameters()]
optimizers = [
    torch.optim.SGD(model.blocks.parameters(), lr=0.05, momentum=0.9),
    torch.optim.Adam(last, lr=0.01, fused=True),
]
inputs = torch.randn(2, 24, 16, 5)[rank]
result = {"loss": [], "norm": [], "gradients": []}

for step, x in enumerate(inputs):
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    model.set_requires_gradient_sync(step % 3 == 0)
    for part in x.chunk(2):
        loss = 0.1 * F.mse_loss(model(part), part[:, :1].sin())
        loss.backward()
        model.set_requires_gradient_sync(True)
    result["loss"].append(loss.item())
    result["gradients"].append([whole(p.grad) for p in model.parameters()])
    result["norm"].append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
    for optimizer in optimizers:
        optimizer.step()

result["parameters"] = [whole(p) for p in model.parameters()]
