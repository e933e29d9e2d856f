# Pattern: BERT layer norm by hand, (x - mean) / sqrt(var + 1e-12), over rows that are constant
# Must hold under AMP: constant rows give the bias, gradients are finite
import torch, torch.nn as nn
lin = nn.Linear(4, 16, bias=False); nn.init.constant_(lin.weight, 0.3)
g, b = nn.Parameter(torch.ones(16)), nn.Parameter(torch.full((16,), 0.5))
x = torch.tensor([[0.0, 0, 0, 0], [1.0, 2, 3, 4]])
h = lin(x); u = h.mean(-1, keepdim=True); s = (h - u).pow(2).mean(-1, keepdim=True)
y = g * ((h - u) / torch.sqrt(s + 1e-12)) + b
assert torch.isfinite(y).all() and (y[0].float() - 0.5).abs().max() < 1e-2, y
assert (y[1].float() - 0.5).abs().max() < 1.5, y[1]
y.sum().backward(); assert torch.isfinite(g.grad).all()
