# Pattern: ScaleNorm, g * x / ||x||, with activations in the hundreds
# Must hold under AMP: the result has length g
import torch, torch.nn as nn
torch.manual_seed(0)
lin = nn.Linear(8, 4096); nn.init.constant_(lin.weight, 50.0); nn.init.zeros_(lin.bias)
g = nn.Parameter(torch.tensor(8.0))
x = lin(torch.ones(2, 8))
n = (x * x).sum(-1, keepdim=True).sqrt().clamp(min=1e-5)
y = g * x / n
assert (y.float().norm(dim=-1) - 8).abs().max() < 0.1, y.float().norm(dim=-1)
