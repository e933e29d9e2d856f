"""What scripts do with gradients between backward and the end of a step gives the same values.

Each pattern is an unmodified script. It equals its twin, which is written by hand with
`torch.amp.GradScaler` where torch has a recipe and with a loss scale by hand where it has none, bit
for bit; and it agrees with what float32 gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoamp

from .playing import MODES, by_hand, differences, mixed_by, plain

Mixed = Callable[..., Any]
EXACT = {"rtol": 0.0, "atol": 0.0}

PATTERNS = {
    "g_accumulate": 36,
    "g_accumulate_across_scales": 108,
    "g_clip_and_log": 32,
    "g_clip_every_micro_step": 30,
    "g_errors": 31,
    "g_fine_tuning": 40,
    "g_flat_buffer": 18,
    "g_gan_critic_first": 48,
    "g_gan_generator_first": 48,
    "g_nan_batch": 32,
    "g_no_gradients": 122,
    "g_noise_and_decay": 30,
    "g_shared_graph": 60,
    "g_surgery": 30,
    "g_thrown_away": 42,
    "g_two_owners": 72,
    "g_zeroing": 384,
}
"""The patterns, and how many steps their optimizers are asked for."""
BROKEN_DATA = {"g_nan_batch": 3}
"""How many of those have a NaN or an infinity from the data: skipped at any scale."""
HALF = {"float16": 0.02, "bfloat16": 0.04}
"""What tens of steps make of rounding by 2^-11 and 2^-8: 40 and 10 times as much."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_equals_its_twin_bit_for_bit(
    mixed: Mixed, tmp_path: Path, name: str, mode: str
) -> None:
    """And takes the steps it should: all, except where data is broken or the scale is too high."""
    reference = by_hand(name, MODES[mode])
    found = mixed_by(mixed, tmp_path, name, MODES[mode])
    assert differences(found, reference) == []
    steps = autoamp.status()["steps"]
    assert steps["taken"] + steps["skipped"] == PATTERNS[name]
    if mode == "overflows":
        assert steps["skipped"] >= 12  # 2^30 is far too high for all of them
        assert steps["taken"] >= 4
    else:
        assert steps["skipped"] == (mode == "float16") * BROKEN_DATA.get(name, 0)


