"""e_gradient_penalty.py with mixed precision written by hand, after torch's own recipe."""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 2))
critic = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.0, 0.9))
d_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))
scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=INIT_SCALE,
    growth_interval=GROWTH_INTERVAL,
    enabled=DTYPE is torch.float16,
)
result = {"critic": [], "penalty": [], "generator": []}


def mixed(model, x):
    with torch.autocast("cpu", DTYPE):
        out = model(x)
    return out.float()


for step in range(36):
    real = torch.randn(8, 2) * 0.3 + 1
    fake = mixed(generator, torch.randn(8, 2))

    d_optimizer.zero_grad()
    mix = torch.lerp(real, fake.detach(), torch.rand(8, 1)).requires_grad_()
    (grad,) = torch.autograd.grad(scaler.scale(mixed(critic, mix).sum()), mix, create_graph=True)
    grad = grad * (1.0 / scaler.get_scale())
    penalty = (grad.norm(2, dim=1) - 1).pow(2).mean()
    loss = mixed(critic, fake.detach()).mean() - mixed(critic, real).mean() + penalty
    scaler.scale(loss).backward()
    scaler.step(d_optimizer)
    scaler.update()
    result["critic"].append(loss.item())
    result["penalty"].append(penalty.item())

    if step % 3 == 2:
        g_optimizer.zero_grad()
        loss = -mixed(critic, fake).mean()
        scaler.scale(loss).backward()
        scaler.step(g_optimizer)
        scaler.update()
        result["generator"].append(loss.item())

result["parameters"] = [p.detach() for m in (generator, critic) for p in m.parameters()]
