"""Broken samples in the data: a NaN or an infinity in some micro-batches of an accumulation."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
inputs = torch.randn(96, 6, 4)
targets = inputs.sum(-1, keepdim=True).sin()
inputs[22, 3, 1] = float("nan")  # the second of three micro-steps of step 7
targets[63, 0] = float("inf")  # the first one of step 21
inputs[86, 5] = float("nan")  # the last one of step 28
result = {"loss": [], "gradients": []}

for step in range(32):
    optimizer.zero_grad()
    for batch in range(3 * step, 3 * step + 3):
        loss = F.mse_loss(model(inputs[batch]), targets[batch]) / 3
        loss.backward()
        result["loss"].append(loss.item())
    result["gradients"].append([p.grad.clone() for p in model.parameters()])
    optimizer.step()

result["parameters"] = [p.detach() for p in model.parameters()]
result["state"] = optimizer.state_dict()["state"]
