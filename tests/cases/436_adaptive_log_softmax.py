# Pattern: nn.AdaptiveLogSoftmaxWithLoss as the output layer
# Must hold under AMP: loss and log_prob agree, probabilities sum to 1
import torch, torch.nn as nn
torch.manual_seed(0)
body, out = nn.Linear(8, 16), nn.AdaptiveLogSoftmaxWithLoss(16, 60, [10, 30])
h = body(torch.randn(12, 8)); y = torch.randint(0, 60, (12,))
o, loss = out(h, y); loss.backward()
lp = out.log_prob(h)
assert (lp.float().exp().sum(-1) - 1).abs().max() < 1e-2
assert abs(loss.item() + lp.float()[range(12), y].mean().item()) < 2e-2
assert torch.isfinite(body.weight.grad).all()
