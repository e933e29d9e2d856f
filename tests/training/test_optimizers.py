"""Every optimizer of torch, the ways to use one, and those that scripts bring along."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import autoamp

from .playing import MODES, by_hand, differences, mixed_by, plain

Mixed = Callable[..., Any]
HALF_PRECISION = {"float16": 4e-3, "overflows": 4e-3, "bfloat16": 4e-2}
"""How far a result of size 1 may be from float32 after a dozen steps."""


TWINS = [
    (name, mode)
    for name in ("o_every_optimizer", "o_sparse", "o_own", "o_averages", "o_sam")
    for mode in MODES
]


@pytest.mark.parametrize(("name", "mode"), TWINS)
def test_equals_its_hand_written_twin_bit_for_bit(
    mixed: Mixed, tmp_path: Path, name: str, mode: str
) -> None:
    """Losses, parameters and optimizer state, where some steps are skipped too.

    In the twins of wrappers around an optimizer, and of SAM, there is one `update()` a step.
    """
    expected = by_hand(name, MODES[mode])
    found = mixed_by(mixed, tmp_path, name, MODES[mode])
    assert differences(found, expected) == []


def test_no_optimizer_of_torch_is_missed() -> None:
    """Nor the forms of one: `foreach` and `fused` kernels are other code."""
    played = {name.split(" ", 1)[0] for name in plain("o_every_optimizer")}
    there = {
        cls.__name__
        for cls in vars(torch.optim).values()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    }
    elsewhere = {"LBFGS", "SparseAdam"}  # o_closures, o_sparse
    assert played | elsewhere == there - {"Optimizer"}
    forms = list(plain("o_every_optimizer"))
    assert sum("fused" in form for form in forms) >= 4
    assert sum("foreach" in form for form in forms) >= 10


@pytest.mark.parametrize("mode", MODES)
def test_closures_give_what_float32_gives(mixed: Mixed, tmp_path: Path, mode: str) -> None:
    """Dropout and augmentation draw the same numbers, and an overflow is nowhere to be seen."""
    expected = plain("o_closures")
    found = mixed_by(mixed, tmp_path, "o_closures", MODES[mode])
    assert list(leaves(found)) != list(leaves(expected))  # it was not float32 that ran
    for (place, value), (_, reference) in zip(leaves(found), leaves(expected), strict=True):
        exact = "drawn" in place
        assert abs(value - reference) <= (0 if exact else HALF_PRECISION[mode]), place


@pytest.mark.parametrize("mode", MODES)
def test_closures_that_keep_gradients(mixed: Mixed, tmp_path: Path, mode: str) -> None:
    """One that adds to what it finds runs again on what it had found.

    Where that has overflowed before the step nothing can be run again: the step is skipped, and
    its loss returned all the same.
    """
    expected = plain("o_closures_that_keep")
    found = mixed_by(mixed, tmp_path, "o_closures_that_keep", MODES[mode])
    may_skip = [
        name for name in found if mode == "overflows" and name.endswith(("adds", "reports"))
    ]
    for name in found.keys() - may_skip:
        for (place, value), (_, reference) in zip(
            leaves(found[name]), leaves(expected[name]), strict=True
        ):
            assert abs(value - reference) <= HALF_PRECISION[mode], (name, place)
    assert all(value == value for name in may_skip for _, value in leaves(found[name]))
    skipped = sum(steps_without_effect(found[name]["parameters"]) for name in may_skip)
    assert skipped == autoamp.status()["steps"]["skipped"]
    assert (skipped > 8) is (mode == "overflows")


@pytest.mark.parametrize("mode", MODES)
def test_sam_with_a_closure(mixed: Mixed, tmp_path: Path, mode: str) -> None:
    """Where its first pass overflows the step is skipped, and no weight is left perturbed."""
    expected = plain("o_sam_closures")
    found = mixed_by(mixed, tmp_path, "o_sam_closures", MODES[mode])
    if mode != "overflows":
        for (place, value), (_, reference) in zip(leaves(found), leaves(expected), strict=True):
            assert abs(value - reference) <= HALF_PRECISION[mode], place
    skipped = sum(steps_without_effect(training["parameters"]) for training in found.values())
    assert skipped == autoamp.status()["steps"]["skipped"]
    assert (skipped > 12) is (mode == "overflows")
    assert autoamp.status()["steps"]["taken"] == 28 - skipped
    for name, training in found.items():
        assert all(value == value for _, value in leaves(training))
        assert expected[name]["losses"][0] > training["losses"][-1]


def steps_without_effect(parameters: list[list[torch.Tensor]]) -> int:
    """How many of the steps between these parameters, the first one apart, moved none of them."""
    return sum(differences(*pair) == [] for pair in itertools.pairwise(parameters))


@pytest.mark.parametrize("mode", ["float16", "bfloat16"])
def test_steps_that_are_differentiated_through(mixed: Mixed, tmp_path: Path, mode: str) -> None:
    """Every class that can; `capturable` is for devices that capture graphs, and not for CPUs."""
    expected = plain("o_differentiable")
    found = mixed_by(mixed, tmp_path, "o_differentiable", MODES[mode])
    assert len(found) >= 11
    for (place, value), (_, reference) in zip(leaves(found), leaves(expected), strict=True):
        assert abs(value - reference) <= HALF_PRECISION[mode], place


def leaves(result: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a result, and where it stands."""
    if isinstance(result, torch.Tensor):
        result = result.flatten().tolist()
    for key, value in result.items() if isinstance(result, dict) else enumerate(result):
        if isinstance(value, (int, float)):
            yield f"{place}/{key}", float(value)
        else:
            yield from leaves(value, f"{place}/{key}")
