"""o_sparse.py with mixed precision written by hand."""

import torch
from torch import nn

scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=INIT_SCALE,
    growth_interval=GROWTH_INTERVAL,
    enabled=DTYPE is torch.float16,
)


def train(cls, **options):
    torch.manual_seed(0)
    table = nn.Embedding(12, 4, sparse=True)
    head = nn.Linear(4, 3).requires_grad_(False)
    words = torch.randint(12, (6, 5))
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    optimizer = cls(table.parameters(), lr=0.05, **options)
    losses, norms = [], []
    for _ in range(8):
        optimizer.zero_grad()
        mean = table(words).mean(1)
        with torch.autocast("cpu", DTYPE):
            logits = head(mean)
        loss = nn.functional.cross_entropy(logits.float(), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert table.weight.grad.is_sparse
        norms.append(table.weight.grad.coalesce().values().norm().item())
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return {
        "losses": losses,
        "norms": norms,
        "table": table.weight.detach().clone(),
        "state": [
            value.to_dense()
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ],
    }


with torch.sparse.check_sparse_tensor_invariants():
    result = {
        "SparseAdam": train(torch.optim.SparseAdam),
        "SparseAdam maximize": train(torch.optim.SparseAdam, maximize=True),
        "Adagrad": train(torch.optim.Adagrad),
        "SGD": train(torch.optim.SGD),
        "SGD momentum": train(torch.optim.SGD, momentum=0.9),
    }
