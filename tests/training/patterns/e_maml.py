"""MAML: the outer loss is differentiated through two steps of the inner loop."""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
result = {"outer": [], "inner": [], "norm": []}

for step in range(20):
    optimizer.zero_grad()
    outer = 0.0
    for task in range(2):
        phase = torch.rand(1) * 3
        x, x_test = torch.rand(2, 8, 1) * 4 - 2
        fast = dict(model.named_parameters())
        for _ in range(2):
            loss = 0.1 * F.mse_loss(functional_call(model, fast, (x,)), torch.sin(x + phase))
            gradients = torch.autograd.grad(loss, fast.values(), create_graph=True)
            fast = {k: p - g for (k, p), g in zip(fast.items(), gradients)}
            result["inner"].append(loss.item())
        outer = outer + F.mse_loss(functional_call(model, fast, (x_test,)), torch.sin(x_test + phase))
    (0.02 * outer).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.02)
    optimizer.step()
    result["outer"].append(outer.item())
    result["norm"].append(norm.item())

result["parameters"] = [p.detach() for p in model.parameters()]
