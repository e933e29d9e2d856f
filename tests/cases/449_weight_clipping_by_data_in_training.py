# Pattern: WGAN critic: p.data.clamp_ after each step, p.data of a target network copied
# Must hold under AMP: what the next forward uses is clipped, the target follows
import torch, torch.nn as nn
torch.manual_seed(0)
net, target = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
opt = torch.optim.RMSprop(net.parameters(), lr=0.5); x = torch.ones(2, 4)
for _ in range(5):
    opt.zero_grad(); (-net(x).mean()).backward(); opt.step()
    for p in net.parameters(): p.data.clamp_(-0.25, 0.25)
    assert net(x).abs().max().item() <= 1.0 + 1e-2, net(x)
    for t, p in zip(target.parameters(), net.parameters()): t.data.copy_(t.data * 0.5 + p.data * 0.5)
    want = (target.weight.sum()).item()
    assert abs(target(x)[0].item() - want) < 2e-2, (target(x), want)
