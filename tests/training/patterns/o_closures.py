"""Closures by position and by keyword, with dropout and augmentation inside."""

import random

import torch
from torch import nn


def train(cls, keyword=False, steps=6, **options):
    torch.manual_seed(0)
    random.seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
    x, y = torch.randn(8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    if cls is torch.optim.LBFGS:  # a line search wants a function, not a lottery
        model[2].p = 0.0
    optimizer = cls(model.parameters(), **options)
    losses = []

    def closure():
        optimizer.zero_grad()
        factor = 1.0 if cls is torch.optim.LBFGS else random.uniform(0.9, 1.1)
        loss = nn.functional.cross_entropy(model(x * factor), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        return loss

    for _ in range(steps):
        loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
        losses.append(loss.item())
    return {
        "losses": losses,
        "parameters": [p.detach().clone() for p in model.parameters()],
        "drawn": (torch.rand(()), random.random()),
    }


class Nested(torch.optim.Adam):
    def step(self, closure=None):
        return super().step(closure)


result = {
    "SGD": train(torch.optim.SGD, lr=0.1, momentum=0.9),
    "SGD keyword": train(torch.optim.SGD, True, lr=0.1, momentum=0.9),
    "Adam fused": train(torch.optim.Adam, lr=0.02, eps=1e-4, fused=True),
    "Nested": train(Nested, True, lr=0.02, eps=1e-4),
    "LBFGS": train(torch.optim.LBFGS, steps=2, lr=0.2, max_iter=3),
    "LBFGS keyword": train(torch.optim.LBFGS, True, steps=2, lr=0.2, max_iter=3, history_size=2),
    "LBFGS search": train(torch.optim.LBFGS, steps=2, max_iter=2, line_search_fn="strong_wolfe"),
}
