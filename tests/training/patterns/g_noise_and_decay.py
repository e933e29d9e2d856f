"""Weight decay and annealed noise, added to the gradients by hand."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 12), nn.GELU(), nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, labels = torch.randn(40, 5), torch.randint(2, (40,))
result = {"loss": [], "gradients": []}

for step in range(30):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.grad.add_(p, alpha=0.01)
            p.grad = p.grad + torch.randn_like(p.grad) * (0.01 / (1 + step) ** 0.55)
    optimizer.step()
    result["loss"].append(loss.item())
    result["gradients"].append([p.grad.clone() for p in model.parameters()])

result["parameters"] = [p.detach() for p in model.parameters()]
