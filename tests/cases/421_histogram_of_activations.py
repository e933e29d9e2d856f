# Pattern: torch.histc and torch.histogram of what a layer gives
# Must hold under AMP: no crash, all values are counted
import torch, torch.nn as nn
torch.manual_seed(0)
lin = nn.Linear(4, 100); h = lin(torch.randn(50, 4)).detach()
a = torch.histc(h, bins=20, min=-4, max=4)
b, edges = torch.histogram(h.flatten(), bins=20, range=(-4.0, 4.0))
assert int(a.sum()) == 5000 and int(b.sum()) == 5000 and edges.numel() == 21
lo, hi = h.min(), h.max(); c = torch.histc(h, 10, lo.item(), hi.item()); assert int(c.sum()) == 5000
