# Pattern: differentiable histogram: triangular kernels between 256 centres, normalised
# Must hold under AMP: the histogram sums to 1 and peaks where it should
import torch, torch.nn as nn
lin = nn.Conv2d(1, 1, 1); nn.init.ones_(lin.weight); nn.init.zeros_(lin.bias)
img = lin(torch.full((1, 1, 120, 120), 200 / 255.0))
centres = torch.linspace(0, 1, 256)
d = (img.flatten()[:, None] - centres[None, :]).abs()
w = torch.relu(1 - d * 255)
hist = w.sum(0); hist = hist / (hist.sum() + 1e-10)
assert abs(hist.float().sum().item() - 1) < 1e-2 and torch.isfinite(hist).all(), hist.sum()
assert hist[199:202].float().sum() > 0.98, hist[198:203]
hist.pow(2).sum().backward(); assert torch.isfinite(lin.weight.grad).all()
