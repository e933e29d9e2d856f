"""g_skip_large_norm.py with mixed precision written by hand."""

import statistics

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=INIT_SCALE,
    growth_interval=GROWTH_INTERVAL,
    enabled=DTYPE is torch.float16,
)
inputs = torch.randn(30, 10, 4)
targets = inputs.sum(-1, keepdim=True).sin()
targets[7::9] += 12  # outliers
result = {"loss": [], "norm": [], "stepped": []}
norms = [0.05]

for x, y in zip(inputs, targets):
    optimizer.zero_grad()
    with torch.autocast("cpu", DTYPE):
        predicted = model(x)
    loss = 0.02 * F.mse_loss(predicted.float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()
    if norm < 4 * statistics.median(norms[-10:]):
        scaler.step(optimizer)
        norms.append(norm)
    scaler.update()
    result["stepped"].append(norms[-1] == norm)
    result["loss"].append(loss.item())
    result["norm"].append(norm)

result["parameters"] = [p.detach() for p in model.parameters()]
