# Pattern: losses with reduction="sum" over whole images inside a model that returns its loss
# Must hold under AMP: the sum is right beyond 65504
import torch, torch.nn as nn, torch.nn.functional as F
class Model(nn.Module):
    def __init__(self): super().__init__(); self.c = nn.Conv2d(1, 1, 1); nn.init.ones_(self.c.weight); nn.init.zeros_(self.c.bias)
    def forward(self, x, y):
        p = self.c(x)
        return F.mse_loss(p, y, reduction="sum") + ((p - y) ** 2).sum() + (p - y).abs().sum()
net = Model(); x = torch.full((1, 1, 300, 300), 3.0)
loss = net(x, torch.zeros_like(x))
assert abs(loss.item() - 90000 * 21) < 0.01 * 90000 * 21, loss
(loss / loss.item()).backward(); g = net.c.weight.grad.item() * 21 / 39
assert abs(g - 1) < 2e-2, g
