# Pattern: Swin v2, cosine similarity times exp of a clamped learned scale
# Must hold under AMP: attention is that of float32, padded zero queries give no NaN
import math, torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
q, k = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
scale = nn.Parameter(torch.log(torch.tensor(10.0)))
x = torch.randn(2, 5, 8); x[1, 3:] = 0
a, b = F.normalize(q(x), dim=-1), F.normalize(k(x), dim=-1)
s = a @ b.transpose(1, 2) * torch.clamp(scale, max=math.log(1.0 / 0.01)).exp()
p = s.softmax(-1); p.pow(2).sum().backward()
ra, rb = (F.normalize(F.linear(x, m.weight.detach()), dim=-1) for m in (q, k))
ref = (ra @ rb.transpose(1, 2) * 10).softmax(-1)
assert (p.float() - ref).abs().max() < 3e-2, (p.float() - ref).abs().max()
assert torch.isfinite(q.weight.grad).all() and torch.isfinite(scale.grad)
