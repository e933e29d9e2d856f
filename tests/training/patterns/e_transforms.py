"""torch.func: private training with clipped gradients of each sample, an ensemble, Jacobians."""

import warnings

import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev
from torch.func import stack_module_state, vjp, vmap
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
inputs = torch.randn(16, 8, 3)
targets = torch.stack([inputs.sum(-1).sin(), inputs[..., 0].cos()], -1)
result = {"norms": [], "loss": [], "ensemble": []}


def loss_of(parameters, x, y):
    return F.mse_loss(functional_call(model, parameters, (x[None],))[0], y)


for x, y in zip(inputs, targets):
    parameters = {k: p.detach() for k, p in model.named_parameters()}
    each, losses = vmap(grad_and_value(loss_of), in_dims=(None, 0, 0))(parameters, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
    factors = (0.3 / norms).clamp(max=1)
    for name, p in model.named_parameters():
        p.grad = torch.einsum("b,b...->...", factors, each[name]) / len(x)
    optimizer.step()
    result["norms"].append(norms)
    result["loss"].append(losses.mean().item())

x = inputs[0]
result["tiny"] = grad(lambda x: (model(x) * 2.0**-20).sum())(x)
result["jacrev"] = jacrev(model)(x[0])
result["each jacrev"] = vmap(jacrev(model))(x)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.jit.script, when forward mode is used for the first time
    result["jacfwd"] = jacfwd(model)(x[0])
    result["hessian"] = hessian(lambda x: model(x).pow(2).sum())(x[0])
result["vjp"] = vjp(model, x)[1](torch.ones(8, 2))[0].detach()

ensemble = [nn.Linear(3, 2) for _ in range(3)]
state, _ = stack_module_state(ensemble)
optimizer = torch.optim.Adam(state.values(), lr=0.05)
for x, y in zip(inputs[:8], targets[:8]):
    predicted = vmap(lambda p, x: functional_call(ensemble[0], p, (x,)), (0, None))(state, x)
    loss = 0.1 * F.mse_loss(predicted, y.expand(3, -1, -1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    result["ensemble"].append(loss.item())

result["parameters"] = [p.detach() for p in model.parameters()]
result["ensemble parameters"] = [p.detach() for p in state.values()]
