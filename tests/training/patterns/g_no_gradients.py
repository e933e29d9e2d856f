"""Steps without any gradient: before the first backward, for empty batches, for a branch not taken.
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
branches = nn.ModuleList([nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))])
optimizers = [torch.optim.AdamW(branch.parameters(), lr=1e-2) for branch in branches]
never_used = torch.optim.Adam(nn.Linear(3, 3).parameters())
lengths = [0, 5, 8, 0, 3, 8, 8, 0, 1, 6] * 4
result = {"loss": [], "parameters": []}

for optimizer in optimizers:
    optimizer.step()
for index, length in enumerate(lengths):
    x = torch.randn(length, 4)
    for optimizer in optimizers:
        optimizer.zero_grad()
    if length:
        loss = 0.5 * F.smooth_l1_loss(branches[index % 3 == 1](x), x.sum(1, keepdim=True).sin())
        loss.backward()
        result["loss"].append(loss.item())
    for optimizer in (*optimizers, never_used):
        optimizer.step()
    result["parameters"].append([p.detach().clone() for p in branches.parameters()])

result["states"] = [optimizer.state_dict()["state"] for optimizer in optimizers]
