"""g_nan_batch.py with mixed precision written by hand."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=INIT_SCALE,
    growth_interval=GROWTH_INTERVAL,
    enabled=DTYPE is torch.float16,
)
inputs = torch.randn(96, 6, 4)
targets = inputs.sum(-1, keepdim=True).sin()
inputs[22, 3, 1] = float("nan")
targets[63, 0] = float("inf")
inputs[86, 5] = float("nan")
result = {"loss": [], "gradients": []}

for step in range(32):
    optimizer.zero_grad()
    for batch in range(3 * step, 3 * step + 3):
        with torch.autocast("cpu", DTYPE):
            predicted = model(inputs[batch])
        loss = F.mse_loss(predicted.float(), targets[batch]) / 3
        scaler.scale(loss).backward()
        result["loss"].append(loss.item())
    scaler.unscale_(optimizer)
    result["gradients"].append([p.grad.clone() for p in model.parameters()])
    scaler.step(optimizer)
    scaler.update()

result["parameters"] = [p.detach() for p in model.parameters()]
result["state"] = optimizer.state_dict()["state"]
