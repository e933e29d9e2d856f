# Pattern: NT-Xent, the diagonal filled with -9e15, temperature 0.007
# Must hold under AMP: the loss is that of float32 within half precision, gradient finite
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
net = nn.Linear(8, 8); x = torch.randn(6, 8); pair = torch.tensor([3, 4, 5, 0, 1, 2])
z = F.normalize(net(x), dim=1)
def loss_of(z):
    sim = z @ z.t()
    sim = sim.masked_fill(torch.eye(6).bool(), -9e15) / 0.007
    return (-sim[range(6), pair] + torch.logsumexp(sim, -1)).mean()
loss = loss_of(z); ref = loss_of(z.detach().float().double())
assert torch.isfinite(loss) and abs(loss.item() - ref.item()) < 2e-2 * abs(ref.item()) + 0.3, (loss.item(), ref.item())
loss.backward(); assert torch.isfinite(net.weight.grad).all()
