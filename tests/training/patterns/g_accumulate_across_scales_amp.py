"""g_accumulate_across_scales.py with mixed precision written by hand.

The scale moves while gradients add up, which GradScaler must not be asked for: all sums are in true
units.
"""

import runpy
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

Scale = runpy.run_path(str(Path(__file__).with_name("g_by_hand.py")))["Scale"]

torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
head = nn.Linear(8, 3)
parameters = [*encoder.parameters(), *head.parameters()]
slow = torch.optim.SGD(encoder.parameters(), lr=0.2, momentum=0.9)
fast = torch.optim.SGD(head.parameters(), lr=0.2)
scale = Scale(INIT_SCALE, GROWTH_INTERVAL, enabled=DTYPE is torch.float16)
inputs, labels = torch.randn(48, 8, 6), torch.randint(3, (48, 8))
result = {"loss": [], "gradients": []}


def forward(x, y):
    with torch.autocast("cpu", DTYPE):
        hidden = encoder(x)
    with torch.autocast("cpu", DTYPE):
        logits = head(hidden.float())
    return F.cross_entropy(logits.float(), y) / 4


def overflowed(parameters):
    return not all(p.grad.isfinite().all() for p in parameters)


first_overflow = None  # the lowest scale at which the sum of the slow one overflowed
for index, (x, y) in enumerate(zip(inputs, labels)):
    loss = forward(x, y)
    ran_with = scale.backward(loss, parameters)
    if overflowed(encoder.parameters()):
        first_overflow = min(first_overflow or ran_with, ran_with)
    scale.step(fast, ran_with)
    fast.zero_grad()
    if index % 4 == 3:
        result["gradients"].append([p.grad.clone() for p in encoder.parameters()])
        scale.step(slow, first_overflow)
        slow.zero_grad()
        first_overflow = None
    result["loss"].append(loss.item())

optimizer = torch.optim.SGD(parameters, lr=0.05)
first_overflow = None
for index, (x, y) in enumerate(zip(inputs, labels)):
    loss = forward(x, y)
    ran_with = scale.backward(loss, parameters)
    result["gradients"].append([p.grad.clone() for p in encoder.parameters()])
    scale.step(optimizer, ran_with)
    if index % 5 == 4:
        optimizer.zero_grad(set_to_none=False)
    result["loss"].append(loss.item())

result["parameters"] = [p.detach() for p in parameters]
