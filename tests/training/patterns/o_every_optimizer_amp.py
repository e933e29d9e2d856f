import inspect

import torch
from torch import nn

FORMS = [{}, {"foreach": True}, {"fused": True}, {"maximize": True}, {"weight_decay": 0.01}]
FORMS += [{"amsgrad": True}, {"momentum": 0.9}, {"nesterov": True, "momentum": 0.9}]
NEED_MORE = (torch.optim.LBFGS, torch.optim.SparseAdam)  # a closure, sparse gradients


def optimizers():
    for cls in vars(torch.optim).values():
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer):
            if cls is not torch.optim.Optimizer and cls not in NEED_MORE:
                known = inspect.signature(cls).parameters
                yield from ((cls, form) for form in FORMS if form.keys() <= known.keys())


def train(cls, form):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    parameters = list(model.parameters())
    if cls.__name__ == "Muon":  # matrices only
        parameters = [p for p in parameters if p.ndim == 2]
    optimizer = cls(parameters, lr=0.01, **form)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", DTYPE):
            logits = model(x)
        loss = nn.functional.cross_entropy(logits.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return {
        "losses": losses,
        "parameters": [p.detach().clone() for p in model.parameters()],
        "state": optimizer.state_dict()["state"],
    }


scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=INIT_SCALE,
    growth_interval=GROWTH_INTERVAL,
    enabled=DTYPE is torch.float16,
)
result = {f"{cls.__name__} {form}": train(cls, form) for cls, form in optimizers()}
