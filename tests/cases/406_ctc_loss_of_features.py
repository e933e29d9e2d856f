# Pattern: CTC loss on log-probabilities from a network
# Must hold under AMP: the loss is close to float32 and its gradient finite
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
net = nn.Linear(8, 6); x = torch.randn(20, 2, 8)
lp = net(x).log_softmax(-1)
y = torch.randint(1, 6, (2, 5))
loss = F.ctc_loss(lp, y, torch.tensor([20, 20]), torch.tensor([5, 5]), zero_infinity=True)
loss.backward()
ref = F.ctc_loss(lp.detach().float(), y, torch.tensor([20, 20]), torch.tensor([5, 5]))
assert abs(loss.item() - ref.item()) < 3e-2 * abs(ref.item()), (loss.item(), ref.item())
assert torch.isfinite(net.weight.grad).all() and net.weight.grad.abs().max() > 0
