# Pattern: scripts of the time of Variable: torch.FloatTensor, x.new, .type("torch.FloatTensor")
# Must hold under AMP: all of them work together with activations
import torch, torch.nn as nn
torch.manual_seed(0)
lin = nn.Linear(3, 3); h = lin(torch.FloatTensor([[1, 2, 3]]))
mask = torch.FloatTensor(1, 3).fill_(1); mask[0, 2] = 0
a = h * mask
b = torch.cat([a, torch.FloatTensor(1, 3).zero_()], 0)
c = h.new(2, 3).zero_(); c[0] = h[0]; c.copy_(torch.ones(2, 3))
d = h.type("torch.FloatTensor"); e = h.data.type(torch.FloatTensor)
s = torch.addmm(torch.FloatTensor(1, 2).fill_(0), h, torch.FloatTensor(3, 2).fill_(1))
assert b.shape == (2, 3) and c.sum() == 6 and d.dtype == e.dtype == torch.float32
assert (s.float() - h.float().sum(1, keepdim=True)).abs().max() < 2e-2
assert isinstance(d, torch.FloatTensor)
