"""A Wasserstein GAN: the critic first, weights clipped; the generator steps every third time.

The critic's loss is not cut off from the generator, which therefore collects gradients that are
thrown away.
"""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 2))
critic = nn.Sequential(nn.Linear(2, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1, bias=False))
optimizer_g = torch.optim.RMSprop(generator.parameters(), lr=2e-3, eps=1e-2)
optimizer_c = torch.optim.RMSprop(critic.parameters(), lr=2e-3, eps=1e-2)
angle = torch.linspace(0, 6.28, 40)
real = torch.stack([angle.cos(), angle.sin()], 1)
result = {"losses": [], "parameters": []}

for step in range(36):
    critic.zero_grad()
    fake = generator(torch.randn(40, 3))
    loss_real = -critic(real).mean()
    loss_fake = critic(fake).mean()
    loss_real.backward()
    loss_fake.backward(retain_graph=True)
    optimizer_c.step()
    for p in critic.parameters():
        p.data.clamp_(-0.3, 0.3)
    result["losses"].append((loss_real.item(), loss_fake.item()))

    if step % 3 == 2:
        generator.zero_grad()
        loss_g = -critic(fake).mean()
        loss_g.backward()
        optimizer_g.step()
        result["losses"].append(loss_g.item())
        result["parameters"].append([p.detach().clone() for p in generator.parameters()])

result["critic"] = [p.detach() for p in critic.parameters()]
result["states"] = [o.state_dict()["state"] for o in (optimizer_g, optimizer_c)]
