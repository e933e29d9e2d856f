# Pattern: soft-argmax: expected x and y of a heat map, with pixel indices typed after it
# Must hold under AMP: coordinates up to 1000 within half a pixel
import torch, torch.nn as nn
conv = nn.Conv1d(1, 1, 1); nn.init.constant_(conv.weight, 12.0); nn.init.zeros_(conv.bias)
x = torch.zeros(1, 1, 1024); x[..., 1000] = 1.0; x[..., 1001] = 1.0
p = conv(x).mul(2).softmax(-1)
pos = torch.arange(1024).to(p)
e = (p * pos).sum(-1)
assert abs(e.item() - 1000.5) < 0.6, e
