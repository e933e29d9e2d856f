# Pattern: a matcher that computes its costs in the network and its pairs in NumPy
# Must hold under AMP: NumPy gets arrays that it can work with, the pairs are right
import numpy as np, torch, torch.nn as nn
torch.manual_seed(0)
class Matcher(nn.Module):
    def __init__(self):
        super().__init__(); self.embed = nn.Linear(4, 4, bias=False); nn.init.eye_(self.embed.weight)
    def forward(self, a, b):
        cost = torch.cdist(self.embed(a), self.embed(b), p=1)
        c = cost.detach().cpu().numpy(); rows = []
        assert c.dtype == np.float32, c.dtype
        for _ in range(len(c)):
            i, j = np.unravel_index(c.argmin(), c.shape); rows.append((int(i), int(j)))
            c = c.copy(); c[i, :] = np.inf; c[:, j] = np.inf
        i, j = zip(*sorted(rows))
        return cost[list(i), list(j)].sum(), j
a = torch.randn(5, 4) * 3; loss, j = Matcher()(a, a.flip(0))
assert j == (4, 3, 2, 1, 0) and abs(loss.item()) < 0.1, (j, loss)
