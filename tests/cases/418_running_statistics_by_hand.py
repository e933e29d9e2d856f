# Pattern: Welford's algorithm over activations, state made with new_zeros
# Must hold under AMP: count, mean and variance of 3000 values near 100 are right
import torch, torch.nn as nn
torch.manual_seed(0)
lin = nn.Linear(1, 1); nn.init.ones_(lin.weight); nn.init.constant_(lin.bias, 100.0)
h = lin(torch.randn(3000, 1)).squeeze(-1).detach()
count, mean, m2 = h.new_zeros(()), h.new_zeros(()), h.new_zeros(())
for v in h[:2500]:
    count = count + 1; delta = v - mean
    mean = mean + delta / count
    m2 = m2 + delta * (v - mean)
assert count.item() == 2500, count
assert abs(mean.item() - 100) < 0.2 and abs((m2 / count).item() - 1) < 0.1, (mean, m2 / count)
