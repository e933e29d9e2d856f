"""The gate: what a skipped step leaves alone, which step is skipped, and how the scale learns."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoamp

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
    for scale in (1e30, 1024.0):
        session.loss_scale.load({"scale": scale})
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    lines = capfd.readouterr().err.splitlines()
    assert lines[1:] == ["autoamp: step skipped, its gradients are not finite"]
