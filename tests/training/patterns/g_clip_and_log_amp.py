"""g_clip_and_log.py with mixed precision written by hand."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8)
scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=INIT_SCALE,
    growth_interval=GROWTH_INTERVAL,
    enabled=DTYPE is torch.float16,
)
inputs, labels = torch.randn(8, 12, 6), torch.randint(3, (8, 12))
result = {"loss": [], "norm": [], "layers": [], "clipped": []}

for step in range(32):
    optimizer.zero_grad()
    for micro_step in range(2):
        batch = (2 * step + micro_step) % 8
        with torch.autocast("cpu", DTYPE):
            logits = model(inputs[batch])
        loss = F.cross_entropy(logits.float(), labels[batch]) / 2
        scaler.scale(loss).backward()
        result["loss"].append(loss.item())
    scaler.unscale_(optimizer)

    layers = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        layers[name] = {
            "norm": grad.norm().item(),
            "mean": grad.abs().mean().item(),
            "max": grad.abs().max().item(),
            "ratio": (grad.norm() / parameter.detach().norm().clamp(min=0.1)).item(),
            "values": grad.clone(),
        }
    result["layers"].append(layers)
    result["norm"].append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    result["clipped"].append([p.grad.clone() for p in model.parameters()])
    scaler.step(optimizer)
    scaler.update()

result["parameters"] = [p.detach() for p in model.parameters()]
result["state"] = optimizer.state_dict()["state"]
