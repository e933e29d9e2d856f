"""o_schedulers_two.py with mixed precision written by hand."""

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
held = [False, False]
scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=INIT_SCALE,
    growth_interval=GROWTH_INTERVAL,
    enabled=DTYPE is torch.float16,
)
for optimizer in optimizers:
    optimizer._opt_called = True  # or torch warns when the first step is skipped
result = {"losses": [], "rates": []}

for step in range(24):
    for index in [0, 1] if step % 3 == 0 else [0]:
        optimizers[index].zero_grad()
        with torch.autocast("cpu", DTYPE):
            logits = models[index](x)
        loss = nn.functional.cross_entropy(logits.float(), y)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizers[index])
        scaler.update()
        held[index] = globals().get("HOLD", False) and scaler.get_scale() < before
        result["losses"].append(loss.item())
    for index in range(2):
        if not held[index]:
            schedulers[index].step()
        result["rates"].append(optimizers[index].param_groups[0]["lr"])

result["parameters"] = [p.detach() for model in models for p in model.parameters()]
