"""A run that is killed and goes on from its own file, as if nothing had happened."""

from __future__ import annotations

import shutil
import signal
from ast import literal_eval
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.default_planner

import autoamp

from .playing import PATTERNS, differences

SCRIPT = PATTERNS / "o_resume.py"
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """FP16 with a scale that overflows at first, and grows every third step."""
    policy = tmp_path_factory.mktemp("policy") / "moving.yaml"
    policy.write_text("loss_scale: {init: 1073741824, interval: 3, hysteresis: 2}\n")
    return {"AUTO_MIXED_PRECISION": str(policy), "AUTO_MIXED_PRECISION_DTYPE": "float16"}


@pytest.fixture(scope="module")
def killed(
    python_in: Run, tmp_path_factory: pytest.TempPathFactory, variables: dict[str, str]
) -> Path:
    """What a run leaves that is killed in its eleventh step, with gradients and no step yet."""
    folder = tmp_path_factory.mktemp("killed")
    run = python_in(folder)(SCRIPT, "--file", "run.pt", "--die-in", "10", **variables)
    assert run.returncode == -signal.SIGKILL, run.stderr
    return folder / "run.pt"


def test_a_killed_run_goes_on_bit_for_bit(
    run_script: Run, tmp_path: Path, variables: dict[str, str], killed: Path
) -> None:
    """Two optimizers, one fused; the scale, its counters, and random numbers too."""
    file, whole = tmp_path / "run.pt", tmp_path / "whole.pt"
    shutil.copy(killed, file)
    assert torch.load(file)["step"] == 8
    runs = [run_script(SCRIPT, "--file", str(path), **variables) for path in (file, whole)]
    assert [run.returncode for run in runs] == [0, 0], [run.stderr for run in runs]
    assert differences(torch.load(file), torch.load(whole)) == []
    resumed, straight = (literal_eval(run.stdout) for run in runs)
    assert list(straight) == list(range(16))
    assert resumed == {step: loss for step, loss in straight.items() if step >= 8}

    states = [state["autoamp"] for state in torch.load(whole)["optimizers"]]
    assert states[0] == states[1]
    assert states[0]["scale"] < 2.0**30
    assert states[0].keys() == {"scale", "growth_tracker", "skips_in_a_row"}


def test_files_go_from_mixed_precision_to_plain_torch_and_back(
    run_script: Run, tmp_path: Path, variables: dict[str, str], killed: Path
) -> None:
    """The file of a mixed run loads where autoamp cannot be imported, and that one's here."""
    file, blocked = tmp_path / "run.pt", tmp_path / "blocked"
    shutil.copy(killed, file)
    assert all("autoamp" in state for state in torch.load(file)["optimizers"])
    blocked.mkdir()
    (blocked / "autoamp.py").write_text("raise ImportError('not here')\n")
    plainly = run_script(
        SCRIPT,
        *("--file", str(file), "--steps", "12"),
        pythonpath=(blocked,),
        PYTHONWARNINGS="error",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert plainly.returncode == 0, plainly.stderr
    assert list(literal_eval(plainly.stdout)) == [8, 9, 10, 11]
    states = torch.load(file)["optimizers"]
    assert [set(state) for state in states] == [{"state", "param_groups"}] * 2

    mixed = run_script(SCRIPT, "--file", str(file), **variables)
    assert mixed.returncode == 0, mixed.stderr
    assert list(literal_eval(mixed.stdout)) == [12, 13, 14, 15]
    assert "autoamp: 8 regions, " in mixed.stderr


DISTRIBUTED = """
import sys
import torch
import torch.distributed.checkpoint as dcp

def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).pow(2).mean().backward()
        optimizer.step()

for action, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(2 if action == "save" else 1)
    asked = {"model": model.state_dict(), "all": [{"optimizer": optimizer.state_dict()}]}
    if action == "save":
        dcp.save(asked, checkpoint_id=folder)
    else:
        dcp.load(asked, checkpoint_id=folder)
        optimizer.load_state_dict(asked["all"][0]["optimizer"])
        scale = optimizer.state_dict().get("autoamp", {}).get("growth_tracker")
        print(int(optimizer.state[model.weight]["step"]), scale)
"""


def test_distributed_checkpoints_go_both_ways(
    run_script: Run, tmp_path: Path, variables: dict[str, str]
) -> None:
    """`torch.distributed.checkpoint` demands every key of the dict that it fills: also of one
    written without autoamp, in a process that has a scale to fill."""
    policy = tmp_path / "steady.yaml"
    policy.write_text("loss_scale: {init: 128}\n")
    steadily = {**variables, "AUTO_MIXED_PRECISION": str(policy)}

    def run(*actions: str, **variables: str) -> str:
        result = run_script(DISTRIBUTED, *actions, **variables)
        assert result.returncode == 0, result.stderr
        out: str = result.stdout
        return out

    run("save", "plain")
    out = run("load", "plain", "save", "mixed", "load", "mixed", **steadily)
    assert out.splitlines() == ["2 1", "2 3"]  # its own counter, and that of the checkpoint
    assert run("load", "mixed") == "2 None\n"


def test_a_checkpoint_that_lacks_another_key_is_still_refused(
    mixed: Callable[..., Any], tmp_path: Path
) -> None:
    """Only our key may be missing; and torch's function is put back in the end."""
    planner = torch.distributed.checkpoint.default_planner
    original = planner.create_default_local_load_plan
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mixed()
    model(torch.ones(4, 3)).mean().backward()
    optimizer.step()
    assert optimizer.state_dict()["autoamp"]["growth_tracker"] == 1
    assert planner.create_default_local_load_plan is not original
    metadata = torch.distributed.checkpoint.metadata.Metadata({})
    plan = planner.create_default_local_load_plan
    assert plan({"o.autoamp.scale": 1.0, "autoamp": {}}, metadata).items == []
    with pytest.raises(RuntimeError, match="Missing key in checkpoint"):
        plan({"o.lr": 1.0}, metadata)
    targets = [entry["target"] for entry in autoamp.status()["patches"]]
    assert f"{planner.__name__}:create_default_local_load_plan" in targets
    autoamp.disable()
    assert planner.create_default_local_load_plan is original
