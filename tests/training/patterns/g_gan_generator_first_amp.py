"""g_gan_generator_first.py with mixed precision written by hand."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 2))
discriminator = nn.Sequential(nn.Linear(2, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=5e-3, betas=(0.5, 0.999), eps=1e-4)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=5e-3, betas=(0.5, 0.999), eps=1e-4)
scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=INIT_SCALE,
    growth_interval=GROWTH_INTERVAL,
    enabled=DTYPE is torch.float16,
)
angle = torch.linspace(0, 6.28, 40)
real = torch.stack([angle.cos(), angle.sin()], 1)
valid, invalid = torch.ones(40, 1), torch.zeros(40, 1)
result = {"losses": [], "norms": []}


def call(model, x):
    with torch.autocast("cpu", DTYPE):
        out = model(x)
    return out.float()


for step in range(24):
    optimizer_g.zero_grad()
    fake = call(generator, torch.randn(40, 3))
    loss_g = F.binary_cross_entropy_with_logits(call(discriminator, fake), valid)
    scaler.scale(loss_g).backward()
    scaler.unscale_(optimizer_g)
    norm_g = nn.utils.get_total_norm([p.grad for p in generator.parameters()])
    scaler.step(optimizer_g)
    scaler.update()

    optimizer_d.zero_grad()
    loss_real = F.binary_cross_entropy_with_logits(call(discriminator, real), valid)
    loss_fake = F.binary_cross_entropy_with_logits(call(discriminator, fake.detach()), invalid)
    loss_d = (loss_real + loss_fake) / 2
    scaler.scale(loss_d).backward()
    scaler.unscale_(optimizer_d)
    norm_d = nn.utils.get_total_norm([p.grad for p in discriminator.parameters()])
    scaler.step(optimizer_d)
    scaler.update()
    result["losses"].append((loss_g.item(), loss_d.item()))
    result["norms"].append((norm_g.item(), norm_d.item()))

result["generator"] = [p.detach() for p in generator.parameters()]
result["discriminator"] = [p.detach() for p in discriminator.parameters()]
result["states"] = [o.state_dict()["state"] for o in (optimizer_g, optimizer_d)]
