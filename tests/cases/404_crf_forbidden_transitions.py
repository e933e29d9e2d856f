# Pattern: linear-chain CRF with -1e10 for transitions that cannot happen
# Must hold under AMP: log partition is finite and right, forbidden paths get no gradient
import torch, torch.nn as nn
torch.manual_seed(0)
emit = nn.Linear(6, 3); trans = nn.Parameter(torch.zeros(3, 3))
x = torch.randn(5, 6); e = emit(x)
bad = torch.zeros(3, 3).bool(); bad[0, 2] = True
tr = trans.masked_fill(bad, -1e10)
def partition(e, tr):
    alpha = e[0]
    for i in range(1, 5):
        alpha = torch.logsumexp(alpha[:, None] + tr + e[i][None, :], 0)
    return torch.logsumexp(alpha, 0)
z = partition(e, tr); ref = partition(e.detach().float(), tr.detach().float())
assert abs(z.item() - ref.item()) < 5e-2, (z, ref)
z.backward()
assert torch.isfinite(trans.grad).all() and trans.grad[0, 2] == 0
assert abs(trans.grad.sum().item() - 4) < 5e-2, trans.grad
