# Pattern: -log(-log(u + 1e-20) + 1e-20) with u made like the logits
# Must hold under AMP: noise is finite also for u of 0 and 1, samples sum to 1
import torch, torch.nn as nn
torch.manual_seed(0)
net = nn.Linear(4, 50); logits = net(torch.randn(40, 4))
u = torch.rand_like(logits); u[0, :3] = 0.0; u[1, :3] = 1.0
g = -torch.log(-torch.log(u + 1e-20) + 1e-20)
assert torch.isfinite(g).all(), int((~torch.isfinite(g)).sum())
y = ((logits + g) / 0.5).softmax(-1)
assert torch.isfinite(y).all() and (y.float().sum(-1) - 1).abs().max() < 1e-2
