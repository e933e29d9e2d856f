"""Saves what it needs every four steps, dies if told to, and goes on from its file if it is there."""

import argparse
import os
import signal

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--file", default="")
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--die-in", type=int, default=-1)
asked = parser.parse_args()

torch.manual_seed(0)
body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.1))
head = nn.Linear(6, 3)
optimizers = [
    torch.optim.AdamW(body.parameters(), lr=0.02, fused=True),
    torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9),
]
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizers[0], max_lr=0.05, total_steps=40)
x, y = torch.randn(16, 8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
first, result = 0, {"losses": {}}

if asked.file and os.path.exists(asked.file):
    saved = torch.load(asked.file)
    body.load_state_dict(saved["body"])
    head.load_state_dict(saved["head"])
    for optimizer, state in zip(optimizers, saved["optimizers"]):
        optimizer.load_state_dict(state)
    scheduler.load_state_dict(saved["scheduler"])
    torch.set_rng_state(saved["random"])
    first = saved["step"]

for step in range(first, asked.steps):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = nn.functional.cross_entropy(head(body(x[step % 16])), y)
    loss.backward()
    if step == asked.die_in:
        os.kill(os.getpid(), signal.SIGKILL)
    for optimizer in optimizers:
        optimizer.step()
    scheduler.step()
    result["losses"][step] = loss.item()
    if asked.file and step % 4 == 3:
        checkpoint = {
            "step": step + 1,
            "body": body.state_dict(),
            "head": head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "scheduler": scheduler.state_dict(),
            "random": torch.get_rng_state(),
        }
        torch.save(checkpoint, asked.file + ".new")
        os.replace(asked.file + ".new", asked.file)

print(result["losses"])
