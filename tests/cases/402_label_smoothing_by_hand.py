# Pattern: label smoothing with scatter_ into a tensor made like the logits
# Must hold under AMP: the smoothed targets sum to 1 and the loss is that of F.cross_entropy
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
net = nn.Linear(16, 4000); x = torch.randn(8, 16); y = torch.randint(0, 4000, (8,))
logits = net(x)
with torch.no_grad():
    target = torch.zeros_like(logits).fill_(0.1 / 3999)
    target.scatter_(1, y[:, None], 0.9)
assert (target.float().sum(1) - 1).abs().max() < 2e-3, target.float().sum(1)
loss = torch.mean(torch.sum(-target * logits.log_softmax(-1), -1))
ref = -(0.9 * F.log_softmax(logits.float(), -1)[range(8), y] + (F.log_softmax(logits.float(), -1).sum(1) - F.log_softmax(logits.float(), -1)[range(8), y]) * 0.1 / 3999).mean()
assert abs(loss.item() - ref.item()) < 3e-2 * ref.item(), (loss.item(), ref.item())
