# Pattern: torch.nn.utils.weight_norm (forward pre-hook), removed before export
# Must hold under AMP: same output before and after remove_weight_norm, both parts learn
import torch, torch.nn as nn, warnings
warnings.simplefilter("ignore")
torch.manual_seed(0)
conv = nn.utils.weight_norm(nn.Conv1d(3, 4, 3)); x = torch.randn(2, 3, 9)
y = conv(x); y.pow(2).sum().backward()
assert conv.weight_g.grad.abs().max() > 0 and torch.isfinite(conv.weight_v.grad).all()
nn.utils.remove_weight_norm(conv)
assert (conv(x) - y).abs().max().item() < 1e-2
assert conv.weight.dtype == torch.float32 and isinstance(conv.weight, nn.Parameter)
