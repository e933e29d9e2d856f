# Pattern: rotary position table whose positions and frequencies are typed after x
# Must hold under AMP: angles of positions up to 4000 are right
import torch, torch.nn as nn
torch.manual_seed(0)
proj = nn.Linear(8, 8); nn.init.eye_(proj.weight); nn.init.zeros_(proj.bias)
h = proj(torch.ones(4001, 8))
t = torch.arange(h.shape[0], device=h.device, dtype=h.dtype)
freq = 1.0 / (100.0 ** (torch.arange(0, 4, dtype=h.dtype) / 4))
angle = t[:, None] * freq[None, :]
ref = torch.arange(4001.0)[:, None] * (1.0 / (100.0 ** (torch.arange(0, 4.0) / 4)))
err = (angle.cos().float() - ref.cos()).abs().max().item()
assert err < 5e-2, err