@pytest.mark.parametrize("mode", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", sorted(PATTERNS.keys() - BROKEN_DATA.keys()))
def test_a_pattern_agrees_with_float32(mixed: Mixed, tmp_path: Path, name: str, mode: str) -> None:
    reference = plain(name)
    found = mixed_by(mixed, tmp_path, name, MODES[mode])
    tolerance = HALF[mode]
    torch.testing.assert_close(found, reference, rtol=tolerance, atol=tolerance)
    assert differences(found, reference) != []  # it was mixed precision indeed


@pytest.mark.parametrize("mode", ["float16", "bfloat16"])
@pytest.mark.parametrize(("name", "steps"), [("g_skip_large_norm", 27), ("g_clip_value", 30)])
def test_a_pattern_equals_its_twin_and_float32_where_nothing_overflows(
    mixed: Mixed, tmp_path: Path, name: str, steps: int, mode: str
) -> None:
    reference = plain(name)
    found = mixed_by(mixed, tmp_path, name, MODES[mode])
    assert autoamp.status()["steps"] == {"taken": steps, "skipped": 0}
    assert differences(found, by_hand(name, MODES[mode])) == []
    torch.testing.assert_close(found, reference, rtol=HALF[mode], atol=HALF[mode])


def test_a_script_that_skips_infinite_norms_itself_gets_under_way(
    mixed: Mixed, tmp_path: Path
) -> None:
    """Its optimizer is never asked to step while the scale is too high."""
    mixed_by(mixed, tmp_path, "g_skip_large_norm", MODES["overflows"])
    steps = autoamp.status()["steps"]
    assert steps["taken"] >= 4
    assert steps["skipped"] == 0
    assert autoamp.status()["loss_scale"]["final"] < 2.0**26


def test_broken_data_costs_its_step_and_nothing_else(mixed: Mixed, tmp_path: Path) -> None:
    """In float32 the first NaN would be the end."""
    assert plain("g_nan_batch")["parameters"][0].isnan().all()
    found = mixed_by(mixed, tmp_path, "g_nan_batch", MODES["float16"])
    assert all(p.isfinite().all() for p in found["parameters"])
    broken = [
        step
        for step, gradients in enumerate(found["gradients"])
        if not all(grad.isfinite().all() for grad in gradients)
    ]
    assert broken == [7, 21, 28]
    assert found["state"][0]["step"] == 29
    assert autoamp.status()["loss_scale"]["final"] == 65536.0 / 2**3


def test_gradients_are_cleared_alike_in_every_spelling(mixed: Mixed, tmp_path: Path) -> None:
    """With one scale for all, and none too high, the spelling changes no bit."""
    found = mixed_by(mixed, tmp_path, "g_zeroing", MODES["float16"])
    for (way, place), values in found.items():
        assert differences(values[0][0], found[way, "first"][0][0]) == []
        assert differences(values, found[way, "first"]) == [], (way, place)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def backward(model: nn.Module, factor: float = 1.0) -> None:
    (model(torch.ones(2, 3)).mean() * factor).backward()


def counts(session: Any) -> tuple[int, int, float]:
    """(Steps taken, steps skipped, the scale)."""
    session.loss_scale.read_back()
    scale = session.loss_scale
    return scale.taken, scale.skipped, scale.state()["scale"]


def clear_weight_and_other(one: nn.Linear, other: nn.Linear) -> None:
    one.weight.grad = None
    other.zero_grad()


def clear_all_but_one_element(one: nn.Linear, other: nn.Linear) -> None:
    one.zero_grad()
    assert other.weight.grad is not None
    other.weight.grad[:, 1:].zero_()
    other.bias.grad.data.zero_()


PARTIAL: dict[str, Callable[[nn.Linear, nn.Linear], object]] = {
    "zero_grad of one module": lambda one, other: one.zero_grad(),
    "the same in place": lambda one, other: one.zero_grad(set_to_none=False),
    "all but a bias": clear_weight_and_other,
    "all but one element": clear_all_but_one_element,
}


@pytest.mark.parametrize("name", PARTIAL)
def test_an_overflow_that_only_half_was_cleared_never_slips_through(
    mixed: Mixed, name: str
) -> None:
    session = mixed()
    one, other = linear(), linear()
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    before = [p.detach().clone() for p in (*one.parameters(), *other.parameters())]
    session.loss_scale.load({"scale": 2.0**30})
    backward(one)
    backward(other)
    PARTIAL[name](one, other)
    session.loss_scale.load({"scale": 1024.0})
    backward(one)
    optimizer.step()
    after = [p.detach() for p in (*one.parameters(), *other.parameters())]
    torch.testing.assert_close(after, before, **EXACT)
    assert counts(session)[:2] == (0, 1)


def test_an_overflow_counts_although_a_good_backward_of_other_parameters_came_after(
    mixed: Mixed,
) -> None:
    session = mixed()
    one, other = linear(), linear()
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    weight = one.weight.detach().clone()
    session.loss_scale.load({"scale": 2.0**30})
    backward(one)
    backward(other, 2.0**-20)
    assert other.weight.grad.isfinite().all()
    optimizer.step()
    assert torch.equal(one.weight, weight)
    assert counts(session) == (0, 1, 2.0**29)


@pytest.mark.parametrize("overflows", [True, False])
def test_an_optimizer_that_steps_once_in_a_thousand_backwards_is_gated(
    mixed: Mixed, overflows: bool
) -> None:
    """More backwards than are kept. Where its own did not overflow another one's did."""
    session = mixed()
    rare, often = linear(), linear()
    optimizer = torch.optim.SGD(rare.parameters(), lr=0.1)
    weight = rare.weight.detach().clone()
    session.loss_scale.load({"scale": 2.0**30})
    backward(rare, 1.0 if overflows else 2.0**-20)
    for index in range(session.backwards.KEPT + 8):
        backward(often, 1.0 if index == 500 and not overflows else 2.0**-20)
        often.zero_grad()
    optimizer.step()
    assert torch.equal(rare.weight, weight) is overflows
    assert counts(session)[:2] == (1 - overflows, overflows)


def test_two_optimizers_that_own_one_parameter_are_both_gated(mixed: Mixed) -> None:
    session = mixed()
    model = linear()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    weight = model.weight.detach().clone()
    session.loss_scale.load({"scale": 2.0**30})
    backward(model)
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(model.weight, weight)
    assert counts(session) == (0, 2, 2.0**29)


def test_a_group_added_midway_is_gated_with_the_others(mixed: Mixed) -> None:
    """Its gradients overflow, those of the first group do not: neither moves."""
    session = mixed()
    one, other = linear(), linear()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    backward(one, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    before = [p.detach().clone() for p in (*one.parameters(), *other.parameters())]
    optimizer.add_param_group({"params": list(other.parameters())})
    session.loss_scale.load({"scale": 2.0**30})
    backward(one, 2.0**-20)
    backward(other)
    optimizer.step()
    after = [p.detach() for p in (*one.parameters(), *other.parameters())]
    torch.testing.assert_close(after, before, **EXACT)
    assert counts(session) == (1, 1, 2.0**29)


def test_a_parameter_frozen_after_its_backward_still_counts(mixed: Mixed) -> None:
    """torch steps whatever has a gradient; the next step is of the others alone."""
    session = mixed()
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    session.loss_scale.load({"scale": 2.0**30})
    backward(model)
    model.bias.requires_grad = False
    model.weight.grad = None
    optimizer.step()
    assert torch.equal(model.bias, before[1])
    assert counts(session) == (0, 1, 2.0**29)
    optimizer.zero_grad()
    backward(model, 2.0**-20)
    optimizer.step()
    assert torch.equal(model.bias, before[1])
    assert not torch.equal(model.weight, before[0])


def test_parameters_that_no_optimizer_owns_stop_nobody(mixed: Mixed) -> None:
    """Their gradients overflow; the step of those that are owned is a good one."""
    session = mixed()
    trained, other = linear(), linear()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    weight = trained.weight.detach().clone()
    session.loss_scale.load({"scale": 2.0**30})
    backward(other)
    backward(trained, 2.0**-20)
    optimizer.step()
    assert not torch.equal(trained.weight, weight)
    assert counts(session) == (1, 0, 2.0**30)


def test_gradients_that_the_script_holds_stay_the_same_tensors(mixed: Mixed) -> None:
    """A logger keeps ``p.grad`` without a copy and reads it after more has been added."""
    mixed()
    model = linear()
    backward(model)
    held = [p.grad for p in model.parameters()]
    first = [grad.clone() for grad in held]
    backward(model)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), held, strict=True))
    torch.testing.assert_close(held, [2 * grad for grad in first], **EXACT)
    model.zero_grad()
    backward(model)
    torch.testing.assert_close(held, [2 * grad for grad in first], **EXACT)


def test_a_scale_that_is_no_power_of_two_costs_an_ulp_a_micro_step(mixed: Mixed) -> None:
    def accumulated(scale: str) -> Iterator[torch.Tensor]:
        mixed(LOSS_SCALE=scale)
        model = linear()
        for p in model.parameters():
            p.grad = torch.full_like(p, 1 / 3)
        for _ in range(8):
            backward(model, 2.0**-6)
            yield model.weight.grad.clone()

    exact = list(accumulated("1024"))
    ulp = torch.finfo(torch.float32).eps
    for step, (found, expected) in enumerate(zip(accumulated("1000"), exact, strict=True)):
        # What is rounded to float16 on the way is 2^-6 exactly, at both scales.
        torch.testing.assert_close(found, expected, rtol=2 * (step + 1) * ulp, atol=0.0)
