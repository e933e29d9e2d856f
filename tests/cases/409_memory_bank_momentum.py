# Pattern: instance discrimination, a float32 memory bank updated from features by index
# Must hold under AMP: the entries move and stay of unit length, others do not change
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
net = nn.Linear(6, 4); x = torch.randn(3, 6); ids = torch.tensor([4, 0, 7])
bank = F.normalize(torch.randn(10, 4), dim=1); before = bank.clone()
f = F.normalize(net(x), dim=1)
sim = f @ bank.t() / 0.07
assert torch.isfinite(sim).all()
with torch.no_grad():
    new = bank[ids].mul_(0.5).add_(f * 0.5)
    bank[ids] = new / new.pow(2).sum(1, keepdim=True).pow(0.5)
    bank.index_copy_(0, ids[:1], F.normalize(f[:1], dim=1))
others = torch.ones(10).bool(); others[ids] = False
assert bank.dtype == torch.float32 and torch.equal(bank[others], before[others])
assert (bank.norm(dim=1) - 1).abs().max() < 2e-3
assert (bank[ids] - before[ids]).abs().max() > 1e-3
