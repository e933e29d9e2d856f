"""Steps whose gradient norm is far above the median of the last ones are skipped by the script."""

import statistics

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
inputs = torch.randn(30, 10, 4)
targets = inputs.sum(-1, keepdim=True).sin()
targets[7::9] += 12  # outliers
result = {"loss": [], "norm": [], "stepped": []}
norms = [0.05]

for x, y in zip(inputs, targets):
    optimizer.zero_grad()
    loss = 0.02 * F.mse_loss(model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()
    if norm < 4 * statistics.median(norms[-10:]):
        optimizer.step()
        norms.append(norm)
    result["stepped"].append(norms[-1] == norm)
    result["loss"].append(loss.item())
    result["norm"].append(norm)

result["parameters"] = [p.detach() for p in model.parameters()]
