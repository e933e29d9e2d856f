"""g_clip_value.py with mixed precision written by hand: what overflowed is noted before clipping."""

import runpy
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

Scale = runpy.run_path(str(Path(__file__).with_name("g_by_hand.py")))["Scale"]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scale = Scale(INIT_SCALE, GROWTH_INTERVAL, enabled=DTYPE is torch.float16)
inputs, labels = torch.randn(60, 10, 4), torch.randint(3, (60, 10))
result = {"loss": [], "gradients": []}

for step in range(30):
    optimizer.zero_grad(set_to_none=step % 3 == 0)
    overflowed = False
    for batch in (2 * step, 2 * step + 1):
        with torch.autocast("cpu", DTYPE):
            logits = model(inputs[batch])
        loss = F.cross_entropy(logits.float(), labels[batch])
        scale.backward(loss, model.parameters())
        overflowed |= not all(p.grad.isfinite().all() for p in model.parameters())
        if step % 2:
            nn.utils.clip_grad_value_(model.parameters(), 0.02)
        result["loss"].append(loss.item())
    nn.utils.clip_grad_value_(model.parameters(), 0.03)
    result["gradients"].append([p.grad.clone() for p in model.parameters()])
    if overflowed and scale.enabled:
        scale.value, scale.good_steps = scale.value / 2, 0
    else:
        scale.step(optimizer)

result["parameters"] = [p.detach() for p in model.parameters()]
