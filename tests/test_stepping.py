"""The gate: what a skipped step leaves alone, which step is skipped, and how the scale learns."""

from __future__ import annotations

import copy
import io
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autoamp
from autoamp.modules import Rules

Mixed = Callable[..., Any]
EXACT = {"rtol": 0.0, "atol": 0.0}


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def backward(model: nn.Module) -> None:
    model(torch.ones(4, 3)).pow(2).mean().backward()


def train(
    make: Callable[[Any], torch.optim.Optimizer], steps: int = 12
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """An unmodified script."""
    model = layer()
    optimizer = make(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], optimizer.state_dict()


def train_by_hand(
    make: Callable[[Any], torch.optim.Optimizer], init_scale: float, steps: int = 12
) -> tuple[list[torch.Tensor], dict[str, Any], float]:
    model = layer()
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(torch.ones(4, 3))
        scaler.scale(out.float().pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    parameters = [p.detach().clone() for p in model.parameters()]
    return parameters, optimizer.state_dict(), scaler.get_scale()


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD fused momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("init", [1024.0, 2.0**24])
def test_steps_equal_those_of_grad_scaler_bit_for_bit(
    mixed: Mixed, tmp_path: Any, name: str, init: float
) -> None:
    """At 2^24 the first steps overflow. Fused SGD with momentum is compared where none does: there
    GradScaler leaves its momentum uninitialised when the very first step is skipped."""
    if name == "SGD fused momentum":
        init = 1024.0
    parameters, state, scale = train_by_hand(OPTIMIZERS[name], init)
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"loss_scale: {{init: {init}}}")
    session = mixed(str(policy))
    found, found_state = train(OPTIMIZERS[name])
    torch.testing.assert_close(found, parameters, **EXACT)
    assert found_state.pop("autoamp")["scale"] == scale
    torch.testing.assert_close(found_state, state, **EXACT)
    session.loss_scale.read_back()
    assert (session.loss_scale.skipped > 0) is (init > 1024)


def test_fused_sgd_with_momentum_survives_an_overflow_in_its_first_step(
    mixed: Mixed, tmp_path: Any
) -> None:
    expected, _, _ = train_by_hand(OPTIMIZERS["SGD momentum"], 2.0**24)
    policy = tmp_path / "policy.yaml"
    policy.write_text("loss_scale: {init: 16777216}")
    session = mixed(str(policy))
    found, _ = train(OPTIMIZERS["SGD fused momentum"])
    session.loss_scale.read_back()
    assert session.loss_scale.skipped > 0
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_touches_neither_parameters_nor_state(mixed: Mixed, name: str) -> None:
    session = mixed()
    model = layer()
    optimizer = OPTIMIZERS[name](model.parameters())
    backward(model)
    optimizer.step()
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]])
    session.loss_scale.load({"scale": 1e30})
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    after = [model.state_dict(), optimizer.state_dict()["state"]]
    torch.testing.assert_close(after, before, **EXACT)
    session.loss_scale.read_back()
    assert (session.loss_scale.taken, session.loss_scale.skipped) == (1, 1)


@pytest.mark.parametrize(
    "clear",
    [
        lambda model: model.zero_grad(),
        lambda model: model.zero_grad(set_to_none=False),
        lambda model: [setattr(p, "grad", None) for p in model.parameters()],
        lambda model: [p.grad.zero_() for p in model.parameters()],
        lambda model: [p.grad.data.zero_() for p in model.parameters()],
    ],
)
def test_an_overflow_that_was_cleared_away_skips_no_good_step(
    mixed: Mixed, clear: Callable[[nn.Module], object]
) -> None:
    session = mixed()
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.loss_scale.load({"scale": 1e30})
    backward(model)
    clear(model)
    session.loss_scale.load({"scale": 1024.0})
    backward(model)
    optimizer.step()
    session.loss_scale.read_back()
    assert (session.loss_scale.taken, session.loss_scale.skipped) == (1, 0)
    assert session.loss_scale.state()["scale"] == 1024.0


