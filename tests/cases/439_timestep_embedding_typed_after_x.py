# Pattern: sinusoidal embedding of diffusion steps, typed after the sample
# Must hold under AMP: the embedding of step 999 is right
import math, torch, torch.nn as nn
torch.manual_seed(0)
conv = nn.Linear(4, 4); x = conv(torch.randn(3, 4))
t = torch.tensor([1, 500, 999])
f = torch.exp(-math.log(10000) * torch.arange(16).to(x) / 16)
arg = t[:, None].to(x) * f[None]
emb = torch.cat([arg.cos(), arg.sin()], -1)
rf = torch.exp(-math.log(10000) * torch.arange(16.0).double() / 16); rarg = t[:, None] * rf
ref = torch.cat([rarg.cos(), rarg.sin()], -1)
assert (emb.double() - ref).abs().max() < 5e-2, (emb.double() - ref).abs().max()
