"""Gradients that overflowed never enter a step, whatever a script makes of them; odd gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoamp import overflow

from .playing import MODES, by_hand, differences, mixed_by

Mixed = Callable[..., Any]
EXACT = {"rtol": 0.0, "atol": 0.0}


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def backward(model: nn.Module, factor: float = 1.0) -> None:
    (model(torch.ones(2, 3)).mean() * factor).backward()


def counts(session: Any) -> tuple[int, int, float]:
    session.loss_scale.read_back()
    scale = session.loss_scale
    return scale.taken, scale.skipped, scale.state()["scale"]


def scaled_from_here(session: Any, scale: float) -> None:
    nn.Linear(1, 1)(torch.ones(1, 1))
    session.loss_scale.load({"scale": scale})


# --- made finite before the step -----------------------------------------------------------------

EDITS: dict[str, Callable[[list[torch.Tensor]], object]] = {
    "clip by value": lambda grads: [g.clamp_(-0.5, 0.5) for g in grads],
    "clip by value, through data": lambda grads: [g.data.clamp_(-0.5, 0.5) for g in grads],
    "sign": lambda grads: [g.sign_() for g in grads],
    "nan_to_num": lambda grads: [g.nan_to_num_(0.0, 1.0, -1.0) for g in grads],
}


@pytest.mark.parametrize("host_knows", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", EDITS)
def test_an_overflow_that_the_script_clips_away_still_skips_the_step(
    mixed: Mixed, monkeypatch: pytest.MonkeyPatch, name: str, fused: bool, host_knows: bool
) -> None:
    """On a GPU the host does not know by itself."""
    session = mixed()
    monkeypatch.setattr(overflow, "host_knows", lambda tensor: host_knows)
    model = linear()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    weight = model.weight.detach().clone()
    session.loss_scale.load({"scale": 2.0**30})
    backward(model)
    EDITS[name]([p.grad for p in model.parameters()])
    optimizer.step()
    assert torch.equal(model.weight, weight)
    assert counts(session) == (0, 1, 2.0**29)


@pytest.mark.parametrize("mode", MODES)
def test_clipping_by_value_equals_its_twin(mixed: Mixed, tmp_path: Path, mode: str) -> None:
    found = mixed_by(mixed, tmp_path, "g_clip_value", MODES[mode])
    assert differences(found, by_hand("g_clip_value", MODES[mode])) == []


# --- left for a later step -----------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_a_second_step_after_one_backward_is_gated_too(mixed: Mixed, fused: bool) -> None:
    session = mixed()
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    session.loss_scale.load({"scale": 2.0**30})
    backward(model)
    for _ in range(2):
        optimizer.step()
    assert model.weight.isfinite().all()


def test_infinities_left_from_a_skipped_step_do_not_enter_the_next_one(mixed: Mixed) -> None:
    """The next backward reaches, and the script clears, another part of the model."""
    session = mixed()
    one, other = linear(), linear()
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    session.loss_scale.load({"scale": 2.0**30})
    backward(one)
    optimizer.step()
    other.zero_grad()
    backward(other, 2.0**-20)
    optimizer.step()
    assert one.weight.isfinite().all()


# --- odd gradients -------------------------------------------------------------------------------


def test_two_parameters_that_share_one_gradient_tensor(mixed: Mixed) -> None:
    """One entry per gradient memory; the scale enters twice and leaves twice."""

    def run() -> list[float]:
        one, other = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
        one.grad = other.grad = torch.tensor(5.0)
        (one + 2 * other).backward()
        return [one.grad.item(), other.grad.item()]

    expected = run()
    scaled_from_here(mixed(), 1024.0)
    assert run() == expected == [8.0, 8.0]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_compressed_sparse_parameters(mixed: Mixed) -> None:
    def run() -> torch.Tensor:
        weight = torch.eye(3).to_sparse_csr().requires_grad_()
        torch.sparse.mm(weight, torch.ones(3, 3)).sum().backward()
        assert weight.grad is not None
        return weight.grad.to_dense()

    expected = run()
    scaled_from_here(mixed(), 65536.0)
    torch.testing.assert_close(run(), expected, **EXACT)


# --- errors --------------------------------------------------------------------------------------


def test_a_loss_without_a_graph_is_refused_in_torch_s_words(mixed: Mixed) -> None:
    def message() -> str:
        with pytest.raises(RuntimeError) as caught:
            torch.ones(()).backward()
        return str(caught.value)

    expected = message()
    scaled_from_here(mixed(), 65536.0)
    assert message() == expected