def test_an_overflow_early_in_an_accumulation_skips_its_step(mixed: Mixed) -> None:
    session = mixed()
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    session.loss_scale.load({"scale": 1e30})
    backward(model)
    session.loss_scale.load({"scale": 1024.0})
    backward(model)
    optimizer.step()
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    session.loss_scale.read_back()
    assert session.loss_scale.skipped == 1


def test_an_overflow_concerns_only_the_optimizer_that_owns_it(mixed: Mixed) -> None:
    session = mixed()
    good, bad = layer(), layer()
    good_optimizer = torch.optim.SGD(good.parameters(), lr=0.1)
    bad_optimizer = torch.optim.SGD(bad.parameters(), lr=0.1)
    backward(good)
    session.loss_scale.load({"scale": 1e30})
    backward(bad)
    before = copy.deepcopy((good.state_dict(), bad.state_dict()))
    good_optimizer.step()
    bad_optimizer.step()
    assert not torch.equal(good.weight, before[0]["weight"])
    assert torch.equal(bad.weight, before[1]["weight"])
    session.loss_scale.read_back()
    assert (session.loss_scale.taken, session.loss_scale.skipped) == (1, 1)


def test_two_losses_that_overflow_at_one_scale_cost_one_halving(mixed: Mixed) -> None:
    session = mixed()
    models = [layer(), layer()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    session.loss_scale.load({"scale": 2.0**100})
    for model in models:
        backward(model)
    for optimizer in optimizers:
        optimizer.step()
    assert session.loss_scale.state()["scale"] == 2.0**99
    session.loss_scale.read_back()
    assert session.loss_scale.skipped == 2


def test_super_step_gates_once(mixed: Mixed) -> None:
    class Scaled(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    mixed()
    model = layer()
    optimizer = Scaled(model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    assert autoamp.status()["steps"] == {"taken": 1, "skipped": 0}


def test_a_class_first_used_before_activation_is_gated_and_restored(mixed: Mixed) -> None:
    class Early(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = layer()
    optimizer = Early(model.parameters(), lr=0.1)
    before = vars(Early)["step"]
    session = mixed()
    session.loss_scale.load({"scale": 1e30})
    weight = model.weight.detach().clone()
    backward(model)
    optimizer.step()
    assert torch.equal(model.weight, weight)
    autoamp.disable()
    assert vars(Early)["step"] is before


def test_step_hooks_do_not_run_for_a_skipped_step(mixed: Mixed) -> None:
    session = mixed()
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    backward(model)
    optimizer.step()
    session.loss_scale.load({"scale": 1e30})
    backward(model)
    optimizer.step()
    assert calls == ["before", "after"]


def test_schedulers_do_not_warn_when_the_first_step_is_skipped(mixed: Mixed) -> None:
    """Warnings are errors in this suite."""
    session = mixed()
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    session.loss_scale.load({"scale": 1e30})
    backward(model)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]
    session.loss_scale.read_back()
    assert session.loss_scale.skipped == 1


def test_a_closure_that_overflows_is_evaluated_again_in_float32(mixed: Mixed) -> None:
    session = mixed()
    model, reference = layer(), layer()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    plain = torch.optim.LBFGS(reference.parameters(), max_iter=1)
    session.loss_scale.load({"scale": 2.0**100})
    dropped: list[torch.Tensor] = []

    def closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        dropped.append(torch.rand(()))
        loss = model(torch.ones(4, 3)).pow(2).mean()
        loss.backward()
        return loss

    optimizer.step(lambda: closure(model, optimizer))
    assert len(dropped) == 2
    assert torch.equal(dropped[0], dropped[1])
    assert session.loss_scale.state()["scale"] == 2.0**99
    with autoamp.off():
        plain.step(lambda: closure(reference, plain))
    torch.testing.assert_close(model.weight, reference.weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("keyword", [True, False])
def test_closures_by_position_and_by_keyword_take_their_step(mixed: Mixed, keyword: bool) -> None:
    session = mixed()
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).pow(2).mean()
        loss.backward()
        return loss

    loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
    assert loss.dtype is torch.float32
    assert not torch.equal(model.weight, before)
    session.loss_scale.read_back()
    assert (session.loss_scale.taken, session.loss_scale.skipped) == (1, 0)


def test_steps_without_any_gradient_are_no_error(mixed: Mixed) -> None:
    mixed()
    model = layer()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    assert autoamp.status()["steps"] == {"taken": 1, "skipped": 0}


def test_bfloat16_steps_are_counted_and_never_skipped(mixed: Mixed) -> None:
    mixed(dtype="bfloat16")
    train(OPTIMIZERS["Adam"], steps=4)
    assert autoamp.status()["steps"] == {"taken": 4, "skipped": 0}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rules_hear_of_each_step_also_where_no_region_opens(
    mixed: Mixed, tmp_path: Any, dtype: str
) -> None:
    """Compiled code guards on the phase and opens no region of its own: the step has to tell it."""
    rule = "modules: [{name: '*', precision: float32, steps: {from: 2, to: 4}}]"
    (tmp_path / "steps.yaml").write_text(rule)
    session = mixed(str(tmp_path / "steps.yaml"), dtype=dtype)
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 3)).sum().backward()
    phases = []
    for spoilt in (False, True, False, False, False):
        optimizer.zero_grad()
        (model.weight.sum() * (float("inf") if spoilt else 1.0)).backward()
        optimizer.step()
        phases.append(session.modules.phase)
    assert phases == ["0", "1", "1", "2", "2"]
    skipped = {"float16": 1, "bfloat16": 0}[dtype]
    assert autoamp.status()["steps"] == {"taken": 5 - skipped, "skipped": skipped}


def test_a_step_is_not_told_to_a_policy_without_rules(
    mixed: Mixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(Rules, "step_ended", lambda self: told.append(True))
    for dtype in ("float16", "bfloat16"):
        mixed(dtype=dtype)
        train(OPTIMIZERS["Adam"])
    assert told == []


def test_the_script_s_own_grad_scaler_owns_the_scaling(mixed: Mixed) -> None:
    parameters, state, scale = train_by_hand(OPTIMIZERS["Adam"], 2.0**24)
    session = mixed()
    with torch.autocast("cpu", torch.float16):
        layer()(torch.ones(4, 3))
    found, found_state, found_scale = train_by_hand(OPTIMIZERS["Adam"], 2.0**24)
    torch.testing.assert_close([found, found_state], [parameters, state], **EXACT)
    assert found_scale == scale
    assert session.scaler_owner == "the script's own GradScaler"
    assert not session.scales


def test_the_loss_scale_rides_in_the_optimizer_s_state(mixed: Mixed) -> None:
    session = mixed("default")
    model = layer()
    optimizer = torch.optim.Adam(model.parameters())
    backward(model)
    optimizer.step()
    session.loss_scale.load({"scale": 4096.0, "growth_tracker": 7})
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)

    session = mixed("default")
    file.seek(0)
    fresh = torch.optim.Adam(layer().parameters())
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert session.loss_scale.state() == {
        "scale": 4096.0,
        "growth_tracker": 7,
        "skips_in_a_row": 0,
    }

    autoamp.disable()
    file.seek(0)
    plain = torch.optim.Adam(layer().parameters())
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert set(plain.state_dict()) == {"state", "param_groups"}


def test_plain_checkpoints_load_and_leave_the_scale_alone(mixed: Mixed) -> None:
    _, state = train(OPTIMIZERS["Adam"])
    session = mixed()
    model = layer()
    backward(model)
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    session.loss_scale.load({"scale": 512.0})
    optimizer.load_state_dict(state)
    assert session.loss_scale.state()["scale"] == 512.0
    assert "autoamp" not in state


def test_info_logs_each_skipped_step(mixed: Mixed, capfd: pytest.CaptureFixture[str]) -> None:
    session = mixed(LOG="info")
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for scale in (2.0**100, 1024.0):
        session.loss_scale.load({"scale": scale})
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    lines = capfd.readouterr().err.splitlines()
    assert lines[1:] == [
        "autoamp: step 1: skipped, its gradients are not finite; "
        "loss scale 1.2676506e+30 -> 6.338253001e+29"
    ]


# --- no more synchronisation than GradScaler ------------------------------------------------------


class Synchronisations(TorchDispatchMode):
    """Counts what makes the host wait for a device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_synchronises_no_more_than_with_grad_scaler(mixed: Mixed, name: str) -> None:
    """A step that is taken. Fused kernels wait for nothing at all."""
    model = layer()
    optimizer, scaler = OPTIMIZERS[name](model.parameters()), torch.amp.GradScaler("cpu")
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 3)).mean()).backward()
        with Synchronisations() as expected:
            scaler.step(optimizer)
            scaler.update()

    session = mixed(LOSS_SCALE="128")
    model = layer()
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        with Synchronisations() as found:
            optimizer.step()
    assert found.count <= expected.count
    assert (found.count == 0) is ("fused" in name)
    session.loss_scale.read_back()
    assert session.loss_scale.taken == 2


def test_a_held_scheduler_costs_one_synchronisation(mixed: Mixed, tmp_path: Any) -> None:
    """The second one of the same optimizer costs none."""
    policy = tmp_path / "hold.yaml"
    policy.write_text("loss_scale: {hold_schedulers: true}")
    session = mixed(str(policy))
    model = layer()
    optimizer = OPTIMIZERS["Adam fused"](model.parameters())
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _ in range(2)]
    rates = []
    for scale in (1024.0, 1e30, 1024.0):
        session.loss_scale.load({"scale": scale})
        optimizer.zero_grad()
        backward(model)
        with Synchronisations() as waits:
            optimizer.step()
        assert waits.count == 0
        with Synchronisations() as waits:
            for scheduler in schedulers:
                scheduler.step()
        assert waits.count == 1
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.025, 0.025, 0.00625])


# --- what was there before autoamp ---------------------------------------------------------------


def test_an_optimizer_whose_scheduler_came_before_autoamp_is_gated(mixed: Mixed) -> None:
    """The scheduler keeps the ``step`` that it found; `disable()` puts that back, by identity."""
    autoamp.disable()
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    kept = [cell.cell_contents for cell in vars(optimizer)["step"].__closure__]
    for _ in range(2):
        session = mixed()
        session.loss_scale.load({"scale": 1e30})
        weight = model.weight.detach().clone()
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        scheduler.step()
        assert torch.equal(model.weight, weight)
        session.loss_scale.read_back()
        assert (session.loss_scale.taken, session.loss_scale.skipped) == (0, 1)
        autoamp.disable()
        now = [cell.cell_contents for cell in vars(optimizer)["step"].__closure__]
        assert all(a is b for a, b in zip(kept, now, strict=True))
    assert scheduler.get_last_lr() == [0.25]


def test_a_scheduler_of_one_session_is_gated_in_the_next(mixed: Mixed) -> None:
    mixed()
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    session = mixed()
    session.loss_scale.load({"scale": 1e30})
    weight = model.weight.detach().clone()
    backward(model)
    optimizer.step()
    assert torch.equal(model.weight, weight)
    session.loss_scale.read_back()
    assert (session.loss_scale.taken, session.loss_scale.skipped) == (0, 1)


# --- steps inside of steps, steps that fail ------------------------------------------------------


class Outer(torch.optim.Optimizer):
    """A wrapper that shares the groups of the optimizer in it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize("name", ["SGD", "Adam fused"])
@pytest.mark.parametrize("scale", [1024.0, 1e30])
def test_a_wrapper_and_what_is_in_it_are_one_step(mixed: Mixed, name: str, scale: float) -> None:
    session = mixed()
    model = layer()
    optimizer = Outer(OPTIMIZERS[name](model.parameters()))
    session.loss_scale.load({"scale": scale})
    backward(model)
    optimizer.step()
    session.loss_scale.read_back()
    taken = int(scale == 1024.0)
    assert (session.loss_scale.taken, session.loss_scale.skipped) == (taken, 1 - taken)
    assert session.loss_scale.state()["growth_tracker"] == taken


def test_wrappers_count_once_in_bfloat16_too(mixed: Mixed) -> None:
    mixed(dtype="bfloat16")
    model = layer()
    backward(model)
    Outer(torch.optim.SGD(model.parameters(), lr=0.1)).step()
    assert autoamp.status()["steps"] == {"taken": 1, "skipped": 0}


def test_a_scheduler_of_the_inner_optimizer_is_held_with_the_wrapper(
    mixed: Mixed, tmp_path: Any
) -> None:
    policy = tmp_path / "hold.yaml"
    policy.write_text("loss_scale: {hold_schedulers: true}")
    session = mixed(str(policy))
    model = layer()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer, scheduler = Outer(inner), torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    rates = []
    for scale in (1024.0, 1e30, 1024.0):
        session.loss_scale.load({"scale": scale})
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        scheduler.step()
        rates += scheduler.get_last_lr()
    assert rates == [0.5, 0.5, 0.25]
    session.loss_scale.load({"scale": 1e30})
    optimizer.zero_grad()
    backward(model)
    inner.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.25]


