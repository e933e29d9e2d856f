"""A pipeline: each rank has a stage, activations and their gradients travel between them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

rank, world = dist.get_rank(), dist.get_world_size()


class Stage(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.second = nn.Linear(inputs, 8), nn.Linear(8, outputs)

    def forward(self, x):
        x = self.first(x)
        result["seen"].append(str(x.dtype))
        return self.second(torch.tanh(x))


result = {"seen": [], "loss": [], "gradients": []}
for kind in (ScheduleGPipe, Schedule1F1B):
    torch.manual_seed(0)
    stages = [Stage(4, 8), Stage(8, 2)]
    stage = PipelineStage(stages[rank], rank, world, torch.device("cpu"))
    schedule = kind(stage, 4, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(stages[rank].parameters(), lr=0.1)
    for step in range(6):
        x = torch.randn(16, 4)
        optimizer.zero_grad()
        losses = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x[:, :2].sin(), losses=losses)
        result["loss"] += [loss.item() for loss in losses]
        result["gradients"].append([p.grad.clone() for p in stages[rank].parameters()])
        optimizer.step()
result["parameters"] = [p.detach() for p in stages[rank].parameters()]
