"""g_fine_tuning.py with mixed precision written by hand."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
backbone = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU())
model = nn.Sequential(backbone, nn.Linear(8, 3))
for p in backbone.parameters():
    p.requires_grad = False
optimizer = torch.optim.Adam(
    filter(lambda p: p.requires_grad, model.parameters()), lr=1e-2, eps=1e-3, weight_decay=1e-3
)
scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=INIT_SCALE,
    growth_interval=GROWTH_INTERVAL,
    enabled=DTYPE is torch.float16,
)
inputs, labels = torch.randn(40, 6), torch.randint(3, (40,))
result = {"loss": [], "gradients": [], "parameters": []}

for step in range(40):
    if step == 8:
        for p in backbone[2].parameters():
            p.requires_grad = True
        optimizer.add_param_group({"params": list(backbone[2].parameters()), "lr": 3e-3})
    if step == 20:
        backbone[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(backbone[0].parameters()), "lr": 1e-3})
    if step == 30:
        backbone[2].requires_grad_(False)
    optimizer.zero_grad()
    with torch.autocast("cpu", DTYPE):
        logits = model(inputs)
    loss = F.cross_entropy(logits.float(), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    result["loss"].append(loss.item())
    result["gradients"].append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    result["parameters"].append([p.detach().clone() for p in model.parameters()])

result["state"] = optimizer.state_dict()["state"]
