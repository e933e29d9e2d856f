"""Hessian-vector products: sharpness by power iteration, a trace by random signs, a short descent."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
parameters = list(model.parameters())
x = torch.randn(24, 3)
y = x.sum(1, keepdim=True).sin()
result = {"loss": [], "product": [], "sharpness": [], "trace": []}


def flat(tensors):
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


for step in range(5):
    loss = F.mse_loss(model(x), y)
    gradient = flat(torch.autograd.grad(loss, parameters, create_graph=True))

    def product(vector):
        return flat(torch.autograd.grad(gradient @ vector, parameters, retain_graph=True))

    vector = torch.ones_like(gradient) / gradient.numel() ** 0.5
    for _ in range(6):
        image = product(vector)
        result["product"].append(image)
        result["sharpness"].append((vector @ image).item())
        vector = image / image.norm()
    signs = torch.randint(2, (3, gradient.numel())) * 2.0 - 1
    result["trace"].append(sum(s @ product(s) for s in signs).item() / 3)
    (loss + 0.1 * gradient.pow(2).sum()).backward()  # down, and towards flat regions
    with torch.no_grad():
        for p in parameters:
            p -= 0.05 * p.grad
            p.grad = None
    result["loss"].append(loss.item())

result["parameters"] = [p.detach() for p in parameters]
