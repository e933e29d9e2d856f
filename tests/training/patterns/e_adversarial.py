"""FGSM: first an attack on a fixed model, then training against it, then a saliency map."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
inputs, labels = torch.randn(14, 10, 6), torch.randint(3, (14, 10))
result = {"attack": [], "x.grad": [], "loss": []}


def attack(x, y, parameters_too):
    for p in model.parameters():
        p.requires_grad_(parameters_too)
    x = x.clone().requires_grad_()
    loss = 100 * F.cross_entropy(model(x), y, reduction="sum")
    loss.backward()
    model.requires_grad_()
    result["x.grad"].append(x.grad / 100)
    return (x + 0.1 * x.grad.sign()).detach()


for x, y in zip(inputs[:4], labels[:4]):
    adversary = attack(x, y, parameters_too=False)
    result["attack"].append(F.cross_entropy(model(adversary), y).item())

for x, y in zip(inputs[4:], labels[4:]):
    adversary = attack(x, y, parameters_too=True)
    optimizer.zero_grad()
    loss = 0.1 * (F.cross_entropy(model(x), y) + F.cross_entropy(model(adversary), y))
    loss.backward()
    optimizer.step()
    result["loss"].append(loss.item())

x = inputs[0].clone().requires_grad_()
hidden = model[:2](x)
hidden.retain_grad()
(1000 * model[2](hidden)[:, 0]).sum().backward()
result["saliency"] = [x.grad / 1000, hidden.grad.float() / 1000]
result["parameters"] = [p.detach() for p in model.parameters()]
