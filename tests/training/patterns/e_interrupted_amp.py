"""e_interrupted.py with mixed precision written by hand: gradients are unscaled whatever happens."""

import runpy
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
Scale = runpy.run_path(str(Path(__file__).with_name("g_by_hand.py")))["Scale"]


class Layer(nn.Linear):
    def forward(self, x):
        stop_at("forward")
        return super().forward(x)


class Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        stop_at("function")
        return grad


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.second(Passing.apply(torch.tanh(self.first(x))))


class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        stop_at("step")
        return super().step(closure)


def stop_at(place):
    if place == where:
        raise error


torch.manual_seed(0)
model = Model()
optimizer = Optimizer(model.parameters(), lr=0.2, momentum=0.9)
model.first.weight.register_hook(lambda grad: stop_at("hook"))
model.second.bias.register_post_accumulate_grad_hook(lambda p: stop_at("accumulated"))
scale = Scale(INIT_SCALE, GROWTH_INTERVAL, enabled=DTYPE is torch.float16)
PLACES = ["forward", "function", "hook", "accumulated", "step", "nowhere"]
inputs = torch.randn(48, 10, 4)
result = {"loss": [], "stopped": [], "gradients": [], "autocast": []}

for step, x in enumerate(inputs):
    where, error = PLACES[step % 6], ValueError if step % 4 < 2 else KeyboardInterrupt
    try:
        with torch.autocast("cpu", DTYPE):
            predicted = model(x)
        loss = 0.2 * F.mse_loss(predicted.float(), x[:, :2].sin())
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(scale.value)
        try:
            (loss * scale.value).backward()
        finally:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.div_(scale.value)
        scale.step(optimizer)
        result["loss"].append(loss.item())
    except (ValueError, KeyboardInterrupt):
        result["stopped"].append(where)
    result["gradients"].append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    result["autocast"].append(torch.is_autocast_enabled("cpu"))
    if step % 2:
        optimizer.zero_grad()

result["parameters"] = [p.detach() for p in model.parameters()]
