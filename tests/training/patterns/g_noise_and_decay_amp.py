"""g_noise_and_decay.py with mixed precision written by hand."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 12), nn.GELU(), nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=INIT_SCALE,
    growth_interval=GROWTH_INTERVAL,
    enabled=DTYPE is torch.float16,
)
inputs, labels = torch.randn(40, 5), torch.randint(2, (40,))
result = {"loss": [], "gradients": []}

for step in range(30):
    optimizer.zero_grad()
    with torch.autocast("cpu", DTYPE):
        logits = model(inputs)
    loss = F.cross_entropy(logits.float(), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.grad.add_(p, alpha=0.01)
            p.grad = p.grad + torch.randn_like(p.grad) * (0.01 / (1 + step) ** 0.55)
    scaler.step(optimizer)
    scaler.update()
    result["loss"].append(loss.item())
    result["gradients"].append([p.grad.clone() for p in model.parameters()])

result["parameters"] = [p.detach() for p in model.parameters()]
