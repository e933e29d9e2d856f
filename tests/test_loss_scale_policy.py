"""`loss_scale` in a policy file, in real training, against sequences worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Mixed = Callable[..., Any]

# In the second column an x is a step whose loss is infinite. After each step: the scale.
SEQUENCES = {
    "dynamic": ("{init: 8, interval: 2}", "..x..", [8, 16, 8, 8, 16]),
    "growth and backoff": (
        "{init: 100, growth: 3, backoff: 0.1, interval: 1, min: 0}",
        ".x.",
        [300, 30, 90],
    ),
    "hysteresis": ("{init: 8, hysteresis: 2, interval: 9}", "xx.xxx", [8, 4, 4, 4, 2, 2]),
    "floor": ("{init: 4, min: 2, interval: 9}", "xxx.", [2, 2, 2, 2]),
    "ceiling": ("{init: 4, max: 8, interval: 1}", "...", [8, 8, 8]),
    "static": ("{mode: static, init: 128, interval: 1}", ".x.", [128, 128, 128]),
}


def train(steps: str, session: Any) -> tuple[list[float], list[torch.Tensor]]:
    """The scale and the weight after each step of SGD on FP16 gradients that are all 1."""
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scales, weights = [], []
    for step in steps:
        optimizer.zero_grad()
        (model(torch.ones(1, 4)).sum() * (float("inf") if step == "x" else 1.0)).backward()
        optimizer.step()
        scales.append(session.loss_scale.state()["scale"])
        weights.append(model.weight.detach().clone())
    return scales, weights


@pytest.mark.parametrize("name", SEQUENCES)
def test_the_scale_moves_as_worked_out(mixed: Mixed, tmp_path: Path, name: str) -> None:
    said, steps, expected = SEQUENCES[name]
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: fp16\nloss_scale: {said}\n")
    session = mixed(str(path))
    scales, weights = train(steps, session)
    assert scales == pytest.approx(expected)
    for index, weight in enumerate(weights):  # each step taken moves every weight by -1
        taken = steps[: index + 1].count(".")
        torch.testing.assert_close(weight, torch.full((1, 4), -float(taken)))


def test_the_first_steps_are_not_skipped_but_made_at_a_lower_scale(
    mixed: Mixed, tmp_path: Path
) -> None:
    """Gradients of 1 hold at 2^15, those of 4 at 2^13; the scale starts at 2^18."""
    path = tmp_path / "mine.yaml"
    path.write_text("extends: fp16\nloss_scale: {init: 262144, repeat_first: 3}\n")
    session = mixed(str(path))
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found = []
    for factor in (1.0, 4.0, 1.0, 16.0, 16.0, 16.0):
        optimizer.zero_grad()
        (model(torch.ones(1, 4)).sum() * factor).backward()
        optimizer.step()
        found.append((session.loss_scale.state()["scale"], model.weight[0, 0].item()))
    expected = [(2.0**15, -1.0), (2.0**13, -5.0), (2.0**13, -6.0)]
    expected += [(2.0**12, -6.0), (2.0**11, -6.0), (2.0**11, -22.0)]  # skipped, skipped, taken
    assert found == expected
    session.loss_scale.read_back()
    assert (session.loss_scale.taken, session.loss_scale.skipped) == (4, 2)
    optimizer.load_state_dict(optimizer.state_dict())  # a scale that was saved has held
    optimizer.zero_grad()
    (model(torch.ones(1, 4)).sum() * 64.0).backward()
    assert not model.weight.grad.isfinite().all()


def test_with_the_scale_off_gradients_are_those_of_no_scaling_at_all(
    mixed: Mixed, tmp_path: Path
) -> None:
    """A gradient of 2^-26 is lost in FP16 without a scale, and is there with one."""
    path = tmp_path / "mine.yaml"

    def gradient(said: str) -> float:
        path.write_text(f"extends: fp16\nloss_scale: {said}\n")
        mixed(str(path))
        model = torch.nn.Linear(1, 1, bias=False)
        (model(torch.ones(1, 1)).sum() * 2.0**-26).backward()
        return float(model.weight.grad)

    assert gradient("{mode: off}") == 0.0
    assert gradient("{mode: static, init: 1024}") == 2.0**-26


def test_an_infinite_gradient_is_nobody_s_business_with_the_scale_off(
    mixed: Mixed, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: fp16\nloss_scale: {mode: off}\n")
    session = mixed(str(path))
    _, weights = train(".x", session)
    assert not torch.isfinite(weights[-1]).any()  # as in FP32: the step is taken
