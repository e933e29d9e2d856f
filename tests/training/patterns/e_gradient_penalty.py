"""WGAN-GP: the critic's gradient at points between real and generated ones is kept near one."""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 2))
critic = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.0, 0.9))
d_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))
result = {"critic": [], "penalty": [], "generator": []}

for step in range(36):
    real = torch.randn(8, 2) * 0.3 + 1
    fake = generator(torch.randn(8, 2))

    d_optimizer.zero_grad()
    mix = torch.lerp(real, fake.detach(), torch.rand(8, 1)).requires_grad_()
    (grad,) = torch.autograd.grad(critic(mix).sum(), mix, create_graph=True)
    penalty = (grad.norm(2, dim=1) - 1).pow(2).mean()
    loss = critic(fake.detach()).mean() - critic(real).mean() + penalty
    loss.backward()
    d_optimizer.step()
    result["critic"].append(loss.item())
    result["penalty"].append(penalty.item())

    if step % 3 == 2:
        g_optimizer.zero_grad()
        loss = -critic(fake).mean()
        loss.backward()
        g_optimizer.step()
        result["generator"].append(loss.item())

result["parameters"] = [p.detach() for m in (generator, critic) for p in m.parameters()]
