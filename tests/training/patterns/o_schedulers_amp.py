"""o_schedulers.py with mixed precision written by hand."""

import torch
from torch import nn

scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=INIT_SCALE,
    growth_interval=GROWTH_INTERVAL,
    enabled=DTYPE is torch.float16,
)
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

ARGUMENTS = {
    "LambdaLR": dict(lr_lambda=lambda step: 0.9**step),
    "MultiplicativeLR": dict(lr_lambda=lambda step: 0.9),
    "StepLR": dict(step_size=2),
    "MultiStepLR": dict(milestones=[2, 5]),
    "ConstantLR": dict(total_iters=3),
    "LinearLR": dict(total_iters=6),
    "ExponentialLR": dict(gamma=0.9),
    "PolynomialLR": dict(total_iters=20, power=2.0),
    "CosineAnnealingLR": dict(T_max=8),
    "CyclicLR": dict(base_lr=0.01, max_lr=0.1, step_size_up=3),
    "CosineAnnealingWarmRestarts": dict(T_0=3),
    "OneCycleLR": dict(max_lr=0.1, total_steps=20),
    "ReduceLROnPlateau": dict(patience=1, threshold=0.05),
    "SWALR": dict(swa_lr=0.01, anneal_epochs=5),
}


def make(name, optimizer):
    if name == "SequentialLR":
        first = lr_scheduler.LinearLR(optimizer, total_iters=3)
        rest = lr_scheduler.ExponentialLR(optimizer, 0.8)
        return lr_scheduler.SequentialLR(optimizer, [first, rest], milestones=[4])
    if name == "ChainedScheduler":
        chained = lr_scheduler.StepLR(optimizer, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)
        return lr_scheduler.ChainedScheduler(list(chained), optimizer)
    cls = SWALR if name == "SWALR" else getattr(lr_scheduler, name)
    return cls(optimizer, **ARGUMENTS[name])


def train(names, every=1, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)
    schedulers = [make(name, optimizer) for name in names]
    optimizer._opt_called = True  # or torch warns when the first step is skipped
    losses, rates = [], []
    for step in range(15):
        optimizer.zero_grad()
        with torch.autocast("cpu", DTYPE):
            logits = model(x)
        loss = nn.functional.cross_entropy(logits.float(), y)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        held = globals().get("HOLD", False) and scaler.get_scale() < before
        losses.append(loss.item())
        for name, scheduler in zip(names, schedulers):
            if step % every == every - 1 and not held:
                if name == "ReduceLROnPlateau":
                    scheduler.step(loss.item())
                else:
                    scheduler.step()
        rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
    return {
        "losses": losses,
        "rates": rates,
        "parameters": [p.detach().clone() for p in model.parameters()],
        "epochs": [scheduler.state_dict().get("last_epoch") for scheduler in schedulers],
    }


abstract = ("LRScheduler", "_LRScheduler")
names = [
    name
    for name, value in vars(lr_scheduler).items()
    if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler)
]
names = [name for name in (*names, "SWALR") if name not in abstract]
result = {name: train([name]) for name in names}
result |= {f"{name} every 3": train([name], every=3) for name in names}
result["two"] = train(["ExponentialLR", "ReduceLROnPlateau"])
