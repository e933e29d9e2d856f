"""Accumulation over micro-batches of equal and of unequal size, the last group shorter."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 12), nn.Dropout(0.1), nn.ReLU(), nn.Linear(12, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-4)
inputs, labels = torch.randn(46, 5), torch.randint(3, (46,))
result = {"loss": [], "gradients": []}

# Loaders without drop_last: seven micro-batches of 6 and a rest of 4, a step after every third.
for epoch in range(4):
    batches = list(zip(inputs.split(6), labels.split(6)))
    for index, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x), y) / 3
        loss.backward()
        result["loss"].append(loss.item())
        if (index + 1) % 3 == 0 or index + 1 == len(batches):
            result["gradients"].append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()

# Micro-batches of any size, as tokens are packed: each loss weighs as much as its batch is long.
sizes = [[1, 9, 2], [4, 4, 4], [12], [3, 1, 1, 7]]
for step in range(24):
    parts = sizes[step % 4]
    for x, y in zip(inputs[:12].split(parts), labels[:12].split(parts)):
        loss = F.cross_entropy(model(x), y, reduction="sum") / 12
        loss.backward()
        result["loss"].append(loss.item())
    result["gradients"].append([p.grad.clone() for p in model.parameters()])
    optimizer.step()
    optimizer.zero_grad()

result["parameters"] = [p.detach() for p in model.parameters()]
result["state"] = optimizer.state_dict()["state"]
