"""torch.autograd.functional, and gradients for many seeds at once."""

import torch
from torch import nn
from torch.autograd import functional

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
x = torch.randn(4, 3, requires_grad=True)


def energy(x):
    return model(x).pow(2).sum()


result = {
    "jacobian": functional.jacobian(model, x),
    "jacobian at once": functional.jacobian(model, x, vectorize=True),
    "hessian": functional.hessian(energy, x),
    "hessian at once": functional.hessian(energy, x, vectorize=True),
    "hvp": functional.hvp(energy, x, torch.ones_like(x)),
    "vhp": functional.vhp(energy, x, torch.ones_like(x)),
    "vjp": functional.vjp(model, x, torch.ones(4, 2)),
    "jvp": functional.jvp(model, x, torch.ones_like(x)),
}
seeds = torch.randn(5, 4, 2)
result["batched"] = torch.autograd.grad(model(x), x, seeds, is_grads_batched=True)
result["one by one"] = [torch.autograd.grad(model(x), x, seed)[0] for seed in seeds]
result["by name"] = torch.autograd.grad(model(x).sum(), dict(model.named_parameters()))
result["unused"] = torch.autograd.grad(
    model(x).sum(), (x, torch.ones(2, requires_grad=True)), allow_unused=True, materialize_grads=True
)
result["edge"] = torch.autograd.grad(
    torch.autograd.graph.get_gradient_edge(energy(x)), model[0].weight
)
