"""e_offload.py with mixed precision written by hand."""

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
inputs = torch.randn(24, 10, 4)
scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=INIT_SCALE,
    growth_interval=GROWTH_INTERVAL,
    enabled=DTYPE is torch.float16,
)
result = {"loss": [], "gradients": [], "packed": []}
shelf = []


def pack(tensor):
    shelf.append(tensor.numpy(force=True) if tensor.dtype is torch.float32 else tensor.detach().clone())
    return len(shelf) - 1


def unpack(index):
    return torch.as_tensor(shelf[index])


for step, x in enumerate(inputs):
    optimizer.zero_grad()
    with save_on_cpu() if step % 2 else saved_tensors_hooks(pack, unpack):
        with torch.autocast("cpu", DTYPE):
            predicted = model(x)
        loss = 0.2 * F.mse_loss(predicted.float(), x[:, :2].sin())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    result["loss"].append(loss.item())
    result["gradients"].append([p.grad.clone() for p in model.parameters()])
    result["packed"].append(len(shelf) > 0)
    shelf.clear()
    scaler.step(optimizer)
    scaler.update()

result["parameters"] = [p.detach() for p in model.parameters()]
