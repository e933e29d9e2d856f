"""g_clip_every_micro_step.py with mixed precision written by hand.

`GradScaler.unscale_` refuses to be called twice a step: the scale is applied by hand.
"""

import runpy
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

Scale = runpy.run_path(str(Path(__file__).with_name("g_by_hand.py")))["Scale"]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.15)
scale = Scale(INIT_SCALE, GROWTH_INTERVAL, enabled=DTYPE is torch.float16)
inputs = torch.randn(9, 10, 4)
targets = inputs.sum(-1, keepdim=True).sin()
result = {"loss": [], "norm": [], "gradients": []}

for step in range(30):
    optimizer.zero_grad()
    for micro_step in range(3):
        batch = (3 * step + micro_step) % 9
        with torch.autocast("cpu", DTYPE):
            predicted = model(inputs[batch])
        loss = F.mse_loss(predicted.float(), targets[batch]) / 3
        scale.backward(loss, model.parameters())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        result["loss"].append(loss.item())
        result["norm"].append(norm.item())
        result["gradients"].append([p.grad.clone() for p in model.parameters()])
    scale.step(optimizer)

result["parameters"] = [p.detach() for p in model.parameters()]
