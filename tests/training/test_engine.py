"""What runs in or through the autograd engine gives what it gives in float32, or by hand.

Each pattern is an unmodified script. Where it has a twin it equals it bit for bit, also in steps
that overflow, except for what overflows in the twin although nobody would skip it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import autoamp

from .playing import MODES, by_hand, differences, mixed_by, plain

Mixed = Callable[..., Any]

HALF = {"float16": 0.01, "bfloat16": 0.04}
"""What tens of steps make of rounding by 2^-11 and 2^-8: 20 and 10 times as much."""

STEPS = {
    "e_arguments": 42,
    "e_checkpoints": 24,
    "e_functions": 30,
    "e_gradient_penalty": 48,
    "e_hooks": 30,
    "e_inner_training": 48,
    "e_kept_activations": 16,
    "e_maml": 20,
    "e_offload": 24,
    "e_pinn": 24,
    "e_recompute": 24,
    "e_step_in_backward": 144,
    "e_threads": 80,
    "e_transforms": 24,
}
"""The patterns that train, and how many steps their optimizers are asked for."""
TWINS = ("e_arguments", "e_checkpoints", "e_hooks", "e_maml", "e_offload", "e_pinn")
UNSCALED = ("e_functional", "e_hessian_products")
"""Patterns in which gradients are returned, and no optimizer could skip."""


def where_finite(found: Any, reference: Any) -> Any:
    """`found`, with what is not finite in `reference`."""
    if isinstance(reference, torch.Tensor):
        return torch.where(reference.isfinite(), found, reference)
    if isinstance(reference, dict):
        return {key: where_finite(found[key], value) for key, value in reference.items()}
    if isinstance(reference, (list, tuple)):
        return type(reference)(map(where_finite, found, reference))
    is_number = isinstance(reference, float) and reference - reference != 0
    return reference if is_number else found


def finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value.isfinite().all())
    return all(map(finite, value.values() if isinstance(value, dict) else value))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TWINS)
def test_a_pattern_equals_its_twin_bit_for_bit(
    mixed: Mixed, tmp_path: Path, name: str, mode: str
) -> None:
    """And takes the steps it should: all, except where the scale is too high."""
    reference = by_hand(name, MODES[mode])
    found = mixed_by(mixed, tmp_path, name, MODES[mode])
    if name == "e_arguments":  # that of an activation does not overflow here, on its way further
        found = where_finite(found, reference)
    assert differences(found, reference) == []
    steps = autoamp.status()["steps"]
    assert steps["taken"] + steps["skipped"] == STEPS[name]
    if mode == "overflows":
        assert steps["skipped"] >= 10
        assert steps["taken"] >= 8
    else:
        assert steps["skipped"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_gradient_penalties_equal_torchs_recipe_where_that_is_finite(
    mixed: Mixed, tmp_path: Path, mode: str
) -> None:
    """The recipe's penalty overflows with the scale, and its step is lost; ours is what it is."""
    reference = by_hand("e_gradient_penalty", MODES[mode])
    found = mixed_by(mixed, tmp_path, "e_gradient_penalty", MODES[mode])
    assert differences(where_finite(found, reference), reference) == []
    assert all(0 < penalty < 2 for penalty in found["penalty"])
    lost = sum(penalty != penalty for penalty in reference["penalty"])
    assert lost == {"float16": 1, "overflows": 20, "bfloat16": 0}[mode]


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name in sorted(STEPS.keys() - {"e_gradient_penalty"}) for mode in HALF],
)
def test_a_pattern_agrees_with_float32(mixed: Mixed, tmp_path: Path, name: str, mode: str) -> None:
    reference = plain(name)
    found = mixed_by(mixed, tmp_path, name, MODES[mode])
    torch.testing.assert_close(found, reference, rtol=HALF[mode], atol=HALF[mode])
    assert differences(found, reference) != []  # it was mixed precision indeed


@pytest.mark.parametrize(
    "name", ["e_functions", "e_inner_training", "e_recompute", "e_step_in_backward", "e_threads"]
)
def test_steps_that_overflow_are_skipped_and_the_others_train(
    mixed: Mixed, tmp_path: Path, name: str
) -> None:
    found = mixed_by(mixed, tmp_path, name, MODES["overflows"])
    steps = autoamp.status()["steps"]
    assert steps["taken"] + steps["skipped"] == STEPS[name]
    assert steps["skipped"] >= 13  # of 2^30, at least that many halvings
    assert steps["taken"] >= 10
    assert finite(found["parameters"])
    assert differences(found["parameters"], plain(name)["parameters"]) != []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", UNSCALED)
def test_returned_gradients_agree_with_float32_at_any_scale(
    mixed: Mixed, tmp_path: Path, name: str, mode: str
) -> None:
    tolerance = HALF[MODES[mode].dtype]
    found = mixed_by(mixed, tmp_path, name, MODES[mode])
    torch.testing.assert_close(found, plain(name), rtol=tolerance, atol=tolerance)
    assert autoamp.status()["steps"] == {"taken": 0, "skipped": 0}


def test_transforms_agree_with_float32_at_a_scale_that_is_too_high(
    mixed: Mixed, tmp_path: Path
) -> None:
    """Except for the ensemble, whose steps are skipped. A gradient of 2^-21 does not vanish."""
    reference = plain("e_transforms")
    found = mixed_by(mixed, tmp_path, "e_transforms", MODES["overflows"])
    for name in ("ensemble", "ensemble parameters"):
        del found[name], reference[name]
    torch.testing.assert_close(found, reference, rtol=0.01, atol=0.01)
    torch.testing.assert_close(found["tiny"], reference["tiny"], rtol=0.01, atol=1e-9)
    assert reference["tiny"].abs().max() < 2.0**-20


@pytest.mark.parametrize("mode", MODES)
def test_training_goes_on_after_errors_and_interrupts_as_by_hand(
    mixed: Mixed, tmp_path: Path, mode: str
) -> None:
    """In forward, a Function, hooks and steps; what is left in ``.grad`` is true, to the bit."""
    reference = by_hand("e_interrupted", MODES[mode])
    found = mixed_by(mixed, tmp_path, "e_interrupted", MODES[mode])
    assert differences(found, reference) == []
    assert set(found["stopped"]) == {"forward", "function", "hook", "accumulated", "step"}
    assert not any(found["autocast"])


@pytest.mark.parametrize("mode", HALF)
def test_training_goes_on_after_errors_and_interrupts_as_in_float32(
    mixed: Mixed, tmp_path: Path, mode: str
) -> None:
    reference = plain("e_interrupted")
    found = mixed_by(mixed, tmp_path, "e_interrupted", MODES[mode])
    assert found["stopped"] == reference["stopped"]
    for key in ("loss", "parameters", "autocast"):
        torch.testing.assert_close(found[key], reference[key], rtol=HALF[mode], atol=HALF[mode])
