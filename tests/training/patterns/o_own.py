"""Optimizers that a script defines: a rule of its own, and Lookahead around another one."""

import torch
from torch import nn


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(parameters, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            slow, fast = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                average = state["average"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(average.lerp(p.grad, 1 - slow).sign_(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - fast)
        return loss


class Nested(Lion):
    """Changes something around the step of its parent."""

    def step(self, closure=None, factor=1.0):
        for group in self.param_groups:
            group["lr"] *= factor
        return super().step(closure)


class Lookahead(torch.optim.Optimizer):
    """Zhang et al. 2019, an optimizer around an optimizer."""

    def __init__(self, base, every=3, alpha=0.5):
        super().__init__(base.param_groups, dict(every=every, alpha=alpha))
        self.base, self.count = base, 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.base.step(closure)
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                if self.count % group["every"] == 0:
                    slow.lerp_(p, group["alpha"])
                    p.copy_(slow)
        return loss


class Wrapper:
    """The same, and no `torch.optim.Optimizer`: it only holds one."""

    def __init__(self, base, every=3, alpha=0.5):
        self.base, self.every, self.alpha, self.count = base, every, alpha, 0
        self.zero_grad, self.state_dict = base.zero_grad, base.state_dict
        self.slow = [p.detach().clone() for g in base.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self):
        self.base.step()
        self.count += 1
        if self.count % self.every == 0:
            fast = [p for g in self.base.param_groups for p in g["params"]]
            for slow, p in zip(self.slow, fast):
                slow.lerp_(p, self.alpha)
                p.copy_(slow)


def train(make, **arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    optimizer = make(model.parameters())
    losses = []
    for _ in range(14):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step(**arguments)
        losses.append(loss.item())
    return {
        "losses": losses,
        "parameters": [p.detach().clone() for p in model.parameters()],
        "state": optimizer.state_dict()["state"],
    }


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


result = {
    "Lion": train(Lion),
    "Nested": train(Nested, factor=0.9),
    "Lookahead": train(lambda p: Lookahead(adam(p))),
    "Lookahead of Lion": train(lambda p: Lookahead(Lion(p))),
    "twice": train(lambda p: Lookahead(Lookahead(adam(p)), every=2)),
    "Wrapper": train(lambda p: Wrapper(adam(p))),
}
