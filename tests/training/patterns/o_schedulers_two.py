"""Two optimizers, one of them fused, each with a scheduler of its own; one steps rarely."""

import torch
from torch import nn

torch.manual_seed(0)
models = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)) for _ in range(2)]
x, y = torch.randn(8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
optimizers = [
    torch.optim.Adam(models[0].parameters(), lr=0.05, fused=True),
    torch.optim.SGD(models[1].parameters(), lr=0.1),
]
schedulers = [
    torch.optim.lr_scheduler.OneCycleLR(optimizers[0], max_lr=0.1, total_steps=30),
    torch.optim.lr_scheduler.ExponentialLR(optimizers[1], 0.9),
]
result = {"losses": [], "rates": []}

for step in range(24):
    for index in [0, 1] if step % 3 == 0 else [0]:
        optimizers[index].zero_grad()
        loss = nn.functional.cross_entropy(models[index](x), y)
        loss.backward()
        optimizers[index].step()
        result["losses"].append(loss.item())
    for index in range(2):
        schedulers[index].step()
        result["rates"].append(optimizers[index].param_groups[0]["lr"])

result["parameters"] = [p.detach() for model in models for p in model.parameters()]
