"""`autoamp run --dry`: the script gets float32 to the bit, and at the end what would have been."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import torch

import autoamp
from autoamp import learned, reportcli

Result = "subprocess.CompletedProcess[str]"
END = """
import hashlib
numbers = b"".join(v.numpy().tobytes() for v in model.state_dict().values())
print(list(model.state_dict()), hashlib.sha256(numbers).hexdigest())
print(torch.rand(1).item(), random.random(), numpy.random.rand())
"""
SEED = "import random, numpy, torch; torch.manual_seed(0); random.seed(0); numpy.random.seed(0)"
TRAIN = f"""
{SEED}

class Odd(torch.nn.Module):
    def forward(self, x):
        return x * (torch.ones_like(x) + 1e-8)  # half adds nothing

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv1d(1, 4, 3), torch.nn.BatchNorm1d(4)
        self.drop, self.fc, self.odd = torch.nn.Dropout(0.3), torch.nn.Linear(24, 8), Odd()
        self.head = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.odd(self.fc(self.drop(self.norm(self.conv(x)).relu()).flatten(1))))

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(6):
    optimizer.zero_grad()
    x, y = torch.randn(16, 1, 8), torch.randint(0, 2, (16,))
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(loss.item(), model.fc.weight.grad.norm().item())
model.eval()
with torch.no_grad():
    print(model(torch.randn(5, 1, 8)).tolist())
{END}"""
KEEPS = f"""
{SEED}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.norm, self.calls, self.seen, self.mean = torch.nn.BatchNorm1d(8), 0, [], torch.zeros(8)
        self.register_buffer("queue", torch.zeros(8))

    def forward(self, x, cache, scale=None):
        with torch.no_grad():
            self.key.weight.mul_(0.9).add_(self.query.weight, alpha=0.1)
            self.queue = self.queue + x.mean(0)
            self.mean.add_(x.mean())
        if not hasattr(self, "table"):
            self.table = self.query(torch.arange(8.0)).detach()
            self.register_buffer("late", self.table.clone())
        self.calls += 1
        self.seen.append(self.calls)
        cache.append(x.sum().item() + random.random() + numpy.random.rand())
        scale["n"] = scale.get("n", 0) + 1
        x.mul_(2)
        print("forward", self.calls)
        with torch.autocast("cpu", torch.bfloat16):
            x = x + self.query(x).detach()
        return self.norm(self.query(x)) + self.key(x) + self.table + self.late

