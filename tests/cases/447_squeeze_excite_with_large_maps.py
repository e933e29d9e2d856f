# Pattern: global pooling written as x.view(n, c, -1).sum(-1) / (h * w)
# Must hold under AMP: the mean of large maps is right, the gate open
import torch, torch.nn as nn
conv, fc = nn.Conv2d(1, 2, 1), nn.Linear(2, 2); nn.init.constant_(conv.weight, 4.0); nn.init.zeros_(conv.bias); nn.init.eye_(fc.weight); nn.init.zeros_(fc.bias)
x = conv(torch.ones(1, 1, 160, 160)); n, c, h, w = x.shape
m = x.view(n, c, -1).sum(-1) / (h * w)
assert (m.float() - 4).abs().max() < 5e-2, m
y = x * torch.sigmoid(fc(m))[:, :, None, None]
assert torch.isfinite(y).all() and (y.float() - 4 / (1 + 2.718281828 ** -4)).abs().max() < 5e-2
