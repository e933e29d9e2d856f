"""The loss scale against `torch.amp.GradScaler` and against sequences worked out by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from autoamp import scaling
from autoamp.policy import LossScaleRule
from autoamp.scaling import LossScale

CPU = torch.device("cpu")


def moves(rule: LossScaleRule, overflows: str, host: str = "knows") -> list[float]:
    """The scale after each step; in `overflows` an x is a step that overflows.

    The host "knows" each outcome, or it "waits" for the device, or it does both, some steps each.
    """
    scale, turns = LossScale(rule), random.Random(3)
    seen = []
    for step in overflows:
        found_inf: bool | torch.Tensor = step == "x"
        if host == "waits" or (host == "both" and turns.random() < 0.4):
            found_inf = torch.tensor(float(found_inf))
        scale.update(found_inf, scale.current(CPU))
        seen.append(float(scale.current(CPU)))
    return seen


def grad_scaler_moves(rule: LossScaleRule, overflows: str) -> list[float]:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=rule.init,
        growth_factor=rule.growth,
        backoff_factor=rule.backoff,
        growth_interval=rule.interval,
    )
    scaler.scale(torch.ones(1))
    seen = []
    for step in overflows:
        parameter.grad = torch.tensor([float("inf") if step == "x" else 1.0])
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    return seen


@pytest.mark.parametrize(
    "rule",
    [
        LossScaleRule(interval=3),
        LossScaleRule(init=1e20, growth=1.5, backoff=0.3, interval=2),
        LossScaleRule(init=1e-30, growth=3.0, backoff=0.25, interval=1),
    ],
)
@pytest.mark.parametrize("host", ["knows", "waits", "both"])
def test_moves_as_grad_scaler_does(rule: LossScaleRule, host: str) -> None:
    overflows = "".join(random.Random(7).choices(".x", (5, 1), k=200))
    assert moves(rule, overflows, host) == grad_scaler_moves(rule, overflows)


@pytest.mark.parametrize("host", ["knows", "waits", "both"])
def test_hysteresis_backs_off_at_every_second_skip_in_a_row(host: str) -> None:
    rule = LossScaleRule(init=1024.0, interval=100, hysteresis=2)
    #                            x     x    .    x    .    x    x    x    x
    assert moves(rule, "xx.x.xxxx", host) == [1024, 512, 512, 512, 512, 512, 256, 256, 128]


def test_a_patient_skip_still_restarts_the_growth_interval() -> None:
    rule = LossScaleRule(init=8.0, interval=3, hysteresis=2)
    assert moves(rule, "..x...") == [8, 8, 8, 8, 8, 16]


def test_floor_and_ceiling_hold() -> None:
    rule = LossScaleRule(init=4.0, interval=1, min=1.0, max=16.0)
    assert moves(rule, "xxxx......") == [2, 1, 1, 1, 2, 4, 8, 16, 16, 16]


def test_where_nothing_bounds_it_the_scale_stays_a_number_with_an_inverse() -> None:
    """GradScaler's falls to 0 and stays there: after that every gradient is NaN."""
    unbounded = LossScaleRule(init=2.0**-120, interval=1)
    assert moves(unbounded, "x" * 30 + "...")[-5:] == [
        2.0**n for n in (-126, -126, -125, -124, -123)
    ]
    assert moves(replace(unbounded, init=2.0**120), "." * 30)[-1] == 2.0**126
    for scale in (2.0**-126, 2.0**126):
        assert float(scaling.inverse_of(torch.tensor(scale))) == 1 / scale


OVERFLOWS = {
    # the rule, what happens, the line, and the step in which it is said
    "at the floor": (
        LossScaleRule(init=4.0, min=1.0),
        "xxxxxx",
        ("gradients keep overflowing at the least loss scale, 1: steps are skipped", 3),
    ),
    "below 1": (
        LossScaleRule(init=4.0),
        "xxxxxx",
        ("the loss scale has fallen below 1, to 0.5: FP16 loses small gradients", 3),
    ),
    "static": (
        LossScaleRule(mode="static", init=128.0),
        "..x.xx",
        ("gradients keep overflowing at the static loss scale, 128: steps are skipped", 6),
    ),
    "patience": (
        LossScaleRule(init=1.0, min=1.0, hysteresis=2),
        "x.xx",
        ("gradients keep overflowing at the least loss scale, 1: steps are skipped", 4),
    ),
    "some overflows": (LossScaleRule(init=64.0, interval=1, min=1.0), "xxx...xxx", None),
    "starts below 1": (LossScaleRule(init=0.5, interval=1), "....", None),
}


@pytest.mark.parametrize("host", ["knows", "waits"])
@pytest.mark.parametrize("name", OVERFLOWS)
def test_a_scale_that_can_do_no_more_is_spoken_of_once(name: str, host: str) -> None:
    """As soon as the host knows; it never waits for this."""
    rule, overflows, expected = OVERFLOWS[name]
    scale = LossScale(rule)
    lines: list[tuple[str, int]] = []
    for number, step in enumerate(overflows, 1):
        scale.say = lambda line, number=number: lines.append((line, number))
        found_inf: bool | torch.Tensor = step == "x"
        if host == "waits":
            found_inf = torch.tensor(float(found_inf))
        scale.update(found_inf, scale.current(CPU))
    if host == "waits":
        assert lines == []
        scale.read_back()
    said = [(line.split(";")[0].removeprefix("autoamp: "), number) for line, number in lines]
    if expected is None:
        assert said == []
    else:
        assert said == [(expected[0], expected[1] if host == "knows" else len(overflows))]
        assert "'precision: float32' under 'modules' in a policy" in lines[0][0]


