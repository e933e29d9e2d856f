"""Overflow where nobody can skip: gradients that no gate stands before are finite all the same."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp import overflow, repeating, unskippable

from .playing import MODES, differences, mixed_by, plain

Mixed = Callable[..., Any]
EXACT = {"rtol": 0.0, "atol": 0.0}
HALF = {"float16": 0.01, "bfloat16": 0.04}


def layer(inputs: int = 3) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, 1, bias=False)


def ones(size: int = 3) -> torch.Tensor:
    return torch.ones(1, size)


# Whole scripts.


@pytest.mark.parametrize("name", ["e_manual_sgd", "e_anomaly"])
@pytest.mark.parametrize("mode", MODES)
def test_a_script_that_nobody_skips_for_agrees_with_float32_at_any_scale(
    mixed: Mixed, tmp_path: Path, name: str, mode: str
) -> None:
    """Descent by hand with a summed loss that overflows at 65536; anomaly detection."""
    tolerance = HALF[MODES[mode].dtype]
    found = mixed_by(mixed, tmp_path, name, MODES[mode])
    torch.testing.assert_close(found, plain(name), rtol=tolerance, atol=tolerance)
    assert autoamp.status()["steps"]["skipped"] == 0


@pytest.mark.parametrize("name", ["e_manual_sgd", "e_anomaly"])
def test_the_scale_that_it_began_with_leaves_no_trace(
    mixed: Mixed, tmp_path: Path, name: str
) -> None:
    one = mixed_by(mixed, tmp_path, name, MODES["float16"])
    other = mixed_by(mixed, tmp_path, name, MODES["overflows"])
    assert differences(one, other) == []


@pytest.mark.parametrize("mode", MODES)
def test_adversaries_and_saliency_maps_are_those_of_float32(
    mixed: Mixed, tmp_path: Path, mode: str
) -> None:
    """On a fixed model, and in training, whose own steps are skipped as ever at 2^30."""
    tolerance = HALF[MODES[mode].dtype]
    reference = plain("e_adversarial")
    found = mixed_by(mixed, tmp_path, "e_adversarial", MODES[mode])
    steps = autoamp.status()["steps"]
    if mode == "overflows":
        assert steps == {"taken": 0, "skipped": 10}
        for result in (found, reference):
            result["x.grad"], result["attack"] = result["x.grad"][:5], result["attack"][:5]
            del result["loss"], result["saliency"], result["parameters"]
    else:
        assert steps == {"taken": 10, "skipped": 0}
    torch.testing.assert_close(found, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("index", [0, 1])
def test_a_script_that_leaves_out_steps_itself_gets_the_scale_that_it_needs(
    mixed: Mixed, tmp_path: Path, index: int
) -> None:
    """It throws the gradients away, or sets them to zero: four overflows, then one a halving.

    Two models share the scale, which has to fall from 2^16 to 2^14.
    """
    found = mixed_by(mixed, tmp_path, "e_skip_nonfinite", MODES["float16"])
    stepped = found["stepped"][index]
    lost = stepped.index(True)
    assert lost == unskippable.PATIENCE + 1 - index
    assert all(stepped[lost:])
    assert autoamp.status()["loss_scale"]["final"] == 2.0**14
    reference = plain("e_skip_nonfinite")
    for key in ("loss", "parameters"):
        expected = reference[key][index][:-lost]
        torch.testing.assert_close(found[key][index][lost:], expected, rtol=0.01, atol=0.01)


# How often the engine runs, and what it leaves.


class Runs:
    """Counts the runs of the engine that reach a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.count = 0
        tensor.register_hook(self.note)

    def note(self, grad: torch.Tensor) -> None:
        self.count += 1


def test_the_scale_falls_once_and_later_runs_begin_where_it_fell_to(mixed: Mixed) -> None:
    session = mixed()
    model = layer()
    runs, counts = Runs(model.weight), []
    for _ in range(3):
        model.weight.grad = None
        (model(ones()) * 9).sum().backward()
        assert model.weight.grad.tolist() == [[9.0, 9.0, 9.0]]
        counts.append(runs.count)
    assert counts == [5, 6, 7]  # 9 * 65536 / 2^4 is the first that half holds
    assert session.loss_scale.state()["scale"] == 65536.0
    for _ in range(2):
        assert torch.autograd.grad(model(ones()).sum() * 9, model.weight)[0][0, 0] == 9.0
        counts.append(runs.count)
    assert counts[3:] == [12, 13]


