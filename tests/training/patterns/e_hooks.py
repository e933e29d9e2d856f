"""Hooks of every kind: they look at gradients, clamp them, and feed statistics."""

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
inputs = torch.randn(30, 10, 4)
result = {"loss": []}
LIMIT = 2.0**-10


def see(name, grad):
    result.setdefault(name, []).append(grad.detach().float().clone())


def clamp(grad):
    see("clamped", grad) if grad.shape == (8, 4) else see("activation", grad)
    return grad.clamp(-LIMIT, LIMIT)


def halve(grad):
    grad.mul_(0.5)


def module_hook(module, grad_input, grad_output):
    see("of a module", grad_output[0])
    return (grad_input[0] * 0.5,)


def keep(module, args, out):
    out.register_hook(clamp)


model[0].weight.register_hook(clamp)
model[2].weight.register_hook(halve)
model[2].bias.register_hook(lambda grad: see("bias", grad))
model[2].register_full_backward_hook(module_hook)
model[4].register_full_backward_pre_hook(lambda module, grads: see("before a module", grads[0]))
model[1].register_forward_hook(keep)
model[4].bias.register_post_accumulate_grad_hook(lambda p: see("accumulated", p.grad))
register_multi_grad_hook([model[0].bias, model[2].weight], lambda grads: [see("several", g) for g in grads])

for x in inputs:
    optimizer.zero_grad()
    loss = 0.2 * F.mse_loss(model(x), x[:, :2].sin())
    loss.backward()
    result["loss"].append(loss.item())
    optimizer.step()

result["parameters"] = [p.detach() for p in model.parameters()]
