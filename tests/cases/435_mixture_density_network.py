# Pattern: mixture density head: exp of log sigma, Normal.log_prob, logsumexp over components
# Must hold under AMP: the likelihood of a narrow component is that of float32
import math, torch, torch.nn as nn
torch.manual_seed(0)
head = nn.Linear(2, 9); nn.init.zeros_(head.weight)
with torch.no_grad(): head.bias.copy_(torch.tensor([2.0, 0, 0, 0.5, -1, 1, -9.0, 0, 0]))
pi, mu, ls = head(torch.randn(10, 2)).chunk(3, -1)
y = torch.full((10, 1), 0.5)
lp = torch.distributions.Normal(mu, ls.exp()).log_prob(y)
ll = torch.logsumexp(pi.log_softmax(-1) + lp, -1)
ref = math.log(math.exp(2) / (math.exp(2) + 2)) + 9 - 0.5 * math.log(2 * math.pi)
assert (ll.float() - ref).abs().max() < 5e-2, (ll[0].item(), ref)
(-ll.mean()).backward(); assert torch.isfinite(head.bias.grad).all()
