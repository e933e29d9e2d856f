"""g_flat_buffer.py with mixed precision written by hand."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=INIT_SCALE,
    growth_interval=GROWTH_INTERVAL,
    enabled=DTYPE is torch.float16,
)
inputs, labels = torch.randn(36, 10, 4), torch.randint(3, (36, 10))
flat = torch.zeros(sum(p.numel() for p in model.parameters()))
offset = 0
for p in model.parameters():
    p.grad = flat[offset : offset + p.numel()].view_as(p)
    offset += p.numel()
result = {"loss": [], "norm": [], "flat": []}

for step in range(0, 36, 2):
    flat.zero_()
    for micro_step in range(2):
        with torch.autocast("cpu", DTYPE):
            logits = model(inputs[step + micro_step])
        loss = F.cross_entropy(logits.float(), labels[step + micro_step])
        scaler.scale(loss).backward()
        result["loss"].append(loss.item())
    scaler.unscale_(optimizer)
    flat /= 2
    norm = flat.norm()
    if norm > 0.3:
        flat *= 0.3 / norm
    scaler.step(optimizer)
    scaler.update()
    result["norm"].append(norm.item())
    result["flat"].append(flat.clone())

result["parameters"] = [p.detach() for p in model.parameters()]
result["still views"] = all(p.grad._base is flat for p in model.parameters())
