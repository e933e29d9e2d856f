"""g_gan_critic_first.py with mixed precision written by hand."""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 2))
critic = nn.Sequential(nn.Linear(2, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1, bias=False))
optimizer_g = torch.optim.RMSprop(generator.parameters(), lr=2e-3, eps=1e-2)
optimizer_c = torch.optim.RMSprop(critic.parameters(), lr=2e-3, eps=1e-2)
scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=INIT_SCALE,
    growth_interval=GROWTH_INTERVAL,
    enabled=DTYPE is torch.float16,
)
angle = torch.linspace(0, 6.28, 40)
real = torch.stack([angle.cos(), angle.sin()], 1)
result = {"losses": [], "parameters": []}


def call(model, x):
    with torch.autocast("cpu", DTYPE):
        out = model(x)
    return out.float()


for step in range(36):
    critic.zero_grad()
    fake = call(generator, torch.randn(40, 3))
    loss_real = -call(critic, real).mean()
    loss_fake = call(critic, fake).mean()
    scaler.scale(loss_real).backward()
    scaler.scale(loss_fake).backward(retain_graph=True)
    scaler.step(optimizer_c)
    scaler.update()
    for p in critic.parameters():
        p.data.clamp_(-0.3, 0.3)
    result["losses"].append((loss_real.item(), loss_fake.item()))

    if step % 3 == 2:
        generator.zero_grad()
        loss_g = -call(critic, fake).mean()
        scaler.scale(loss_g).backward()
        scaler.step(optimizer_g)
        scaler.update()
        result["losses"].append(loss_g.item())
        result["parameters"].append([p.detach().clone() for p in generator.parameters()])

result["critic"] = [p.detach() for p in critic.parameters()]
result["states"] = [o.state_dict()["state"] for o in (optimizer_g, optimizer_c)]
