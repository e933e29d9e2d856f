# Pattern: scores edited in place: masked_fill_ with -1e10, then a float32 triangular mask added with +=
# Must hold under AMP: no crash, future positions get weight 0
import torch, torch.nn as nn
torch.manual_seed(0)
q, k = nn.Linear(8, 8), nn.Linear(8, 8); x = torch.randn(2, 6, 8)
s = torch.bmm(q(x), k(x).transpose(1, 2))
s /= 8 ** 0.5
pad = torch.zeros(2, 1, 6).bool(); pad[1, :, 5] = True
s.masked_fill_(pad, -1e10)
s += torch.triu(torch.full((6, 6), float("-inf")), 1)
w = torch.softmax(s, -1)
assert torch.isfinite(w).all() and w.triu(1).abs().max() == 0 and w[1, :, 5].abs().max() == 0
w.pow(2).sum().backward(); assert torch.isfinite(q.weight.grad).all()
