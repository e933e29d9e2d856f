"""Processes and threads that scripts start by themselves: data workers, Hogwild, pools, pytest."""

from __future__ import annotations

from typing import Any

import pytest

MIXED = {"AUTO_MIXED_PRECISION": "1", "AUTO_MIXED_PRECISION_DTYPE": "bfloat16"}

WORKERS = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Features(Dataset):  # a model in the workers, as of pretrained features
    def __init__(self):
        torch.manual_seed(0)
        self.net = nn.Linear(4, 4)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        with torch.no_grad():
            return self.net(torch.full((4,), float(index)))

if __name__ == "__main__":
    data, method = Features(), sys.argv[1]
    alone = torch.stack([data[index] for index in range(6)])
    loader = DataLoader(data, 3, num_workers=2, multiprocessing_context=method)
    found = torch.cat(list(loader))
    assert found.dtype is torch.float32
    assert torch.equal(found, alone), (found, alone)
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for batch in loader:
        optimizer.zero_grad()
        net(batch).pow(2).mean().backward()
        optimizer.step()
    rounded = alone.bfloat16().float()
    assert torch.equal(alone, rounded), "the model ran in float32"
    print("right")
"""


def test_data_workers_give_float32_and_say_nothing(run_script: Any) -> None:
    for method in ("fork", "spawn"):
        result = run_script(WORKERS, method, **MIXED)
        assert result.stdout == "right\n", result.stderr
        said = result.stderr.splitlines()
        assert [line.split(" on:")[0] for line in said[:-1]] == ["autoamp 0.1.0"], said
        assert said[-1].endswith("2 steps taken")


HOGWILD = """
import concurrent.futures as futures
import torch
import torch.multiprocessing as mp
from torch import nn

def train(net, rank):
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(150):
        x = torch.rand(16, 4)
        optimizer.zero_grad()
        (net(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
        optimizer.step()

def evaluate(net, value):
    with torch.no_grad():
        return net(torch.full((2, 4), value))

if __name__ == "__main__":
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    net.share_memory()
    memory = net.weight.data_ptr()
    context = mp.get_context("spawn")
    processes = [context.Process(target=train, args=(net, rank)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert net.weight.data_ptr() == memory and net.weight.dtype is torch.float32
    loss = (net(torch.eye(4)) - 1).pow(2).mean().item()
    assert loss < 0.1, loss
    expected = [evaluate(net, value / 8) for value in range(8)]
    for pool in (
        futures.ThreadPoolExecutor(3),
        futures.ProcessPoolExecutor(2, mp_context=context),
    ):
        with pool:
            found = list(pool.map(evaluate, [net] * 8, [value / 8 for value in range(8)]))
        assert all(one.dtype is torch.float32 for one in found)
        assert all(map(torch.equal, found, expected))
    print("right")
"""


def test_hogwild_training_and_pools_of_threads_and_processes(run_script: Any) -> None:
    result = run_script(HOGWILD, **MIXED)
    assert result.stdout == "right\n", result.stderr


SUITE = """
import torch
from torch import nn

def test_a_model_learns():
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.rand(32, 4)
    for _ in range(50):
        optimizer.zero_grad()
        loss = (net(x) - x.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
    assert net(x).dtype is torch.float32

def test_output_is_clean(capfd):
    nn.Linear(2, 2)(torch.ones(1, 2))
    assert capfd.readouterr().out == ""

def test_autoamp_is_on():
    import autoamp
    assert autoamp.status()["regions"] > 50
"""


def test_a_suite_of_the_user_s_own_passes(run_script: Any, tmp_path: Any) -> None:
    (tmp_path / "test_mine.py").write_text(SUITE)
    script = "import sys, pytest; sys.exit(pytest.main(['-q', '-W', 'error', 'test_mine.py']))"
    result = run_script(script, **MIXED)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 passed" in result.stdout


NOTEBOOK = (
    """
import torch
from torch import nn
torch.manual_seed(0)
net, x = nn.Linear(4, 4), torch.ones(2, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
""",
    """
for _ in range(2):
    optimizer.zero_grad()
    out = net(x)
    out.sum().backward()
    optimizer.step()
""",
    """
assert torch.equal(out, out.bfloat16().float()), "the model ran in float32"
out.dtype
""",
)


def test_cells_of_a_notebook_train_in_mixed_precision(monkeypatch: Any) -> None:
    """A kernel is a process that lives for long and is told what to do bit by bit."""
    nbclient = pytest.importorskip("nbclient", reason="pip install '.[test]' brings it")
    nbformat = pytest.importorskip("nbformat", reason="nbclient brings it")
    pytest.importorskip("ipykernel", reason="pip install '.[test]' brings it")
    for name, value in MIXED.items():
        monkeypatch.setenv(name, value)
    cells = [nbformat.v4.new_code_cell(text) for text in NOTEBOOK]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, kernel_name="python3").execute()
    made, trained, shown = notebook.cells
    assert made.outputs == []
    (line,) = trained.outputs
    assert line.name == "stderr"
    assert line.text.startswith("autoamp 0.1.0 on: cpu bfloat16")
    assert line.text.count("\n") == 1
    assert shown.outputs[0].data["text/plain"] == "torch.float32"
