"""Sparse, complex and double parameters, one without dimensions and one without elements, trained
together with a layer."""

import torch
from torch import nn


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
ids = torch.randint(10, (60, 4))
targets = torch.randn(60, 8, dtype=torch.float64)
result = {"loss": [], "gradients": []}

for step in range(30):
    optimizer.zero_grad()
    for batch in (2 * step, 2 * step + 1):
        loss = 0.2 * (model(ids[batch]) - targets[batch]).pow(2).mean()
        loss.backward()
        result["loss"].append(loss.item())
    optimizer.step()
    result["gradients"].append([p.grad.to_dense().clone() for p in model.parameters()])

result["parameters"] = [p.detach() for p in model.parameters()]
