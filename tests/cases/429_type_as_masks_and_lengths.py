# Pattern: masked mean over long sequences, mask and lengths typed after the activations
# Must hold under AMP: means over 5000 steps are right, also of a sum that leaves the half range
import torch, torch.nn as nn
lin = nn.Linear(1, 2); nn.init.constant_(lin.weight, 20.0); nn.init.zeros_(lin.bias)
h = lin(torch.ones(2, 5000, 1)); n = torch.tensor([5000, 4001])
mask = (torch.arange(5000)[None, :] < n[:, None]).type_as(h)
length = mask.sum(1, keepdim=True)
mean = (h * mask[:, :, None]).sum(1) / length
assert length.flatten().tolist() == [5000, 4001], length
assert (mean.float() - 20).abs().max() < 0.2, mean
