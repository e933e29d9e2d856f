"""The switches of data parallel, a compiled model, and ranks that run out of data at other times."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


KINDS = {
    "replicas of one device": lambda: nn.DataParallel(model()),
    "static graph": lambda: DistributedDataParallel(model(), static_graph=True),
    "views": lambda: DistributedDataParallel(model(), gradient_as_bucket_view=True),
    "small buckets": lambda: DistributedDataParallel(model(), bucket_cap_mb=1e-5),
    "compiled inside": lambda: DistributedDataParallel(torch.compile(model(), backend="eager")),
    "compiled outside": lambda: torch.compile(DistributedDataParallel(model()), backend="eager"),
    "uneven": lambda: DistributedDataParallel(model()),
}
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
data = torch.randn(world, 12, 16, 4)
result = {}

for kind, make in KINDS.items():
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    inputs = data[0 if kind == "replicas of one device" else rank]
    losses, norms = [], []

    def train(batches):
        for x in batches:
            optimizer.zero_grad()
            first, second = x.chunk(2)
            if kind == "views":
                with net.no_sync():
                    F.mse_loss(net(first), first[:, :2].sin()).backward()
            loss = F.mse_loss(net(second), second[:, :2].sin())
            loss.backward()
            losses.append(loss.item())
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5))
            optimizer.step()

    if kind == "uneven":
        for epoch in range(2):  # the second one starts with whatever scale the first one left
            with net.join():
                train(inputs[: 4 + 2 * rank])
        train(inputs[:2])
    else:
        train(inputs)
    result[kind] = {"loss": losses, "norm": norms, "parameters": [p.detach() for p in net.parameters()]}
