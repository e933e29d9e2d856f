"""Steps that are differentiated through: the learning rate is learnt too."""

import inspect

import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear

CLASSES = [
    cls
    for cls in vars(torch.optim).values()
    if isinstance(cls, type) and "differentiable" in inspect.signature(cls).parameters
]


def train(cls):
    torch.manual_seed(0)
    x, y = torch.randn(8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    start = nn.Parameter(torch.randn(3, 4) * 0.1)
    optimizer = torch.optim.SGD([start], lr=0.1)
    losses, gradients = [], []
    for _ in range(3):
        weight = start.clone()
        inner = cls([weight], lr=0.05, differentiable=True)
        loss = cross_entropy(linear(x, weight), y)
        weight.grad = torch.autograd.grad(loss, weight, create_graph=True)[0]
        inner.step()
        optimizer.zero_grad()
        loss = cross_entropy(linear(x, weight), y)
        loss.backward()
        gradients.append(start.grad.clone())
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "gradients": gradients, "weight": start.detach().clone()}


result = {cls.__name__: train(cls) for cls in CLASSES}
