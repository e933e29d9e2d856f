"""g_shared_graph.py with mixed precision written by hand.

Each step taken counts towards the growth of the scale, and two losses that overflow at one scale
cost one halving: GradScaler, updated once for both, would count pairs of steps.
"""

import runpy
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

Scale = runpy.run_path(str(Path(__file__).with_name("g_by_hand.py")))["Scale"]

torch.manual_seed(0)
trunk = nn.Sequential(nn.Linear(6, 10), nn.Tanh())
classify, regress = nn.Linear(10, 3), nn.Linear(10, 1)
optimizer_a = torch.optim.SGD([*trunk.parameters(), *classify.parameters()], lr=0.2)
optimizer_b = torch.optim.Adam(regress.parameters(), lr=1e-2)
scale = Scale(INIT_SCALE, GROWTH_INTERVAL, enabled=DTYPE is torch.float16)
inputs, labels = torch.randn(30, 6), torch.randint(3, (30,))
targets = inputs[:, :1].exp()
result = {"losses": [], "gradients": []}


def call(model, x):
    with torch.autocast("cpu", DTYPE):
        out = model(x)
    return out.float()


for step in range(30):
    optimizer_a.zero_grad()
    optimizer_b.zero_grad()
    hidden = call(trunk, inputs)
    loss_a = F.cross_entropy(call(classify, hidden), labels)
    loss_b = F.smooth_l1_loss(call(regress, hidden), targets)
    models = (trunk, classify, regress)
    parameters = [p for model in models for p in model.parameters()]
    if step % 2:
        ran_with = scale.backward(loss_a, parameters, retain_graph=True)
        scale.backward(0.1 * loss_b, parameters)
    else:
        ran_with = scale.value
        torch.autograd.backward([loss_a * ran_with, 0.1 * loss_b * ran_with])
        for p in parameters:
            p.grad /= ran_with
    result["gradients"].append([p.grad.clone() for p in parameters])
    scale.step(optimizer_a, ran_with)
    scale.step(optimizer_b, ran_with)
    result["losses"].append((loss_a.item(), loss_b.item()))

result["parameters"] = [p.detach() for p in parameters]
