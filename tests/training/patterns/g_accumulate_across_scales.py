"""One optimizer steps on every batch, the other one on what four batches have added up."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
head = nn.Linear(8, 3)
slow = torch.optim.SGD(encoder.parameters(), lr=0.2, momentum=0.9)
fast = torch.optim.SGD(head.parameters(), lr=0.2)
inputs, labels = torch.randn(48, 8, 6), torch.randint(3, (48, 8))
result = {"loss": [], "gradients": []}

for index, (x, y) in enumerate(zip(inputs, labels)):
    loss = F.cross_entropy(head(encoder(x)), y) / 4
    loss.backward()
    fast.step()
    fast.zero_grad()
    if index % 4 == 3:
        result["gradients"].append([p.grad.clone() for p in encoder.parameters()])
        slow.step()
        slow.zero_grad()
    result["loss"].append(loss.item())

# The same optimizer steps on a running sum: gradients are cleared after every fifth step only.
optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.05)
for index, (x, y) in enumerate(zip(inputs, labels)):
    loss = F.cross_entropy(head(encoder(x)), y) / 4
    loss.backward()
    result["gradients"].append([p.grad.clone() for p in encoder.parameters()])
    optimizer.step()
    if index % 5 == 4:
        optimizer.zero_grad(set_to_none=False)
    result["loss"].append(loss.item())

result["parameters"] = [p.detach() for p in [*encoder.parameters(), *head.parameters()]]