def test_a_closure_that_overflows_at_the_floor_is_no_skipped_step() -> None:
    scale = LossScale(LossScaleRule(init=1.0, min=1.0))
    scale.say = pytest.fail
    scale.update(True, scale.current(CPU), skipped=False)
    assert (scale.taken, scale.skipped) == (1, 0)


def test_static_scale_never_moves() -> None:
    assert moves(LossScaleRule(mode="static", init=128.0, interval=1), ".x.x.") == [128.0] * 5


def test_two_overflows_at_one_scale_cost_one_halving() -> None:
    scale = LossScale(LossScaleRule(init=1024.0))
    ran_with = scale.current(CPU)
    scale.update(torch.tensor(1.0), ran_with)
    scale.update(torch.tensor(1.0), ran_with)
    assert float(scale.current(CPU)) == 512.0


def test_history_and_counts_are_read_back_late_but_completely() -> None:
    scale = LossScale(LossScaleRule(init=1024.0, interval=2))
    for overflow in (1.0, 0.0, 0.0, 0.0, 1.0):
        scale.update(torch.tensor(overflow), scale.current(CPU))
    assert (scale.taken, scale.skipped, scale.history) == (0, 0, [[0, 1024.0]])
    scale.read_back()
    assert (scale.taken, scale.skipped) == (3, 2)
    assert scale.history == [[0, 1024.0], [1, 512.0], [3, 1024.0], [5, 512.0]]


def test_reading_back_happens_by_itself_before_memory_grows() -> None:
    scale = LossScale(LossScaleRule())
    for _ in range(scaling.PENDING):
        scale.update(torch.tensor(0.0), scale.current(CPU))
    assert scale.taken == scaling.PENDING


def test_state_counts_good_steps_that_the_device_does_not_know_of_yet() -> None:
    scale = LossScale(LossScaleRule(interval=5))
    for _ in range(3):
        scale.update(False, scale.current(CPU))
    assert scale.state() == {"scale": 65536.0, "growth_tracker": 3, "skips_in_a_row": 0}
    scale.load(scale.state())
    for _ in range(2):
        scale.update(False, scale.current(CPU))
    assert scale.state() == {"scale": 131072.0, "growth_tracker": 0, "skips_in_a_row": 0}


def test_state_goes_round_and_continues_in_the_middle_of_an_interval() -> None:
    rule = LossScaleRule(init=1024.0, interval=4, hysteresis=2)
    whole, first = LossScale(rule), LossScale(rule)
    second = LossScale(replace(rule, init=2.0))
    for index, overflow in enumerate((1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)):
        whole.update(torch.tensor(overflow), whole.current(CPU))
        part = first if index < 4 else second
        if index == 4:
            second.load(first.state())
        part.update(torch.tensor(overflow), part.current(CPU))
    assert second.state() == whole.state()
    assert whole.state()["scale"] == 1024.0


@pytest.mark.parametrize("host", [True, False])
def test_a_loaded_counter_past_the_interval_still_grows(host: bool) -> None:
    """The policy may have changed since; torch's kernel waits for the very number."""
    scale = LossScale(LossScaleRule(interval=5))
    scale.load({"scale": 8.0, "growth_tracker": 1000})
    scale.update(False if host else torch.tensor(0.0), scale.current(CPU))
    assert scale.state() == {"scale": 16.0, "growth_tracker": 0, "skips_in_a_row": 0}


def test_a_loaded_scale_stays_within_what_the_policy_says() -> None:
    bounded = LossScale(LossScaleRule(min=2.0, max=1024.0, init=8.0))
    for saved, held in ((65536.0, 1024.0), (0.25, 2.0), (512, 512.0), (float("nan"), 512.0)):
        bounded.load({"scale": saved})
        assert bounded.state()["scale"] == held
    bounded.load({"scale": "many", "growth_tracker": -3})
    assert bounded.state() == {"scale": 512.0, "growth_tracker": 0, "skips_in_a_row": 0}
    static = LossScale(LossScaleRule(mode="static", init=128.0))
    static.load({"scale": 65536.0})
    assert float(static.current(CPU)) == 128.0


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_unscale_divides_in_place_and_flags_what_is_not_finite(
    dtype: torch.dtype, bad: float | None
) -> None:
    grads = [torch.full((3,), 512.0, dtype=dtype), torch.full((2, 2), 8.0, dtype=dtype)]
    if bad is not None:
        grads[1][0, 1] = bad
    places = [grad.data_ptr() for grad in grads]
    (flag,) = scaling.unscale_(grads, scaling.inverse_of(torch.tensor(256.0)))
    assert bool(flag) is (bad is not None)
    assert torch.equal(grads[0], torch.full((3,), 2.0, dtype=dtype))
    assert grads[1][0, 0] == 8.0 / 256
    assert [grad.data_ptr() for grad in grads] == places


def test_unscale_reaches_the_values_of_sparse_gradients() -> None:
    grad = torch.sparse_coo_tensor([[0, 2]], [[4.0], [8.0]], (3, 1), check_invariants=True)
    (flag,) = scaling.unscale_([grad], torch.tensor(0.25))
    assert grad.to_dense().flatten().tolist() == [1.0, 0.0, 2.0]
    assert not flag


def test_inverse_is_rounded_once_as_in_grad_scaler() -> None:
    for value in (3.0, 1e20, 355271.375, 2.0**-30):
        scale = torch.tensor(value)
        assert float(scaling.inverse_of(scale)) == float(scale.double().reciprocal().float())