def test_the_limit_grows_again_as_the_loss_scale_does(mixed: Mixed, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("loss_scale: {interval: 3}")
    mixed(str(policy))
    model = layer()
    runs, counts = Runs(model.weight), []
    (model(ones()) * 9).sum().backward()
    for _ in range(8):
        (model(ones()) * 2.0**-9).sum().backward()
        counts.append(runs.count)
    (model(ones()) * 9).sum().backward()
    assert counts == list(range(6, 14))
    assert runs.count == 16  # from 2^12 it has grown twice: three runs, where five were needed


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("kind", ["backward", "grad"])
def test_a_graph_that_was_kept_to_run_again_is_let_go_of(
    mixed: Mixed, kind: str, retain: bool
) -> None:
    """Its memory is free while the loss still lives, and a second backward is torch's own error."""
    mixed()
    model = layer()
    hidden = (model(ones()) * 9).exp()
    saved = StorageWeakRef(hidden.untyped_storage())
    loss = hidden.sum()
    del hidden

    def run() -> None:
        if kind == "grad":
            torch.autograd.grad(loss, model.weight, retain_graph=retain)
        else:
            loss.backward(retain_graph=retain)

    run()
    assert saved.expired() is not retain
    if retain:
        run()
    else:
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            run()


def test_what_a_run_has_not_used_up_is_still_there(mixed: Mixed) -> None:
    """Split by hand: the gradient of an activation first, and from there to the parameters."""
    mixed()
    first, second = layer(), nn.Linear(1, 1, bias=False)
    hidden = first(ones()).exp()
    loss = (second(hidden) * 9).sum()
    (grad,) = torch.autograd.grad(loss, hidden)
    hidden.backward(grad)
    expected = 9 * second.weight.item() * hidden.item()
    assert first.weight.grad[0].tolist() == pytest.approx([expected] * 3, rel=2e-3)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_gradients_that_were_there_are_there_once_whatever_it_took(mixed: Mixed) -> None:
    """In the same tensors: something may hold on to them."""
    mixed()
    model, table = layer(), nn.Embedding(5, 3, sparse=True)
    model.weight.grad = held = torch.ones(1, 3)
    loss = (model(table(torch.tensor([1])))).sum() * 9
    loss.backward()
    (model(table(torch.tensor([1, 4]))).sum() * 9).backward()
    assert model.weight.grad is held
    row = table.weight.detach()
    expected = 1 + 9 * (2 * row[1] + row[4])
    torch.testing.assert_close(held[0], expected, rtol=2e-3, atol=5e-3)
    dense = table.weight.grad.to_dense()
    for index, factor in enumerate((0, 18, 0, 0, 9)):
        torch.testing.assert_close(dense[index], factor * model.weight[0], rtol=2e-3, atol=1e-3)


def test_overflows_in_reentrant_checkpoints_are_repeated_too(mixed: Mixed) -> None:
    mixed()
    model, other = layer(), nn.Linear(1, 1, bias=False)
    x = ones().requires_grad_()
    out = checkpoint(lambda x: other(model(x)), x, use_reentrant=True)
    (out * 9).sum().backward()
    expected = 9 * other.weight.item()
    assert model.weight.grad[0].tolist() == pytest.approx([expected] * 3, rel=2e-3)
    torch.testing.assert_close(x.grad, expected * model.weight.detach(), rtol=2e-3, atol=1e-3)


def test_gradients_that_can_be_differentiated_again_are_finite(mixed: Mixed) -> None:
    mixed()
    model = layer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cycle that create_graph makes
        (model(ones()).pow(2) * 9).sum().backward(create_graph=True)
    (second,) = torch.autograd.grad(model.weight.grad.sum(), model.weight)
    assert second.tolist() == [[54.0] * 3]
    model.weight.grad = None


def test_what_stays_infinite_comes_out_infinite_after_falling_to_one(mixed: Mixed) -> None:
    mixed()
    x = torch.zeros(2, requires_grad=True)
    model = layer()
    runs = Runs(x)
    (model(ones()).sum() + x.sqrt().sum()).backward()
    assert x.grad.tolist() == [float("inf")] * 2
    assert runs.count == 17
    assert model.weight.grad.tolist() == [[1.0] * 3]
    before = runs.count
    (model(ones()).sum() * 2.0**-4).backward()
    assert runs.count == before  # and no later run pays for it: 65536 is tried first
    assert model.weight.grad.tolist() == [[1.0625] * 3]


def test_a_loss_that_is_not_finite_is_not_tried_again(mixed: Mixed) -> None:
    mixed()
    model = layer()
    runs = Runs(model.weight)
    (model(ones()).sum() * float("nan")).backward()
    assert model.weight.grad.isnan().all()
    assert torch.autograd.grad(model(ones()).sum() * float("inf"), model.weight)[0].isinf().all()
    assert runs.count == 2


# What belongs to an optimizer is its gate's affair.


def test_leaves_of_an_optimizer_keep_their_overflow_beside_others_that_are_finite(
    mixed: Mixed,
) -> None:
    """As by hand the step is skipped; the gradient of the input is what it is in float32."""
    session = mixed()
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):  # not known yet, and known
        x = ones().requires_grad_()
        before = model.weight.detach().clone()
        (model(x) * 9).sum().backward()
        assert model.weight.grad.isinf().all()
        torch.testing.assert_close(x.grad, 9 * before, rtol=2e-3, atol=1e-3)
        optimizer.step()
        assert torch.equal(model.weight, before)
        assert session.loss_scale.state()["scale"] == 32768.0 / 2**step
        optimizer.zero_grad()


