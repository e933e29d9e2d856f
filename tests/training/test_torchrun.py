"""Many ranks as users launch them: `torchrun`, restarts, two machines, ranks that die."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import autoamp
from autoamp.doctor import shim_directory

LIMIT = 120
"""Seconds after which ranks are taken to wait for each other for ever."""
TRAIN = """
import os, signal, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

how = sys.argv[1]
if how == "some" and "autoamp" in sys.modules:
    import autoamp.agreement
    autoamp.agreement.PATIENCE = 2.0
dist.init_process_group("gloo", timeout=timedelta(seconds=5 if how == "stop" else 60))
rank, world = dist.get_rank(), dist.get_world_size()
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0
if os.path.exists("saved.pt"):
    saved = torch.load("saved.pt")
    first = saved["step"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
with torch.no_grad():
    for _ in range(rank):
        model.module(torch.ones(1, 4))  # ranks differ in how many regions they open
for step in range(first, first + 6):
    torch.manual_seed(step)
    x = torch.randn(4, 8, 4)[rank]
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), x[:, :2].sin())
    if step in (1, 2, 8) and rank == world - 1:
        loss = loss * float("inf")
    loss.backward()
    optimizer.step()
    scale = optimizer.state_dict().get("autoamp", {}).get("scale")
    line = f"attempt {attempt} rank {rank} of {world} step {step} scale {scale}\\n"
    os.write(1, line.encode())  # in one piece: ranks share the pipe
    if step == first + 2 and how == "restart" and attempt == 0:
        if rank == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"step": step + 1, **states}, "saved.pt")
        dist.barrier()
        if rank == 1:
            raise SystemExit(3)
    if step == 2 and rank == 1 and how in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`launch(how, "--nproc_per_node", "2")`: torchrun, or with RANK given one rank by itself."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("AUTO_MIXED_PRECISION")}
    search = (shim_directory(), Path(autoamp.__file__).parents[1])
    kept["PYTHONPATH"] = os.pathsep.join(map(str, search))
    kept |= {"OMP_NUM_THREADS": "1", "AUTO_MIXED_PRECISION": "1"}
    kept |= {"AUTO_MIXED_PRECISION_POLICY": "torch", "AUTO_MIXED_PRECISION_DTYPE": "float16"}
    with ExitStack() as running:

        def start(how: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
            launcher = [] if "RANK" in variables else ["-m", "torch.distributed.run", *arguments]
            process = subprocess.Popen(
                [sys.executable, *launcher, str(script), how],
                env={**kept, **variables},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            running.enter_context(process)
            running.callback(process.kill)
            return process

        yield start


def ours(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("autoamp")]


def scales(stdout: str, start: str) -> list[float]:
    lines = sorted(line for line in stdout.splitlines() if line.startswith(start))
    return [float(line.split()[-1]) for line in lines]


def test_two_machines_say_two_lines_and_write_one_report(
    launch: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Two agents of torchrun on loopback; the variable is on their shells only."""
    report = tmp_path / "run.json"
    where = ("--nnodes", "2", "--master_addr", "127.0.0.1", "--master_port", str(free_port()))
    agents = [
        launch("plainly", *where, "--node_rank", node, AUTO_MIXED_PRECISION_REPORT=str(report))
        for node in ("0", "1")
    ]
    said = [agent.communicate(timeout=LIMIT) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    start, end = ours(said[0][1])
    assert "cpu float16" in start
    assert "6 regions, 4 steps taken, 2 skipped, final loss scale 16384" in end
    assert ours(said[1][1]) == []
    for rank, (out, _) in enumerate(said):
        assert scales(out, f"attempt 0 rank {rank} of 2") == [65536, 32768] + [16384] * 4
    content = json.loads(report.read_text())
    told = content["ranks"]["told"]
    assert content["ranks"]["world"] == 2
    assert [(row["rank"], row["regions"]) for row in told] == [(0, 6), (1, 7)]
    assert all(row["steps"] == {"taken": 4, "skipped": 2} for row in told)
    assert content["regions"] == 6
    assert [path.name for path in tmp_path.glob("run.json*")] == ["run.json"]


def test_a_restart_goes_on_with_the_saved_scale_on_another_number_of_ranks(
    launch: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """After a rank has failed, three of them start where two have saved; each has a report."""
    process = launch("restart", "--standalone", "--nproc_per_node", "2")
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 1, err
    for rank in range(2):
        assert scales(out, f"attempt 0 rank {rank} of 2")[:3] == [65536, 32768, 16384]
    reports = str(tmp_path / "run{rank}.json")
    process = launch(
        "plainly", "--standalone", "--nproc_per_node", "3", AUTO_MIXED_PRECISION_REPORT=reports
    )
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    for rank in range(3):
        assert scales(out, f"attempt 0 rank {rank} of 3") == [16384] * 5 + [8192]
        content = json.loads((tmp_path / f"run{rank}.json").read_text())
        assert content["steps"] == {"taken": 5, "skipped": 1}
        assert content["regions"] == 6 + rank


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_rank_that_dies_ends_the_others_as_torch_does(
    launch: Callable[..., subprocess.Popen[str]], how: str
) -> None:
    """Killed, and standing still until the group's own timeout of five seconds."""
    address: dict[str, Any] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    first, _ = [launch(how, RANK=str(rank), WORLD_SIZE="2", **address) for rank in range(2)]
    out, err = first.communicate(timeout=LIMIT)
    assert first.returncode == 1, err
    assert "RuntimeError" in err
    assert "rank 0 of 2 step 2" in out
    assert ("Timed out" in err or "timeout" in err) == (how == "stop"), err


def test_where_some_ranks_run_without_it_it_stands_aside_on_the_others(
    launch: Callable[..., subprocess.Popen[str]],
) -> None:
    """In the first backward: their gradients would carry a scale that the others' do not."""
    address: dict[str, Any] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        launch("some", RANK=rank, WORLD_SIZE="2", AUTO_MIXED_PRECISION=switch, **address)
        for rank, switch in (("0", "1"), ("1", "0"))
    ]
    said = [rank.communicate(timeout=LIMIT) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    _, aside, end = ours(said[0][1])
    assert "stands aside: some ranks run without it" in aside
    assert "1 region, 6 steps taken" in end
    assert ours(said[1][1]) == []
