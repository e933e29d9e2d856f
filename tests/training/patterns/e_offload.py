"""What backward needs is kept elsewhere: in main memory, in a list, in fewer bits."""

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
inputs = torch.randn(24, 10, 4)
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
        loss = 0.2 * F.mse_loss(model(x), x[:, :2].sin())
    loss.backward()
    result["loss"].append(loss.item())
    result["gradients"].append([p.grad.clone() for p in model.parameters()])
    result["packed"].append(len(shelf) > 0)
    shelf.clear()
    optimizer.step()

result["parameters"] = [p.detach() for p in model.parameters()]