model, cache, scale = Net(), [], {{}}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    small, large = torch.randn(4, 8), torch.randn(64, 8)
    loss = model(small, cache, scale=scale).square().mean() + model(large, cache, scale).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item(), cache, scale, model.calls, model.seen, model.mean.tolist(), small.tolist())
{END}"""
OWN = f"""
{SEED}
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
for step in range(3):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(4, 8)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(loss.item())
{END}"""


@pytest.fixture
def both(tmp_path: Path) -> Callable[..., tuple[Result, Result]]:
    """`both(script, *options)`: without autoamp, and in a dry run with a report in run.json."""

    def run(script: str, *options: str) -> tuple[Result, Result]:
        (tmp_path / "train.py").write_text(script)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("AUTO_MIXED_PRECISION")}
        dry = [sys.executable, "-m", "autoamp", "run", "--dry", "--report", "run.json", *options]
        found = [
            subprocess.run(
                command,
                env={**kept, "OMP_NUM_THREADS": "1"},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
            for command in ([sys.executable, "train.py"], [*dry, "train.py"])
        ]
        assert [done.returncode for done in found] == [0, 0], found[1].stderr
        return found[0], found[1]

    return run


def report(tmp_path: Path) -> dict:
    content = json.loads((tmp_path / "run.json").read_text())
    jsonschema.validate(content, json.loads(reportcli.SCHEMA.read_text()))
    return content


def test_training_is_that_of_float32_to_the_bit_and_the_end_says_what_would_be(both, tmp_path):
    plain, dry = both(TRAIN, "--dtype", "float16")
    assert dry.stdout == plain.stdout
    first, second, *lines = dry.stderr.splitlines()
    assert first.startswith(f"autoamp {autoamp.__version__} dry run: cpu float16, ")
    assert (
        second == "autoamp: dry run: the script ran in float32; 2 first calls of models looked at"
    )
    assert "autoamp: would run in float16 on cpu: addmm x4 (list lower) in fc, head" in lines
    assert "autoamp: would run in float16 on cpu: convolution x2 (list lower) in conv" in lines
    assert lines[-1] == (
        "autoamp: odd with all below it (Odd) would run in float32: add: "
        f"float16 cannot hold the constant 1e-08 ({tmp_path}/train.py:6)"
    )
    content = report(tmp_path)
    ops = {(row["op"], row["dtype"]): row for row in content["dry_run"]["ops"]}
    assert ops["mul", "float32"]["modules"] == ["odd"]
    assert ops["addmm", "float16"] == {
        "op": "addmm",
        "list": "lower",
        "device": "cpu",
        "dtype": "float16",
        "count": 4,
        "modules": ["fc", "head"],
    }
    assert [d["module"] for d in content["demotions"]] == ["odd"]
    assert content["steps"] == {"taken": 0, "skipped": 0}
    said = [line for line in reportcli.lines(content) if line.startswith("autoamp: ")]
    assert said == [second, *lines]
    assert "odd" in learned.policy(content, "run.json")  # as of any other report


def test_what_a_forward_changes_in_its_module_and_its_arguments_is_changed_once(both, tmp_path):
    plain, dry = both(KEEPS, "--dtype", "bfloat16")
    assert dry.stdout == plain.stdout
    assert report(tmp_path)["dry_run"]["calls"] == 2
    assert "x7 (list lower) in query, key\n" in dry.stderr


def test_a_script_with_mixed_precision_of_its_own_keeps_it_and_a_line_says_so(both):
    plain, dry = both(OWN, "--dtype", "float16")
    assert dry.stdout == plain.stdout
    assert ": the script has its own torch.autocast\n" in dry.stderr
    assert "0 first calls" in dry.stderr


def test_what_cannot_be_called_aside_runs_as_it_is_and_is_named(mixed):
    class Net(torch.nn.Linear):
        def forward(self, rows):
            if torch.is_autocast_enabled("cpu"):
                raise KeyError("in a region")
            return [super(Net, self).forward(row) for row in rows]

    mixed("default", "float16", DRY="1")
    x, net = torch.ones(1, 2), Net(2, 2)
    expected = torch.nn.functional.linear(x, net.weight, net.bias)
    other = copy.deepcopy(net)  # calls of one kind are looked at once
    compiled_net = torch.compile(copy.deepcopy(net), backend="eager")
    for result in (net(row for row in [x]), other([x]), compiled_net([x])):
        assert torch.equal(result[0], expected)
    copied, raised, compiled = autoamp.status()["dry_run"]["not_looked_at"]
    assert copied.startswith("Net: TypeError: cannot pickle")
    assert raised == "Net: KeyError: 'in a region'"
    assert compiled == "OptimizedModule: compiled and scripted modules are not looked into"


def test_it_leaves_torch_as_it_was(mixed):
    names = [(torch.nn.Module, "__call__"), (torch.Tensor, "numpy"), (torch.Tensor, "__setitem__")]
    names += [(torch.optim.Optimizer, "state_dict"), (torch.nn.functional, "linear")]
    before = [vars(owner).get(name) for owner, name in names]
    model = torch.nn.Linear(2, 2)
    mixed("default", "float16", DRY="1")
    assert model(torch.ones(1, 2)).dtype is torch.float32
    assert [vars(owner).get(name) for owner, name in names[3:]] == before[3:]
    told = autoamp.status()["dry_run"]
    assert [(row["op"], row["dtype"]) for row in told["ops"]] == [("addmm", "float16")]
    autoamp.disable()
    assert [vars(owner).get(name) for owner, name in names] == before
