# Pattern: layers that refuse anything but float32 ("expected float32 input")
# Must hold under AMP: the layer gets float32, whatever came before it
import torch, torch.nn as nn
torch.manual_seed(0)
class Strict(nn.Module):
    def __init__(self): super().__init__(); self.w = nn.Parameter(torch.ones(4))
    def forward(self, x):
        if x.dtype != torch.float32: raise TypeError(f"expected float32 input, got {x.dtype}")
        y = x * self.w
        assert y.dtype is torch.float32
        return y
net = nn.Sequential(nn.Linear(3, 4), Strict(), nn.Linear(4, 2), nn.Tanh())
y = net(torch.randn(5, 3)); y.sum().backward()
h = nn.Linear(3, 4)(torch.randn(5, 3))
assert Strict()(h).shape == (5, 4) and torch.isfinite(net[0].weight.grad).all()
