"""A first backward only looks at how steep the loss is far away; its gradients are thrown away."""

import torch
from torch import nn
from torch.nn import functional as F


def to_none(model, optimizer):
    for p in model.parameters():
        p.grad = None


def in_place(model, optimizer):
    for p in model.parameters():
        p.grad.zero_()


def through_data(model, optimizer):
    for p in model.parameters():
        p.grad.data.zero_()


WAYS = [
    lambda model, optimizer: optimizer.zero_grad(),
    lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    lambda model, optimizer: model.zero_grad(),
    lambda model, optimizer: model.zero_grad(set_to_none=False),
    to_none,
    in_place,
    through_data,
]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
inputs = torch.randn(35, 10, 4)
targets = inputs.sum(-1, keepdim=True).sin()
result = {"loss": [], "gradients": []}

for step, (x, y) in enumerate(zip(inputs, targets)):
    (F.mse_loss(model(x), 1000 * y) * 1e12).backward()
    WAYS[step % 7](model, optimizer)
    if step % 5 == 0:
        optimizer.step()  # with nothing but momentum
    loss = 0.2 * F.mse_loss(model(x), y)
    loss.backward()
    result["loss"].append(loss.item())
    result["gradients"].append([p.grad.clone() for p in model.parameters()])
    optimizer.step()
    WAYS[(step + 3) % 7](model, optimizer)

result["parameters"] = [p.detach() for p in model.parameters()]
