# Pattern: message passing, messages summed and counted with index_add_ and scatter_add_
# Must hold under AMP: the mean over 3000 neighbours is right, for messages in any precision
import torch, torch.nn as nn
torch.manual_seed(0)
msg = nn.Linear(2, 2); nn.init.eye_(msg.weight); nn.init.zeros_(msg.bias)
x = torch.full((3005, 2), 1.5); dst = torch.cat([torch.zeros(3000), torch.ones(5)]).long()
m = msg(x)
total = torch.zeros(2, 2).index_add_(0, dst, m)
count = torch.zeros_like(m[:2]).scatter_add_(0, dst[:, None].expand(-1, 2), torch.ones_like(m))
mean = total / count.clamp(min=1)
assert (mean.float() - 1.5).abs().max() < 1e-2, (mean, count)
