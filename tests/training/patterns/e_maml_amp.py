"""e_maml.py with mixed precision written by hand."""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=INIT_SCALE,
    growth_interval=GROWTH_INTERVAL,
    enabled=DTYPE is torch.float16,
)
result = {"outer": [], "inner": [], "norm": []}

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


def predict(fast, x):
    with torch.autocast("cpu", DTYPE):
        out = functional_call(model, fast, (x,))
    return out.float()


for step in range(20):
    optimizer.zero_grad()
    outer = 0.0
    for task in range(2):
        phase = torch.rand(1) * 3
        x, x_test = torch.rand(2, 8, 1) * 4 - 2
        fast = dict(model.named_parameters())
        for _ in range(2):
            loss = 0.1 * F.mse_loss(predict(fast, x), torch.sin(x + phase))
            gradients = derivative(loss, list(fast.values()))
            fast = {k: p - g for (k, p), g in zip(fast.items(), gradients)}
            result["inner"].append(loss.item())
        outer = outer + F.mse_loss(predict(fast, x_test), torch.sin(x_test + phase))
    scaler.scale(0.02 * outer).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.02)
    scaler.step(optimizer)
    scaler.update()
    result["outer"].append(outer.item())
    result["norm"].append(norm.item())

result["parameters"] = [p.detach() for p in model.parameters()]
