"""A GAN that trains the generator first; its backward leaves gradients in the discriminator too."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 2))
discriminator = nn.Sequential(nn.Linear(2, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=5e-3, betas=(0.5, 0.999), eps=1e-4)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=5e-3, betas=(0.5, 0.999), eps=1e-4)
angle = torch.linspace(0, 6.28, 40)
real = torch.stack([angle.cos(), angle.sin()], 1)
valid, invalid = torch.ones(40, 1), torch.zeros(40, 1)
result = {"losses": [], "norms": []}

for step in range(24):
    optimizer_g.zero_grad()
    fake = generator(torch.randn(40, 3))
    loss_g = F.binary_cross_entropy_with_logits(discriminator(fake), valid)
    loss_g.backward()
    norm_g = nn.utils.get_total_norm([p.grad for p in generator.parameters()])
    optimizer_g.step()

    optimizer_d.zero_grad()
    loss_real = F.binary_cross_entropy_with_logits(discriminator(real), valid)
    loss_fake = F.binary_cross_entropy_with_logits(discriminator(fake.detach()), invalid)
    loss_d = (loss_real + loss_fake) / 2
    loss_d.backward()
    norm_d = nn.utils.get_total_norm([p.grad for p in discriminator.parameters()])
    optimizer_d.step()
    result["losses"].append((loss_g.item(), loss_d.item()))
    result["norms"].append((norm_g.item(), norm_d.item()))

result["generator"] = [p.detach() for p in generator.parameters()]
result["discriminator"] = [p.detach() for p in discriminator.parameters()]
result["states"] = [o.state_dict()["state"] for o in (optimizer_g, optimizer_d)]