def test_a_scheduler_that_is_made_after_a_skipped_step_sets_its_first_rate(
    mixed: Mixed, tmp_path: Any
) -> None:
    policy = tmp_path / "hold.yaml"
    policy.write_text("loss_scale: {hold_schedulers: true}")
    session = mixed(str(policy))
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    session.loss_scale.load({"scale": 1e30})
    backward(model)
    optimizer.step()
    first = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5)
    assert first.get_last_lr() == [0.5]
    rest = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, rest], milestones=[4])
    assert both.get_last_lr() == [0.5]
    both.step()
    assert both.get_last_lr() == [0.5]
    both.optimizer.zero_grad()
    session.loss_scale.load({"scale": 1024.0})
    backward(model)
    optimizer.step()
    both.step()
    assert both.get_last_lr() == pytest.approx([0.6])


def test_a_fused_optimizer_that_asks_for_a_grad_scaler_is_gated_by_the_host(mixed: Mixed) -> None:
    """It would not look at ``found_inf`` (apex's)."""

    class Asks(torch.optim.SGD):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._step_supports_amp_scaling = True

        def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:
            return super().step(closure)

    session = mixed()
    model = layer()
    optimizer = Asks(model.parameters(), lr=0.1)
    session.loss_scale.load({"scale": 1e30})
    weight = model.weight.detach().clone()
    backward(model)
    optimizer.step()
    assert torch.equal(model.weight, weight)


