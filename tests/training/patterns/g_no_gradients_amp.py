"""g_no_gradients.py with mixed precision written by hand: GradScaler refuses such steps."""

import runpy
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

Scale = runpy.run_path(str(Path(__file__).with_name("g_by_hand.py")))["Scale"]

torch.manual_seed(0)
branches = nn.ModuleList([nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))])
optimizers = [torch.optim.AdamW(branch.parameters(), lr=1e-2) for branch in branches]
never_used = torch.optim.Adam(nn.Linear(3, 3).parameters())
scale = Scale(INIT_SCALE, GROWTH_INTERVAL, enabled=DTYPE is torch.float16)
lengths = [0, 5, 8, 0, 3, 8, 8, 0, 1, 6] * 4
result = {"loss": [], "parameters": []}

for optimizer in optimizers:
    optimizer.step()
for index, length in enumerate(lengths):
    x = torch.randn(length, 4)
    for optimizer in optimizers:
        optimizer.zero_grad()
    ran_with = None
    if length:
        with torch.autocast("cpu", DTYPE):
            predicted = branches[index % 3 == 1](x)
        loss = 0.5 * F.smooth_l1_loss(predicted.float(), x.sum(1, keepdim=True).sin())
        ran_with = scale.backward(loss, branches.parameters())
        result["loss"].append(loss.item())
    for optimizer in (*optimizers, never_used):
        if length:  # a step that no backward came before says nothing about the scale
            scale.step(optimizer, ran_with)
        else:
            optimizer.step()
    result["parameters"].append([p.detach().clone() for p in branches.parameters()])

result["states"] = [optimizer.state_dict()["state"] for optimizer in optimizers]
