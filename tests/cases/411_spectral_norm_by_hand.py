# Pattern: power iteration on a weight, vectors kept in buffers
# Must hold under AMP: sigma is that of the SVD, the normalised weight has norm 1
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5)); self.register_buffer("u", F.normalize(torch.randn(6), dim=0))
    def forward(self, x):
        w = self.weight
        with torch.no_grad():
            for _ in range(30):
                v = F.normalize(w.t() @ self.u, dim=0, eps=1e-12)
                self.u.copy_(F.normalize(w @ v, dim=0, eps=1e-12))
        sigma = torch.dot(self.u, torch.mv(w, v))
        return F.linear(x, w / sigma), sigma
net = Normed(); y, sigma = net(torch.randn(3, 5))
ref = torch.linalg.matrix_norm(net.weight.detach(), 2).item()
assert abs(sigma.item() - ref) < 2e-2 * ref, (sigma.item(), ref)
y.sum().backward(); assert torch.isfinite(net.weight.grad).all() and net.u.dtype == torch.float32
