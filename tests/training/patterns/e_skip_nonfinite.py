"""The script itself leaves out steps whose gradient norm is not finite, in two spellings."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
models = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(2)]
models[1].load_state_dict(models[0].state_dict())
optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in models]
x = torch.randn(10, 4)
result = {"loss": [[], []], "stepped": [[], []], "parameters": [[], []]}

for step in range(60):
    for index, (model, optimizer) in enumerate(zip(models, optimizers)):
        loss = 4 * F.mse_loss(model(x), 2 * x.sum(1, keepdim=True).sin())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm.isfinite():
            optimizer.step()
        optimizer.zero_grad(set_to_none=index == 0)
        result["stepped"][index].append(norm.isfinite().item())
        result["loss"][index].append(loss.item())
        result["parameters"][index].append([p.detach().clone() for p in model.parameters()])
