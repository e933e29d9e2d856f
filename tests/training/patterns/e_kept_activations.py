"""Forward hooks keep activations: for a loss on features, and for maps of what a class looks at."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
teacher = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 3), nn.Flatten(), nn.Linear(48, 3))
student = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 3), nn.Flatten(), nn.Linear(48, 3))
optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
inputs, labels = torch.randn(16, 6, 1, 8, 8), torch.randint(3, (16, 6))
result = {"loss": [], "maps": []}
kept = {}

for name, model in (("teacher", teacher), ("student", student)):
    for index in (0, 2):
        model[index].register_forward_hook(
            lambda module, args, out, key=(name, index): kept.__setitem__(key, out)
        )

for x, y in zip(inputs, labels):
    optimizer.zero_grad()
    with torch.no_grad():
        teacher(x)
    loss = 0.1 * F.cross_entropy(student(x), y)
    for index in (0, 2):
        loss = loss + 0.1 * F.mse_loss(kept["student", index].float(), kept["teacher", index].float())
    loss.backward()
    optimizer.step()
    result["loss"].append(loss.item())

for x in inputs[:3]:
    score = student(x)[:, 0].sum()
    (grad,) = torch.autograd.grad(score, kept["student", 2])
    weights = grad.float().mean(dim=(2, 3), keepdim=True)
    result["maps"].append(F.relu((weights * kept["student", 2].float()).sum(1)).detach())

result["parameters"] = [p.detach() for p in student.parameters()]
