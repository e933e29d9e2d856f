"""A gradient that is not finite in the shard of one rank, then clipped by value to look good."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.gain = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x, weights):
        return self.layer(x), self.gain * weights


torch.manual_seed(0)
result = {"steps": [], "scale": [], "parameters": []}
for kind in (
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.Adam(p, lr=0.1),
    lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
):
    model = fully_shard(Model())
    optimizer = kind(model.parameters())
    taken = []
    for spoilt, clips in ((False, 0), (True, 0), (False, 0), (True, 1), (False, 0)):
        before = model.gain.detach().full_tensor().clone()
        optimizer.zero_grad()
        out, gain = model(torch.ones(2, 4), torch.tensor([1.0, 1.0, 1.0, float("inf") if spoilt else 1.0]))
        (out.pow(2).mean() + gain[:3].mean() + gain[3] / 8).backward()
        if clips:
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        if spoilt:
            optimizer.step()
        after = model.gain.detach().full_tensor()
        taken.append(not torch.equal(before, after))
    result["steps"].append(taken)
    result["scale"].append(optimizer.state_dict().get("autoamp", {}).get("scale"))
    result["parameters"].append([p.detach().full_tensor() for p in model.parameters()])
