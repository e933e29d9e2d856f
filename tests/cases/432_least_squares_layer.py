# Pattern: ridge regression head solved in closed form (R2D2), pinv and lstsq of features
# Must hold under AMP: solvers run and give the float32 solution
import torch, torch.nn as nn
torch.manual_seed(0)
net = nn.Linear(6, 4, bias=False); x = torch.randn(40, 6); w = torch.randn(4, 2)
f = net(x); y = f.detach().float() @ w
a = torch.linalg.solve(f.t() @ f + 1e-6 * torch.eye(4), f.t() @ y)
b = torch.linalg.lstsq(f.float(), y.float()).solution
c = torch.linalg.pinv(f) @ y
for got in (a, b, c): assert (got.float() - w).abs().max() < 5e-2, (got, w)
a.sum().backward(); assert torch.isfinite(net.weight.grad).all()
