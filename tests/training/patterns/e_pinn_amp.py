"""e_pinn.py with mixed precision written by hand."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=INIT_SCALE,
    growth_interval=GROWTH_INTERVAL,
    enabled=DTYPE is torch.float16,
)
t = torch.linspace(0, 2, 16)[:, None].requires_grad_()
result = {"loss": [], "first": [], "second": []}

limit, good = float("inf"), 0


def derivative(outputs, inputs):
    """True gradients, finite ones: nobody else would skip what becomes of them."""
    global limit, good
    first = scale = min(scaler.get_scale(), limit)
    while True:
        seeds = torch.full_like(outputs, scale)
        gradients = torch.autograd.grad(outputs, inputs, seeds, create_graph=True)
        if scale <= 1 or all(g.isfinite().all() for g in gradients):
            break
        scale /= 2
    limit, good = (scale, 0) if scale < first else (limit, good + 1)
    if good == GROWTH_INTERVAL:
        limit, good = limit * 2, 0
    return [g * (1 / scale) for g in gradients]


for step in range(24):
    with torch.autocast("cpu", DTYPE):
        u = model(t)
    u = u.float()
    (du,) = derivative(u, [t])
    (ddu,) = derivative(du, [t])
    loss = 0.05 * ((ddu + u).pow(2).mean() + u[0, 0].pow(2) + (du[0, 0] - 1).pow(2))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    result["loss"].append(loss.item())
    result["first"].append(du.detach().clone())
    result["second"].append(ddu.detach().clone())

result["parameters"] = [p.detach() for p in model.parameters()]
