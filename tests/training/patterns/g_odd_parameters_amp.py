"""g_odd_parameters.py with mixed precision written by hand: GradScaler refuses complex gradients."""

import runpy
from pathlib import Path

import torch
from torch import nn

Scale = runpy.run_path(str(Path(__file__).with_name("g_by_hand.py")))["Scale"]


class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(4, 8)
        self.tokens = nn.Embedding(10, 4, sparse=True)
        self.gain = nn.Parameter(torch.ones(5, dtype=torch.complex64))
        self.offset = nn.Parameter(torch.zeros(8, dtype=torch.float64))
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, ids):
        signal = self.lift(self.tokens(ids)).float() + self.nothing.sum()
        filtered = torch.fft.irfft(torch.fft.rfft(signal) * self.gain, n=8)
        return filtered * self.temperature + self.offset


torch.manual_seed(0)
model = Filter()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scale = Scale(INIT_SCALE, GROWTH_INTERVAL, enabled=DTYPE is torch.float16)
ids = torch.randint(10, (60, 4))
targets = torch.randn(60, 8, dtype=torch.float64)
result = {"loss": [], "gradients": []}

for step in range(30):
    optimizer.zero_grad()
    for batch in (2 * step, 2 * step + 1):
        with torch.autocast("cpu", DTYPE):
            predicted = model(ids[batch])
        loss = 0.2 * (predicted - targets[batch]).pow(2).mean()
        scale.backward(loss, model.parameters())
        result["loss"].append(loss.item())
    scale.step(optimizer)
    result["gradients"].append([p.grad.to_dense().clone() for p in model.parameters()])

result["parameters"] = [p.detach() for p in model.parameters()]
