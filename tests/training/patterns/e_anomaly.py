"""Training under anomaly detection."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
inputs = torch.randn(10, 16, 4)
result = {"loss": [], "gradients": []}

for x in inputs:
    with torch.autograd.set_detect_anomaly(True):
        loss = 4 * F.mse_loss(model(x), 3 * x.sum(1, keepdim=True).sin())
        optimizer.zero_grad()
        loss.backward()
    result["gradients"].append([p.grad.clone() for p in model.parameters()])
    optimizer.step()
    result["loss"].append(loss.item())

result["parameters"] = [p.detach() for p in model.parameters()]
