"""Errors in the middle of a backward, caught: the batch is left out and training goes on."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
inputs, labels = torch.randn(36, 10, 4), torch.randint(3, (36, 10))
result = {"loss": [], "left out": [], "gradients": []}
batch = 0


def check(grad):
    if batch % 7 == 5:
        raise FloatingPointError(batch)


model[2].weight.register_hook(check)

for batch in range(36):
    try:
        loss = F.cross_entropy(model(inputs[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        result["loss"].append(loss.item())
        result["gradients"].append([p.grad.clone() for p in model.parameters()])
    except FloatingPointError:
        result["left out"].append(batch)
    optimizer.zero_grad()

result["parameters"] = [p.detach() for p in model.parameters()]
