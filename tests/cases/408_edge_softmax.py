# Pattern: attention over the edges of a graph: maximum by scatter_reduce, exponentials summed by index_add
# Must hold under AMP: weights of each node sum to 1
import torch, torch.nn as nn
torch.manual_seed(0)
att = nn.Linear(4, 1); x = torch.randn(60, 4) * 6; dst = torch.arange(60) % 7
s = att(x).squeeze(-1)
top = torch.full((7,), -1e30).scatter_reduce(0, dst, s, reduce="amax")
w = (s - top[dst]).exp()
z = torch.zeros(7).index_add(0, dst, w) + 1e-16
a = w / z[dst]
sums = torch.zeros(7).index_add(0, dst, a)
assert (sums - 1).abs().max() < 1e-2, sums
