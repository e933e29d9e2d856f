# Pattern: generalised advantage estimates, normalised with eps 1e-8
# Must hold under AMP: advantages of a critic that is almost right are normalised, equal ones become 0
import torch, torch.nn as nn
torch.manual_seed(0)
critic = nn.Linear(2, 1); nn.init.zeros_(critic.weight); nn.init.constant_(critic.bias, 0.5)
v = critic(torch.randn(64, 2)).squeeze(-1)
reward = 0.005 + 1e-5 * torch.randn(64)
adv, last = torch.zeros_like(v), 0.0
for t in reversed(range(63)):
    last = reward[t] + 0.99 * v[t + 1] - v[t] + 0.99 * 0.95 * last
    adv[t] = last
adv = adv[:63].detach()
norm = (adv - adv.mean()) / (adv.std() + 1e-8)
assert torch.isfinite(norm).all() and abs(norm.float().std().item() - 1) < 2e-2
same = torch.full_like(v, 0.1).detach(); same = (same - same.mean()) / (same.std() + 1e-8)
assert torch.isfinite(same).all() and same.abs().max() < 20, same.abs().max()
