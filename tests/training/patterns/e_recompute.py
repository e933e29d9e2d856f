"""Home-made ways to save memory: a checkpoint and a reversible block, as Functions."""

import torch
from torch import nn
from torch.nn import functional as F


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block, ctx.parameters = block, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.block(x)
        gradients = torch.autograd.grad(out, (x, *ctx.parameters), grad)
        return None, *gradients


class Reversible(torch.autograd.Function):
    """y1 = x1 + f(x2), y2 = x2 + g(y1); nothing but the output is kept."""

    @staticmethod
    def forward(ctx, x, f, g):
        ctx.f, ctx.g = f, g
        with torch.no_grad():
            x1, x2 = x.chunk(2, dim=1)
            y1 = x1 + f(x2)
            y = torch.cat([y1, x2 + g(y1)], dim=1)
        ctx.y = y.detach()
        return y

    @staticmethod
    def backward(ctx, grad):
        y1, y2 = ctx.y.chunk(2, dim=1)
        d1, d2 = grad.chunk(2, dim=1)
        with torch.enable_grad():
            y1 = y1.detach().requires_grad_()
            gy1 = ctx.g(y1)
            gy1.backward(d2)
        with torch.no_grad():
            x2 = y2 - gy1
            d1 = d1 + y1.grad
        with torch.enable_grad():
            x2 = x2.detach().requires_grad_()
            ctx.f(x2).backward(d1)
        return torch.cat([d1, d2 + x2.grad], dim=1), None, None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.f = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.g = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        x = self.first(x)
        x = Recompute.apply(self.block, x, *self.block.parameters())
        return self.last(Reversible.apply(x, self.f, self.g))


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
inputs = torch.randn(24, 10, 4)
result = {"loss": [], "gradients": []}

for x in inputs:
    optimizer.zero_grad()
    loss = 0.2 * F.mse_loss(model(x), x[:, :2].sin())
    loss.backward()
    result["loss"].append(loss.item())
    result["gradients"].append([p.grad.clone() for p in model.parameters()])
    optimizer.step()

result["parameters"] = [p.detach() for p in model.parameters()]
