# Pattern: learned graph, normalised Laplacian, its eigenvectors as positions
# Must hold under AMP: eigh runs, the smallest eigenvalue is 0, eigenvectors are orthogonal
import torch, torch.nn as nn
torch.manual_seed(0)
net = nn.Linear(4, 4); h = net(torch.randn(12, 4))
A = torch.sigmoid(h @ h.t()); A = A - torch.diag_embed(A.diagonal())
d = A.sum(1).clamp(min=1e-12).pow(-0.5)
L = torch.eye(12) - d[:, None] * A * d[None, :]
val, vec = torch.linalg.eigh(L)
assert abs(val[0].item()) < 1e-2 and (vec.t() @ vec - torch.eye(12)).abs().max() < 2e-2, val
val.sum().backward(); assert torch.isfinite(net.weight.grad).all()
