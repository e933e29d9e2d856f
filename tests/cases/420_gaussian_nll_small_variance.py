# Pattern: heteroscedastic regression, log variance from the network, variances near 1e-5
# Must hold under AMP: the likelihood is that of float32
import torch, torch.nn as nn
torch.manual_seed(0)
head = nn.Linear(4, 2); nn.init.zeros_(head.weight)
with torch.no_grad(): head.bias.copy_(torch.tensor([0.25, -12.0]))
out = head(torch.randn(64, 4)); mu, lv = out[:, 0], out[:, 1]
y = 0.25 + 0.00390625 * torch.sign(torch.randn(64))
var = torch.exp(lv)
nll = 0.5 * (lv + (y - mu) ** 2 / (var + 1e-10)).mean()
ref = 0.5 * (-12.0 + 0.00390625 ** 2 / 6.144212353328214e-06)
assert abs(nll.item() - ref) < 5e-2 * abs(ref), (nll.item(), ref)
nll.backward(); assert torch.isfinite(head.bias.grad).all()
