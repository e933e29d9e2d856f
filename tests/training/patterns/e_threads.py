"""Two training loops in two threads."""

import threading

import torch
from torch import nn
from torch.nn import functional as F


def train(seed):
    generator = torch.Generator().manual_seed(seed)
    model = models[seed]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    losses = []
    for step in range(40):
        x = torch.randn(10, 4, generator=generator)
        loss = 0.2 * F.mse_loss(model(x), x[:, :2].sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        both.wait()
    result[seed] = losses


torch.manual_seed(0)
models = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(2)]
both = threading.Barrier(2, timeout=60)
result = {}
threads = [threading.Thread(target=train, args=(seed,)) for seed in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

result["parameters"] = [p.detach() for model in models for p in model.parameters()]
