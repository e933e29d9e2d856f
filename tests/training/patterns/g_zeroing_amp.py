"""g_zeroing.py with mixed precision written by hand."""

import torch
from torch import nn
from torch.nn import functional as F


def with_a_loop(model, optimizer):
    for p in model.parameters():
        p.grad = None


def in_place(model, optimizer):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.detach_()
            p.grad.zero_()


def through_data(model, optimizer):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.zero_()


def with_fresh_zeros(model, optimizer):
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


WAYS = [
    lambda model, optimizer: optimizer.zero_grad(),
    lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    lambda model, optimizer: model.zero_grad(),
    lambda model, optimizer: model.zero_grad(set_to_none=False),
    with_a_loop,
    in_place,
    through_data,
    with_fresh_zeros,
]
PLACES = ["first", "before backward", "after step"]

torch.manual_seed(0)
inputs, labels = torch.randn(16, 10, 4), torch.randint(3, (16, 10))
scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=INIT_SCALE,
    growth_interval=GROWTH_INTERVAL,
    enabled=DTYPE is torch.float16,
)
result = {}

for way, clear in enumerate(WAYS):
    for place in PLACES:
        torch.manual_seed(way)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        losses, gradients = [], []
        for x, y in zip(inputs, labels):
            if place == "first":
                clear(model, optimizer)
            with torch.autocast("cpu", DTYPE):
                logits = model(x)
            loss = F.cross_entropy(logits.float(), y)
            if place == "before backward":
                clear(model, optimizer)
            scaler.scale(loss).backward()
            losses.append(loss.item())
            scaler.unscale_(optimizer)
            gradients.append([p.grad.clone() for p in model.parameters()])
            scaler.step(optimizer)
            scaler.update()
            if place == "after step":
                clear(model, optimizer)
        result[way, place] = losses, gradients, [p.detach() for p in model.parameters()]
