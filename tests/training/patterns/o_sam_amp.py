"""o_sam.py with mixed precision written by hand."""

import torch
from torch import nn

scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=INIT_SCALE,
    growth_interval=GROWTH_INTERVAL,
    enabled=DTYPE is torch.float16,
)


class SAM(torch.optim.Optimizer):
    """As in github.com/davda54/sam."""

    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        grad_norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))  # climb to the local maximum "w + e(w)"
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]  # get back to "w" from "w + e(w)"
        scaler.step(self.base_optimizer)
        scaler.update()  # do the actual "sharpness-aware" update
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()

    def _grad_norm(self):
        return torch.norm(
            torch.stack(
                [p.grad.norm(p=2) for group in self.param_groups for p in group["params"]]
            ),
            p=2,
        )


def loss_of(model, x, y):
    with torch.autocast("cpu", DTYPE):
        logits = model(x)
    return nn.functional.cross_entropy(logits.float(), y)


def train(base, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    optimizer = SAM(model.parameters(), base, **options)
    losses, parameters = [], []
    for _ in range(14):
        loss = loss_of(model, x, y)
        scaler.scale(loss).backward()
        for p in model.parameters():
            p.grad /= scaler.get_scale()
        optimizer.first_step(zero_grad=True)
        scaler.scale(loss_of(model, x, y)).backward()
        optimizer.second_step(zero_grad=True)
        losses.append(loss.item())
        parameters.append([p.detach().clone() for p in model.parameters()])
    return {"losses": losses, "parameters": parameters}


result = {
    "SGD": train(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": train(torch.optim.Adam, lr=0.02),
    "Adam fused": train(torch.optim.Adam, lr=0.02, fused=True),
}