def test_what_a_backward_adds_up_keeps_its_overflow_too(mixed: Mixed) -> None:
    mixed()
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(ones()) * 2.0**-9).sum().backward()
    held = model.weight.grad
    x = ones().requires_grad_()
    (model(x) * 9).sum().backward()
    assert x.grad.isfinite().all()
    assert model.weight.grad is held
    assert held.isinf().all()
    before = model.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.weight, before)


def test_an_optimizer_that_is_gone_owns_nothing(mixed: Mixed) -> None:
    mixed()
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(ones()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    (model(ones()) * 9).sum().backward()
    assert model.weight.grad.tolist() == [[9.0] * 3]


def test_parameters_that_an_optimizer_gets_later_are_found(mixed: Mixed) -> None:
    """Pruning, densification: the entries of a group are replaced."""
    session = mixed()
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(ones()) * 2.0**-9).sum().backward()
    optimizer.step()
    model.weight = nn.Parameter(model.weight.detach().clone())
    optimizer.param_groups[0]["params"] = [model.weight]
    (model(ones()) * 9).sum().backward()
    assert model.weight.grad.isinf().all()
    optimizer.step()
    assert session.loss_scale.state()["scale"] == 32768.0


class Synchronisations(TorchDispatchMode):
    """Counts how often the host waits for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_ordinary_training_waits_for_nothing_in_backward_and_keeps_no_graph(
    mixed: Mixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed()
    monkeypatch.setattr(overflow, "host_knows", lambda tensor: False)  # as on a GPU
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    waited = []
    for step in range(10):
        loss = (model(ones()) * 9).sum()
        with Synchronisations() as synchronisations:
            loss.backward()
        waited.append(synchronisations.count)
        if step < 8:
            optimizer.step()
            optimizer.zero_grad()
    assert waited[0] > 0  # whose these parameters are was not known yet
    assert waited[1:] == [0] * 9


def test_a_few_gradients_that_are_thrown_away_cost_no_scale(mixed: Mixed) -> None:
    """Three overflows thrown away in a row, then a step: the scale is where it was."""
    session = mixed()
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(ones()) * 2.0**-9).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(4):
        for _ in range(unskippable.PATIENCE - 1):
            (model(ones()) * 9).sum().backward()
            assert model.weight.grad.isinf().all()
            optimizer.zero_grad()
        (model(ones()) * 2.0**-9).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert session.loss_scale.state()["scale"] == 65536.0
    assert autoamp.status()["steps"] == {"taken": 5, "skipped": 0}


@pytest.mark.parametrize("clear", [torch.Tensor.zero_, torch.Tensor.detach_])
def test_gradients_set_to_zero_are_thrown_away_and_others_are_not(
    mixed: Mixed, clear: Callable[[torch.Tensor], object]
) -> None:
    """Only the device knows, so it is asked every sixteenth time; after that, each time."""
    session = mixed()
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(ones()) * 2.0**-9).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    scales = []
    lost = unskippable.ROUND + unskippable.PATIENCE - 1
    for _ in range(lost + 4):
        (model(ones()) * 9).sum().backward()
        clear(model.weight.grad)
        scales.append(session.loss_scale.state()["scale"])
    if clear is torch.Tensor.zero_:
        assert scales == [65536.0] * lost + [32768.0, 16384.0, 8192.0, 4096.0]
        assert model.weight.grad.tolist() == [[0.0] * 3]
    else:
        assert set(scales) == {65536.0}


def test_an_accumulation_of_many_backwards_is_not_mistaken_for_thrown_away(mixed: Mixed) -> None:
    session = mixed()
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for step in range(3 * unskippable.ROUND):
            factor = 9 if step == 5 else 2.0**-9
            (model(ones()) * factor).sum().backward()
            assert session.loss_scale.state()["scale"] in (65536.0, 32768.0)
        optimizer.step()
        optimizer.zero_grad()
    assert session.loss_scale.state()["scale"] == 16384.0


# What cannot run again.


def test_a_backward_that_a_hook_has_acted_on_does_not_run_again(mixed: Mixed) -> None:
    """The hook has stepped with one gradient before another one overflowed."""
    mixed()
    first, second = layer(), nn.Linear(1, 1, bias=False)
    calls = []

    def act(parameter: torch.Tensor) -> None:
        calls.append(parameter.grad.clone())
        parameter.grad = None

    second.weight.register_post_accumulate_grad_hook(act)
    nn.init.constant_(second.weight, 512.0)
    (second(first(ones())) * 2.0**-9).sum().backward()
    assert len(calls) == 1
    assert calls[0].isfinite().all()
    second.weight.data.mul_(64)
    (second(first(ones())) * 2.0**-9).sum().backward()
    assert len(calls) == 2
    assert first.weight.grad.isinf().all()


def test_what_torch_compile_made_runs_once_with_its_memory_given_away(mixed: Mixed) -> None:
    mixed()
    model = layer()
    compiled = torch.compile(model, backend="aot_eager")
    runs = Runs(model.weight)
    kept: list[bool] = []
    compiled(ones()).sum().backward()
    model.weight.register_hook(
        lambda grad: kept.append(torch._C._autograd._get_current_graph_task_keep_graph())
    )
    (compiled(ones()) * 9).sum().backward()
    torch.autograd.grad((compiled(ones()) * 9).sum(), model.weight)
    assert runs.count == 3
    assert kept == [False, False]
    torch.compiler.reset()


def test_where_ranks_may_wait_for_each_other_nothing_runs_again(
    mixed: Mixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed()
    monkeypatch.setattr(repeating, "has_ranks", lambda: True)
    model = layer()
    runs = Runs(model.weight)
    (model(ones()) * 9).sum().backward()
    assert model.weight.grad.isinf().all()
    assert torch.autograd.grad((model(ones()) * 9).sum(), model.weight)[0].isinf().all()
    assert runs.count == 2


# Anomaly detection.


def test_an_anomaly_that_stays_is_an_error_and_leaves_gradients_as_they_were(mixed: Mixed) -> None:
    """The error and the warning are torch's own, and come once."""
    mixed()
    model = layer()
    model.weight.grad = torch.ones(1, 3)
    x = torch.zeros(2, requires_grad=True)
    runs = Runs(x)
    with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loss = model(ones()).sum() + (x.sqrt() * 0).sum()
        with pytest.raises(RuntimeError, match="Function 'SqrtBackward0' returned nan values"):
            loss.backward()
    assert [str(one.message)[:31] for one in told] == ["Error detected in SqrtBackward0"]
    assert runs.count == 0
    assert model.weight.grad.isfinite().all()
    assert x.grad is None


def test_an_anomaly_of_the_scale_lowers_it_for_the_optimizers_too(mixed: Mixed) -> None:
    session = mixed()
    model = nn.Sequential(layer(), nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.autograd.set_detect_anomaly(True):
        for _ in range(2):
            optimizer.zero_grad()
            (model(ones()) * 9).sum().backward()
            optimizer.step()
        assert torch.autograd.grad(model(ones()).sum() * 9, model[1].weight)[0].isfinite().all()
    assert session.loss_scale.state()["scale"] == 4096.0
    assert autoamp.status()["steps"] == {"taken": 2, "skipped": 0}
