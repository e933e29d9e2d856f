# Pattern: capsule squash, |v|^2 / (1 + |v|^2) * v / (|v| + 1e-8), of zero and of large capsules
# Must hold under AMP: zero stays zero, large ones get length 1, gradients finite
import torch, torch.nn as nn
lin = nn.Linear(8, 8, bias=False); nn.init.eye_(lin.weight)
x = torch.zeros(3, 8); x[1] = 150.0; x[2] = 0.5
v = lin(x); n2 = (v ** 2).sum(-1, keepdim=True)
s = n2 / (1 + n2) * v / (torch.sqrt(n2 + 1e-16) + 1e-8)
length = s.float().norm(dim=-1)
assert length[0] == 0 and abs(length[1].item() - 1) < 1e-2 and abs(length[2].item() - 2 / 3) < 1e-2, length
s.sum().backward(); assert torch.isfinite(lin.weight.grad).all()
