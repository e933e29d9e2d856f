# Pattern: alphas_cumprod.to(x.dtype), then sqrt(1 - a) for early steps of diffusion
# Must hold under AMP: noise levels of the first steps are right, none is 0
import torch, torch.nn as nn
torch.manual_seed(0)
net = nn.Linear(4, 4); x = net(torch.randn(1000, 4)).detach()
ac = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)
a = ac.to(device=x.device, dtype=x.dtype)
sigma = (1 - a) ** 0.5
ref = (1 - ac.double()) ** 0.5
rel = ((sigma.double() - ref) / ref).abs().max().item()
assert rel < 5e-2, rel
noisy = a.sqrt()[:, None] * x + sigma[:, None]
assert torch.isfinite(noisy).all()