def test_a_gradient_scale_of_the_script_s_own_reaches_the_kernel_and_stays(mixed: Mixed) -> None:
    """Fused kernels divide by the attribute ``grad_scale`` of their optimizer."""
    session = mixed()
    session.loss_scale.load({"scale": 1024.0})
    weights = []
    for scale in (1.0, 4.0):
        model = layer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        optimizer.grad_scale = torch.tensor(scale)
        (model(torch.ones(4, 3)).pow(2).mean() * scale).backward()
        optimizer.step()
        assert optimizer.grad_scale == scale
        assert "found_inf" not in vars(optimizer)
        weights.append(model.weight)
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-4)
    assert not torch.equal(weights[0], layer().weight)


def test_a_first_step_backs_off_from_its_own_overflow(mixed: Mixed) -> None:
    """A new optimizer has not seen the overflows of others, long ago and at another scale."""
    session = mixed()
    for scale in (2.0**100, 2.0**110):
        model = layer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.loss_scale.load({"scale": scale})
        backward(model)
        optimizer.step()
        assert session.loss_scale.state()["scale"] == scale / 2


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adam fused", "SGD fused momentum"])
@pytest.mark.parametrize("where", ["before", "in", "after"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_is_interrupted_can_be_made_again(
    mixed: Mixed,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    where: str,
    error: type[BaseException],
) -> None:
    """It is gated again, by the same backward: an overflow that fused kernels skip is one still."""
    session = mixed()
    model = layer()
    optimizer = OPTIMIZERS[name](model.parameters())
    backward(model)
    optimizer.step()
    before = copy.deepcopy(model.state_dict())

    def fail(*_: Any) -> None:
        raise error

    overflows = "fused" in name
    session.loss_scale.load({"scale": 1e30 if overflows else 1024.0})
    optimizer.zero_grad()
    backward(model)
    if where == "in":
        monkeypatch.setattr(optimizer, "_optimizer_step_code", fail)
    else:
        hooks = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        handle = hooks[where == "after"](fail)
    with pytest.raises(error):
        optimizer.step()
    monkeypatch.undo() if where == "in" else handle.remove()
    assert not {"found_inf", "grad_scale"} & vars(optimizer).keys()
    assert session.gates._local.ids == set()
    assert autoamp.status()["steps"] == {"taken": 1, "skipped": 0}

    optimizer.step()
    session.loss_scale.read_back()
    assert session.counts.steps == 0
    if overflows:
        assert (session.loss_scale.taken, session.loss_scale.skipped) == (1, 1)
        torch.testing.assert_close(model.state_dict(), before, **EXACT)
    else:
        assert (session.loss_scale.taken, session.loss_scale.skipped) == (2, 0)


@pytest.mark.parametrize("where", ["forward", "backward", "after the backward", "in float32"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_closure_that_is_interrupted_leaves_everything_as_it_was(
    mixed: Mixed, where: str, error: type[BaseException]
) -> None:
    """Gate, scale and autocast; and the next step is the one that would have come."""
    session = mixed()
    model, reference = layer(), layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    is_bad, evaluations = True, 0

    def fail(*_: Any) -> None:
        if is_bad and (where != "in float32" or evaluations == 2):
            raise error

    def closure() -> torch.Tensor:
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        out = model(torch.ones(4, 3))
        if where in ("backward", "in float32"):
            out.register_hook(fail)
        loss = out.pow(2).mean()
        loss.backward()
        if where == "after the backward":
            fail()
        return loss

    handle = model.register_forward_hook(fail) if where == "forward" else None
    session.loss_scale.load({"scale": 2.0**100 if where == "in float32" else 1024.0})
    before = session.loss_scale.state()
    with pytest.raises(error):
        optimizer.step(closure)
    assert session.gates._local.ids == set()
    assert session.loss_scale.state() == before
    assert not torch.is_autocast_enabled("cpu")
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), **EXACT)

    is_bad = False
    if handle is not None:
        handle.remove()
    session.loss_scale.load({"scale": 1024.0})
    for _ in range(2):
        optimizer.step(closure)
        plain.zero_grad()
        with autoamp.off():
            reference(torch.ones(4, 3)).pow(2).mean().backward()
        plain.step()
    torch.testing.assert_close(model.weight, reference.weight, rtol=2e-3, atol=2e-3)
    session.loss_scale.read_back()
    assert (session.loss_scale.taken, session.loss_scale.skipped) == (4, 0)  # 2 of the reference


# --- closures ------------------------------------------------------------------------------------


def test_what_a_step_asks_of_a_closure_after_an_overflow_is_float32(mixed: Mixed) -> None:
    """One evaluation more, not one for each; and one halving."""
    session = mixed()
    model = layer()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    session.loss_scale.load({"scale": 2.0**100})
    dtypes: list[torch.dtype] = []
    model.register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).pow(2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert dtypes == [torch.float16] + [torch.float32] * 4
    assert session.loss_scale.state()["scale"] == 2.0**99


def test_every_generator_is_put_back_before_a_closure_runs_again(mixed: Mixed) -> None:
    session = mixed()
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.loss_scale.load({"scale": 2.0**100})
    drawn: list[tuple[float, float, float]] = []

    def closure() -> torch.Tensor:
        drawn.append((float(torch.rand(())), random.random(), numpy.random.random()))
        optimizer.zero_grad()
        backward(model)
        return torch.zeros(())

    optimizer.step(closure)
    assert len(drawn) == 2
    assert drawn[0] == drawn[1]


def test_a_closure_that_is_not_finite_in_float32_either_is_the_script_s_affair(
    mixed: Mixed,
) -> None:
    """A line search tries absurd steps: the loss scale is not to blame for those."""
    session = mixed()
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).mean() * float("inf")
        loss.backward()
        return loss

    assert not optimizer.step(closure).isfinite()
    assert session.loss_scale.state()["scale"] == 65536.0
    session.loss_scale.read_back()
    assert (session.loss_scale.taken, session.loss_scale.skipped) == (1, 0)


def test_a_gradient_that_a_closure_adds_to_keeps_its_identity(mixed: Mixed) -> None:
    """It may be a view of something larger (DDP's buckets), and hold what came before."""
    session = mixed()
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    places = [torch.ones_like(p) for p in model.parameters()]
    for p, place in zip(model.parameters(), places, strict=True):
        p.grad = place
    session.loss_scale.load({"scale": 2.0**100})

    def closure() -> torch.Tensor:
        backward(model)
        return torch.zeros(())

    optimizer.step(closure)
    reference = layer()
    with autoamp.off():
        backward(reference)
    for p, place, other in zip(model.parameters(), places, reference.parameters(), strict=True):
        assert p.grad is place
        torch.testing.assert_close(place, other.grad + 1, rtol=1e-6, atol=1e-6)


def test_closures_in_bfloat16_are_called_as_they_are(mixed: Mixed, tmp_path: Any) -> None:
    """Nothing is kept for a second evaluation that cannot come, though other devices run FP16."""
    policy = tmp_path / "both.yaml"
    policy.write_text("devices: {cuda: float16, cpu: bfloat16}")
    assert mixed(str(policy), dtype=None).may_scale
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []

    class Watches(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(closure)
            return super().step(closure)

    backward(model)
    optimizer.step()

    def closure() -> torch.Tensor:
        return torch.zeros(())

    Watches(model.parameters(), lr=0.1).step(closure)
    assert seen == [closure]


# --- what is said, what is saved -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["SGD", "Adam fused"])
def test_overflow_at_the_floor_is_said_in_one_line(
    mixed: Mixed, tmp_path: Any, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """At once where the host knows; where only the device does, when it is asked anyway."""
    policy = tmp_path / "floor.yaml"
    policy.write_text("loss_scale: {init: 2, min: 1}")
    mixed(str(policy))
    model = layer()
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        (model(torch.ones(4, 3)).mean() * float("nan")).backward()
        optimizer.step()
    autoamp.status()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith(
        "autoamp: gradients keep overflowing at the least loss scale, 1: steps are skipped; look"
    )


def test_a_loaded_scale_is_saved_again_before_any_model_has_run(mixed: Mixed) -> None:
    mixed()
    model = layer()
    optimizer = torch.optim.Adam(model.parameters())
    assert "autoamp" not in optimizer.state_dict()
    saved = {"scale": 512.0, "growth_tracker": 3, "skips_in_a_row": 0}
    optimizer.load_state_dict({**optimizer.state_dict(), "autoamp": saved})
    assert optimizer.state_dict()["autoamp"] == saved


@pytest.mark.parametrize("junk", [None, "v1", [1, 2], {"other": {}}])
def test_somebody_else_s_entry_under_our_key_is_no_error(mixed: Mixed, junk: Any) -> None:
    session = mixed()
    optimizer = torch.optim.Adam(layer().parameters())
    optimizer.load_state_dict({**optimizer.state_dict(), "autoamp": junk})
    assert session.loss_scale.state()["scale"] == 65536.0


@pytest.mark.parametrize("scale", ["dynamic", "1073741824"])
def test_optimizers_that_step_in_the_backward_get_true_gradients(mixed: Mixed, scale: str) -> None:
    """torch's own way of it hooks the graph's nodes; a step that overflows is skipped there too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it loads TorchScript, which torch calls deprecated
        from torch.distributed.optim import _apply_optimizer_in_backward

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    reference, x = copy.deepcopy(model), torch.randn(16, 4)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(5 if scale == "dynamic" else 0):
        optimizer.zero_grad()
        reference(x).pow(2).mean().backward()
        optimizer.step()
    session = mixed(LOSS_SCALE=scale)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    for _ in range(5):
        model(x).pow(2).mean().backward()
    assert all(p.grad is None for p in model.parameters())
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=4e-3, atol=4e-3)
    session.loss_scale.read_back()
    counts = session.loss_scale.taken, session.loss_scale.skipped
    assert counts == ((20, 0) if scale == "dynamic" else (0, 20))
