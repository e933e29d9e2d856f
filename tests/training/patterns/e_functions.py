"""Custom Functions: a linear layer after the docs, gradient reversal, a clamp, straight-through."""

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F


class LinearFunction(Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.mm(weight.t())

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad.mm(weight), grad.t().mm(x)


class Reverse(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.factor * grad, None


class Clamp(Function):
    @staticmethod
    def forward(x, limit):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.limit = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-ctx.limit, ctx.limit), None


class Quantize(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.task, self.domain = nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        hidden = torch.tanh(LinearFunction.apply(self.second(hidden), self.weight))
        hidden = Quantize.apply(Clamp.apply(hidden, 2.0**-9))
        return self.task(hidden), self.domain(Reverse.apply(hidden, 0.5))


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
inputs = torch.randn(30, 10, 4)
result = {"loss": [], "gradients": []}

for x in inputs:
    optimizer.zero_grad()
    y, d = model(x)
    loss = 0.2 * F.mse_loss(y, x[:, :2].sin()) + 0.2 * F.binary_cross_entropy_with_logits(d, (x[:, :1] > 0).float())
    loss.backward()
    result["loss"].append(loss.item())
    result["gradients"].append([p.grad.clone() for p in model.parameters()])
    optimizer.step()

result["parameters"] = [p.detach() for p in model.parameters()]
