# Pattern: masks filled with torch.finfo(torch.float32).min, as model libraries do
# Must hold under AMP: masked keys get weight 0, a fully masked row is uniform, no NaN
import torch, torch.nn as nn
torch.manual_seed(0)
q, k = nn.Linear(8, 8), nn.Linear(8, 8)
x = torch.randn(2, 4, 8)
s = q(x) @ k(x).transpose(1, 2) / 8 ** 0.5
keep = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]]).bool()[:, None, :]
s = s.masked_fill(~keep, torch.finfo(torch.float32).min)
a = s.softmax(-1)
assert torch.isfinite(a).all() and a[0, :, 2:].abs().max() == 0
assert (a[1] - 0.25).abs().max() < 1e-2, a[1]
