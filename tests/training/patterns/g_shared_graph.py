"""Two losses share a graph and have a backward each; two optimizers step, one after the other.

Then both losses go through one call of `torch.autograd.backward`.
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
trunk = nn.Sequential(nn.Linear(6, 10), nn.Tanh())
classify, regress = nn.Linear(10, 3), nn.Linear(10, 1)
optimizer_a = torch.optim.SGD([*trunk.parameters(), *classify.parameters()], lr=0.2)
optimizer_b = torch.optim.Adam(regress.parameters(), lr=1e-2)
inputs, labels = torch.randn(30, 6), torch.randint(3, (30,))
targets = inputs[:, :1].exp()
result = {"losses": [], "gradients": []}

for step in range(30):
    optimizer_a.zero_grad()
    optimizer_b.zero_grad()
    hidden = trunk(inputs)
    loss_a = F.cross_entropy(classify(hidden), labels)
    loss_b = F.smooth_l1_loss(regress(hidden), targets)
    if step % 2:
        loss_a.backward(retain_graph=True)
        (0.1 * loss_b).backward()
    else:
        torch.autograd.backward([loss_a, 0.1 * loss_b])
    models = (trunk, classify, regress)
    result["gradients"].append([p.grad.clone() for model in models for p in model.parameters()])
    optimizer_a.step()
    optimizer_b.step()
    result["losses"].append((loss_a.item(), loss_b.item()))

result["parameters"] = [p.detach() for model in models for p in model.parameters()]
