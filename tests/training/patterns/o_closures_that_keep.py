"""Closures that add to the gradients they find, or only report a loss."""

import torch
from torch import nn


def train(cls, way, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    xs, y = torch.randn(2, 8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    optimizer = cls(model.parameters(), **options)
    losses, parameters = [], [[p.detach().clone() for p in model.parameters()]]

    def loss_of(x):
        return nn.functional.cross_entropy(model(x), y)

    def closure():
        loss = loss_of(xs[0])
        loss.backward()
        return loss

    for _ in range(12):
        optimizer.zero_grad(set_to_none=way != "zeros")
        if way == "adds":
            loss_of(xs[1]).backward()
        if way == "reports":
            loss = loss_of(xs[0])
            loss.backward()
            loss = optimizer.step(lambda: loss)
        else:
            loss = optimizer.step(closure)
        losses.append(loss.item())
        parameters.append([p.detach().clone() for p in model.parameters()])
    return {"losses": losses, "parameters": parameters}


result = {
    f"{cls.__name__} {way}": train(cls, way, lr=0.05)
    for cls in (torch.optim.SGD, torch.optim.NAdam)
    for way in ("nones", "zeros", "adds", "reports")
}
