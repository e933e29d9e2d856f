"""g_accumulate.py with mixed precision written by hand."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 12), nn.Dropout(0.1), nn.ReLU(), nn.Linear(12, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-4)
scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=INIT_SCALE,
    growth_interval=GROWTH_INTERVAL,
    enabled=DTYPE is torch.float16,
)
inputs, labels = torch.randn(46, 5), torch.randint(3, (46,))
result = {"loss": [], "gradients": []}

for epoch in range(4):
    batches = list(zip(inputs.split(6), labels.split(6)))
    for index, (x, y) in enumerate(batches):
        with torch.autocast("cpu", DTYPE):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), y) / 3
        scaler.scale(loss).backward()
        result["loss"].append(loss.item())
        if (index + 1) % 3 == 0 or index + 1 == len(batches):
            scaler.unscale_(optimizer)
            result["gradients"].append([p.grad.clone() for p in model.parameters()])
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

sizes = [[1, 9, 2], [4, 4, 4], [12], [3, 1, 1, 7]]
for step in range(24):
    parts = sizes[step % 4]
    for x, y in zip(inputs[:12].split(parts), labels[:12].split(parts)):
        with torch.autocast("cpu", DTYPE):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), y, reduction="sum") / 12
        scaler.scale(loss).backward()
        result["loss"].append(loss.item())
    scaler.unscale_(optimizer)
    result["gradients"].append([p.grad.clone() for p in model.parameters()])
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()

result["parameters"] = [p.detach() for p in model.parameters()]
result["state"] = optimizer.state_dict()["state"]
