"""Averages of weights: EMA, SWA with its scheduler, batch statistics at the end."""

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
x, y = torch.randn(8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
swa_scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
swa, ema = AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
result = {"losses": [], "rates": []}

for step in range(20):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    ema.update_parameters(model)
    if step >= 12:
        swa.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
    result["losses"].append(loss.item())
    result["rates"].append(optimizer.param_groups[0]["lr"])

update_bn([x[:4], x[4:]], swa)
swa.eval()
with torch.no_grad():
    result["swa out"] = swa(x)
result["swa"] = {k: v.clone() for k, v in swa.state_dict().items()}
result["ema"] = {k: v.clone() for k, v in ema.state_dict().items()}
result["model"] = {k: v.clone() for k, v in model.state_dict().items()}
result["state"] = optimizer.state_dict()["state"]
