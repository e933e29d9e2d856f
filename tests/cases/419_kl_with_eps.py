# Pattern: p * (log(p + 1e-12) - log(q + 1e-12)) for peaked distributions
# Must hold under AMP: the divergence is that of float32, never NaN
import torch, torch.nn as nn
torch.manual_seed(0)
net = nn.Linear(4, 6, bias=False); x = torch.randn(5, 4) * 5
p = net(x).softmax(-1); q = net(-x).softmax(-1)
kl = (p * (torch.log(p + 1e-12) - torch.log(q + 1e-12))).sum(-1)
w = net.weight.detach().double(); lp, lq = (torch.nn.functional.linear(s * x.double(), w).log_softmax(-1) for s in (1, -1))
ref = (lp.exp() * (lp - lq)).sum(-1)
assert torch.isfinite(kl).all() and (kl.double() - ref).abs().max() < 0.05 * ref.abs().max() + 0.2, (kl, ref)
kl.sum().backward(); assert torch.isfinite(net.weight.grad).all()
