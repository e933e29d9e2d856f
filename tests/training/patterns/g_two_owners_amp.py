"""g_two_owners.py with mixed precision written by hand.

GradScaler would unscale the gradients of the trunk twice.
"""

import runpy
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

Scale = runpy.run_path(str(Path(__file__).with_name("g_by_hand.py")))["Scale"]

torch.manual_seed(0)
trunk = nn.Sequential(nn.Linear(6, 10), nn.Tanh())
heads = [nn.Linear(10, 1), nn.Linear(10, 1)]
optimizers = [
    torch.optim.SGD([*trunk.parameters(), *heads[0].parameters()], lr=0.05, momentum=0.5),
    torch.optim.Adam([*trunk.parameters(), *heads[1].parameters()], lr=5e-3),
]
parameters = [p for model in (trunk, *heads) for p in model.parameters()]
scale = Scale(INIT_SCALE, GROWTH_INTERVAL, enabled=DTYPE is torch.float16)
inputs = torch.randn(40, 6)
targets = [inputs[:, :1].sin(), inputs[:, 1:2] * inputs[:, :1]]
result = {"losses": [], "parameters": []}


def call(model, x):
    with torch.autocast("cpu", DTYPE):
        out = model(x)
    return out.float()


for step in range(24):
    for optimizer in optimizers:
        optimizer.zero_grad()
    hidden = call(trunk, inputs)
    losses = [F.mse_loss(call(head, hidden), y) for head, y in zip(heads, targets)]
    ran_with = scale.backward(sum(losses), parameters)
    for optimizer in optimizers:
        scale.step(optimizer, ran_with)
    result["losses"].append([loss.item() for loss in losses])

for step in range(24):
    task = step % 2
    optimizers[task].zero_grad()
    loss = F.mse_loss(call(heads[task], call(trunk, inputs)), targets[task])
    scale.backward(loss, parameters)
    scale.step(optimizers[task])
    result["losses"].append(loss.item())
    result["parameters"].append([p.detach().clone() for p in trunk.parameters()])

result["heads"] = [p.detach() for head in heads for p in head.parameters()]
