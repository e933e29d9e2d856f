"""Learning rates when steps are skipped: every scheduler of torch, without a warning.

Warnings are errors in this suite. The twins have to silence one: GradScaler skips the first step.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autoamp.patches import SCHEDULERS

from .playing import MODES, PATTERNS, by_hand, differences, mixed_by, plain

Mixed = Callable[..., Any]
NAMES = ["o_schedulers", "o_schedulers_two"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_schedulers_advance_as_in_the_hand_written_twin(
    mixed: Mixed, tmp_path: Path, name: str, mode: str
) -> None:
    expected = by_hand(name, MODES[mode])
    found = mixed_by(mixed, tmp_path, name, MODES[mode])
    assert differences(found, expected) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_held_schedulers_wait_as_in_a_twin_that_holds_them(
    mixed: Mixed, tmp_path: Path, name: str, mode: str
) -> None:
    """After each step, and after each epoch of three: then the last step of the epoch counts."""
    dtype, init, interval = MODES[mode].dtype, MODES[mode].init, MODES[mode].interval
    scale = {"INIT_SCALE": init, "GROWTH_INTERVAL": interval}
    found_by_twin = {"DTYPE": getattr(torch, dtype), **scale, "HOLD": True}
    expected = play(f"{name}_amp", found_by_twin)
    policy = tmp_path / "hold.yaml"
    rule = f"{{init: {init}, interval: {interval}, hold_schedulers: true}}"
    policy.write_text(f"loss_scale: {rule}\n")
    mixed(str(policy), dtype=dtype)
    assert differences(play(name, {}), expected) == []
    advancing = play(f"{name}_amp", {**found_by_twin, "HOLD": False})
    assert (differences(expected, advancing) != []) is (mode == "overflows")


def test_no_scheduler_of_torch_is_missed() -> None:
    played = {name.split(" ", 1)[0] for name in plain("o_schedulers")}
    module = torch.optim.lr_scheduler
    there = {
        name
        for name, cls in vars(module).items()
        if isinstance(cls, type) and issubclass(cls, module.LRScheduler)
    }
    assert played - {"SWALR", "two"} == there - {"LRScheduler", "_LRScheduler"}
    with_step = {name for name in there if "step" in vars(getattr(module, name))}
    assert with_step == set(SCHEDULERS)


def play(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """A pattern or twin, under whatever is on."""
    torch.manual_seed(0)
    result: dict[str, Any] = runpy.run_path(str(PATTERNS / f"{name}.py"), found)["result"]
    return result
