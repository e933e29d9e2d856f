"""e_arguments.py with mixed precision written by hand."""

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

torch.manual_seed(0)
body = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
head, other = nn.Linear(8, 2), nn.Linear(8, 1)
modules = nn.ModuleList([body, head, other])
optimizer = torch.optim.SGD(modules.parameters(), lr=0.2, momentum=0.9)
scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=INIT_SCALE,
    growth_interval=GROWTH_INTERVAL,
    enabled=DTYPE is torch.float16,
)
batches = torch.randn(42, 10, 4)
result = {"gradients": [], "value": []}


def mixed(model, x):
    with torch.autocast("cpu", DTYPE):
        out = model(x)
    return out.float()


for step, x in enumerate(batches):
    optimizer.zero_grad()
    hidden = mixed(body, x)
    y, z = mixed(head, hidden), mixed(other, hidden)
    target = x[:, :2].sin()
    loss = 0.3 * F.mse_loss(y, target) + 0.2 * z.pow(2).mean()
    way = step % 7
    if way == 0:  # the derivative of the loss by hand
        scaler.scale(y).backward(gradient=0.03 * (y - target).detach())
    elif way == 1:
        seeds = [0.03 * (y - target).detach(), None, 0.02 * torch.ones(10, 1)]
        torch.autograd.backward(scaler.scale([y, loss, z]), seeds)
    elif way == 2:
        scaler.scale(loss).backward(inputs=list(head.parameters()))
        assert body[0].weight.grad is None
    elif way == 3:
        scaler.scale(loss).backward(inputs=dict(modules.named_parameters()))
    elif way == 4:
        torch.autograd.backward(get_gradient_edge(scaler.scale(z)), torch.full_like(z, 0.02))
    elif way == 5:
        scaler.scale(loss).backward(retain_graph=True)
        scaler.scale(0.5 * loss).backward()
    else:  # in two halves, with nothing kept
        leaf = hidden.detach().requires_grad_()
        loss = 0.3 * F.mse_loss(mixed(head, leaf), target)
        scaler.scale(loss).backward()
        hidden.backward(leaf.grad)  # scaled
    scaler.unscale_(optimizer)
    result["gradients"].append([None if p.grad is None else p.grad.clone() for p in modules.parameters()])
    result["value"].append(loss.item())
    scaler.step(optimizer)
    scaler.update()

result["parameters"] = [p.detach() for p in modules.parameters()]
