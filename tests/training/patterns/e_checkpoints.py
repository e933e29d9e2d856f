"""Activations are computed again in backward: both kinds of torch's checkpoints, with dropout."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)
        )
        self.last = nn.Linear(8, 2)

    def forward(self, x, reentrant):
        x = self.first(x)
        x = checkpoint(self.blocks[0], x, use_reentrant=reentrant)
        x = checkpoint(lambda x: self.blocks[1](x) + x, x, use_reentrant=reentrant)
        x = checkpoint_sequential(self.blocks[2:], 2, x, use_reentrant=reentrant)
        return self.last(x)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
inputs = torch.randn(24, 10, 4)
result = {"loss": [], "gradients": []}

for step, x in enumerate(inputs):
    optimizer.zero_grad()
    if step % 4 == 3:
        x.requires_grad_()
    loss = 0.2 * F.mse_loss(model(x, reentrant=step % 2 == 1), x[:, :2].sin())
    loss.backward()
    result["loss"].append(loss.item())
    result["gradients"].append([p.grad.clone() for p in model.parameters()])
    optimizer.step()

result["parameters"] = [p.detach() for p in model.parameters()]
