"""An embedding with sparse gradients, some of its rows several times in a batch."""

import torch
from torch import nn


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
        loss = nn.functional.cross_entropy(head(table(words).mean(1)), labels)
        loss.backward()
        assert table.weight.grad.is_sparse
        norms.append(table.weight.grad.coalesce().values().norm().item())
        optimizer.step()
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
