"""Modules that half precision breaks: they run again in float32, and nothing else is changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoamp

Mixed = Callable[..., Any]
Function = Callable[[torch.Tensor], Any]


class Linear(nn.Linear):
    """A linear layer that knows what it last gave."""

    gave: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.gave = y.dtype
        return y


class Part(nn.Module):
    """A module whose own code is `function`, of what its linear layer gives."""

    def __init__(self, function: Function, width: int = 4) -> None:
        super().__init__()
        self.linear, self.function = Linear(width, width), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.linear(x))


class Net(nn.Module):
    """A root with a part in the middle."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = Linear(4, 4), part, Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.part(self.first(x)))


class Normed(nn.Module):
    """Its norm is in code that half precision breaks in large batches, and in no small one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x) + 10)
        return y * (torch.ones_like(y) + 1e-8) if len(x) > 32 else y


def demotions() -> list[tuple[str, bool]]:
    """(module, with all below it) of what was demoted so far."""
    return [(d["module"], d["below"]) for d in autoamp.status()["demotions"]]


def given(net: nn.Module) -> list[torch.dtype]:
    return [part.gave for part in net.modules() if isinstance(part, Linear)]


def only_float32(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is not torch.float32:
        raise RuntimeError("expected scalar type Float but found Half")
    return x * 2


def asserts_float32(x: torch.Tensor) -> torch.Tensor:
    assert x.dtype == torch.float32
    return x * 2


def needs_exact_rows(x: torch.Tensor) -> torch.Tensor:
    """As `torch.distributions` checks probabilities: a ValueError that names no dtype."""
    p = torch.softmax(x.detach(), -1)
    p = (p.half() if x.dtype is torch.float16 else p).float()
    if (p.sum(-1) - 1).abs().max() > 1e-6:
        raise ValueError("probabilities do not add up to one")
    return x


@pytest.mark.parametrize("function", [only_float32, asserts_float32, needs_exact_rows])
@pytest.mark.parametrize("first", [True, False], ids=["watched", "later"])
def test_a_module_that_raises_runs_in_float32_and_what_it_calls_does_not(
    mixed: Mixed, function: Function, first: bool
) -> None:
    torch.manual_seed(0)
    x, net = torch.randn(16, 4), Net(Part(lambda x: x))
    mixed("default")
    if not first:
        net(x)
    net.part.function = function
    result = net(x)
    half, full = torch.float16, torch.float32
    assert demotions() == [("part", False)]
    assert given(net) == [half, half, half]
    again = net(x)
    assert torch.equal(again, result)
    autoamp.disable()
    torch.testing.assert_close(result, net(x), rtol=2e-3, atol=2e-3)
    assert given(net) == [full, full, full]


def test_the_whole_part_and_then_its_caller_follow_where_that_does_not_help(mixed: Mixed) -> None:
    """The layer's own result is what cannot be half, and then what came before it."""
    mixed("default")

    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Part(lambda x: x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            if self.inner.linear.gave is not torch.float32:
                raise RuntimeError("the layer gave Half")
            return y

    net = Net(Strict())
    net(torch.ones(2, 4))
    assert demotions() == [("part", True)]
    assert given(net) == [torch.float16, torch.float32, torch.float16]

    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.then = Linear(4, 4), Part(self.look)

        def look(self, x: torch.Tensor) -> torch.Tensor:
            if self.first.gave is not torch.float32:
                raise RuntimeError("the first layer gave Half")
            return x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.then(self.first(x))

    picky = Net(Picky())
    picky(torch.ones(2, 4))
    assert demotions()[1:] == [("part", True)]
    assert given(picky) == [torch.float16, torch.float32, torch.float32, torch.float16]


@pytest.mark.parametrize("error", [RuntimeError("shapes cannot be multiplied"), KeyError("x")])
def test_other_errors_pass_as_they_are_and_the_call_is_not_made_again(
    mixed: Mixed, error: Exception
) -> None:
    mixed("default")
    calls = []

    def fail(x: torch.Tensor) -> None:
        calls.append(x)
        raise error

    with pytest.raises(type(error)) as caught:
        Net(Part(fail))(torch.ones(2, 4))
    assert caught.value is error
    assert len(calls) == 1
    assert demotions() == []


def test_an_error_that_float32_does_not_cure_is_the_first_one_and_tried_once(mixed: Mixed) -> None:
    mixed("default")
    calls = []

    def fail(x: torch.Tensor) -> None:
        calls.append(x.dtype)
        raise AssertionError("bad value")

    net = Net(Part(fail))
    for _ in range(2):
        with pytest.raises(AssertionError, match="bad value") as caught:
            net(torch.ones(2, 4))
    frames = [entry.path for entry in caught.traceback]
    assert str(frames[-1]) == __file__
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None
    assert demotions() == []
    assert calls[:3] == [torch.float16, torch.float32, torch.float32]
    assert len(calls) < 12
    assert calls[-2:] == [torch.float32, torch.float16]  # the second time nothing was tried


def test_on_error_raise_leaves_errors_alone(mixed: Mixed, tmp_path: Any) -> None:
    policy = tmp_path / "raise.yaml"
    policy.write_text("extends: default\nfallback: {on_error: raise}\n")
    mixed(str(policy))
    with pytest.raises(RuntimeError, match="expected scalar type Float but found Half"):
        Net(Part(only_float32))(torch.ones(2, 4))


class Noisy(nn.Module):
    """All that a forward may change: random states, statistics, buffers that are replaced."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.norm, self.drop, self.function = nn.BatchNorm1d(4), nn.Dropout(0.5), function
        self.register_buffer("count", torch.zeros(()))
        self.draws: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        x = self.drop(self.norm(x))
        draws = [random.random(), np.random.rand()]
        y = self.function(x)
        self.draws.append(draws)
        return y


@pytest.mark.parametrize("kind", ["raises", "lost constant", "overflow"])
def test_random_states_and_buffers_are_as_if_there_had_been_one_attempt(
    mixed: Mixed, kind: str
) -> None:
    function = {
        "raises": only_float32,
        "lost constant": lambda x: x + 1e-8,
        "overflow": lambda x: x * 6e4 * 6e4 / 36e8,
    }[kind]

    def run(function: Function) -> tuple[Any, ...]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        net = Net(Noisy(function))
        out = net(torch.randn(8, 4))
        after = torch.rand(1).item(), random.random(), np.random.rand()
        return net, out, after

    plain, expected, after = run(function)
    mixed("default")
    net, out, found = run(function)
    assert demotions() == [("part", False)]
    assert found == after
    assert net.part.draws == plain.part.draws
    assert net.part.norm.num_batches_tracked.item() == 1
    assert net.part.count.item() == 1
    torch.testing.assert_close(
        net.part.norm.running_mean, plain.part.norm.running_mean, rtol=0, atol=1e-3
    )
    torch.testing.assert_close(out, expected, rtol=5e-3, atol=5e-3)


def test_odd_modules_are_looked_at_like_others(mixed: Mixed) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = Linear(4, 4)
            self.modules = self.parameters = self.buffers = None  # type: ignore[assignment]
            self.lazy = nn.LazyLinear(4)
            self.register_buffer("sparse", torch.eye(2).to_sparse())
            self.register_buffer("nothing", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lazy(self.linear(x) + 1e-8)

    mixed("default")
    result = Net(Odd())(torch.ones(2, 4))
    assert result.isfinite().all()
    assert demotions() == [("part", False)]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("function", [only_float32, lambda x: x + 1e-8])
def test_checkpoints_recompute_what_a_demoted_module_did(
    mixed: Mixed, function: Function, reentrant: bool
) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part(function)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.part, x, use_reentrant=reentrant)

    torch.manual_seed(0)
    x, net = torch.randn(3, 4), Net(Checkpointed())
    net(x).sum().backward()
    expected = [p.grad.clone() for p in net.parameters()]
    mixed("default")
    for _ in range(2):
        net.zero_grad()
        net(x).sum().backward()
        for parameter, gradient in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=2e-2, atol=2e-2)
    assert demotions() == [("part.part", False)]


def test_a_script_of_its_own_context_is_left_alone(mixed: Mixed) -> None:
    mixed("default")
    found = []

    def own(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            found.append(nn.functional.linear(x, torch.eye(4)).dtype)
            found.append((x.half() + 1e-8).dtype)
        return x

    Net(Part(own))(torch.ones(2, 4))
    assert found == [torch.float16, torch.float16]
    assert demotions() == []


class OnlyFloat32Backward(torch.autograd.Function):
    """Takes half tensors, by its own word, and refuses their gradients."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if grad.dtype is not torch.float32:
            raise RuntimeError("expected scalar type Float but found Half")
        return grad * 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_error_in_a_backward_loses_that_backward_and_no_more(mixed: Mixed, dtype: str) -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = Net(Part(OnlyFloat32Backward.apply))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        weights = []
        for _ in range(4):
            optimizer.zero_grad()
            net(torch.ones(2, 4)).pow(2).sum().backward()
            optimizer.step()
            weights.append(net.first.weight.detach().clone())
        return weights

    expected = run()
    mixed("default", dtype)
    found = run()
    torch.manual_seed(0)
    assert torch.equal(found[0], Net(Part(lambda x: x)).first.weight)  # the step did nothing
    torch.testing.assert_close(found[1:], expected[:3], rtol=1e-6, atol=1e-6)
    assert demotions() == [("", True)]


def test_weights_edited_before_their_backward_are_an_error_as_ever(mixed: Mixed) -> None:
    """torch names the kind of tensor: "[torch.HalfTensor [4, 4]] is at version 2"."""
    mixed("default")
    net = Net(Part(lambda x: x))
    loss = net(torch.ones(2, 4).requires_grad_()).exp().sum()
    hidden = net.first.weight.exp()
    loss = loss + (hidden * hidden).sum()
    hidden.detach().mul_(2)
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert demotions() == []


def test_other_errors_in_a_backward_are_the_script_s(mixed: Mixed) -> None:
    mixed("default")
    loss = Net(Part(lambda x: x))(torch.ones(2, 4)).sum()
    loss.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert demotions() == []


def test_disabling_forgets_and_nothing_is_left_on_the_modules(mixed: Mixed) -> None:
    mixed("default")
    net = Net(Part(only_float32))
    before = {name: set(vars(part)) for name, part in net.named_modules()}
    net(torch.ones(2, 4))
    after = {name: set(vars(part)) - {"gave"} for name, part in net.named_modules()}
    assert after == before
    mixed("default")
    assert demotions() == []
    net(torch.ones(2, 4))
    assert demotions() == [("part", False)]


def test_a_demotion_is_one_line_with_the_place_in_the_script(run_script: Any) -> None:
    script = """
import torch
from torch import nn

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        p = torch.sigmoid(self.linear(x))
        return torch.log(p + 1e-8)

net = nn.Sequential(nn.Linear(4, 4), Head())
for _ in range(3):
    net(torch.ones(2, 4))
"""
    result = run_script(script, AUTO_MIXED_PRECISION="1", AUTO_MIXED_PRECISION_DTYPE="float16")
    said = [line for line in result.stderr.splitlines() if "runs in float32" in line]
    assert len(said) == 1
    assert said[0].startswith(
        "autoamp: 1 without the modules that it calls (Head) runs in float32 from now on: "
        "add: float16 cannot hold the constant 1e-08 ("
    )
    assert said[0].endswith("script.py:12)")
    assert result.stderr.splitlines()[-1].endswith("1 module demoted to float32")


# Overflow


class Scaled(nn.Module):
    """Its product leaves float16 once `factor` has grown."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = Linear(4, 4), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.factor) / self.factor


def train(net: nn.Module, steps: int, at: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for step in range(steps):
        if step == at:
            net[1].factor = 1e6
        x = torch.randn(8, 4, generator=generator)
        optimizer.zero_grad()
        loss = (net(x) - x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_activations_that_leave_the_range_cost_a_few_steps_and_then_train(mixed: Mixed) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Linear(4, 4), Scaled(), Linear(4, 4))

    expected = train(make(), 40)
    session = mixed("default")
    net = make()
    losses = train(net, 40)
    status = autoamp.status()
    patience = session.policy.fallback.patience
    assert status["steps"] == {"taken": 40 - patience, "skipped": patience}
    assert [d["module"] for d in status["demotions"]] == ["1"]
    assert status["loss_scale"]["final"] == 65536.0
    assert losses[-1] == pytest.approx(expected[-1], rel=0.1)


def test_what_is_not_finite_in_float32_either_is_not_healed(mixed: Mixed, capfd: Any) -> None:
    mixed("default", LOSS_SCALE="128")
    net = nn.Sequential(Linear(4, 4), Scaled(), Linear(4, 4))
    train(net, 3)
    with torch.no_grad():
        net[0].weight.fill_(float("nan"))
    train(net, 8, at=99)
    assert autoamp.status()["steps"]["skipped"] == 8
    assert demotions() == []
    assert capfd.readouterr().err.count("in float32 neither") == 1


def test_a_call_that_runs_again_does_not_spoil_the_graph_of_the_one_before(mixed: Mixed) -> None:
    """What a norm's graph holds is put back without an edit that autograd would count."""
    mixed("default", "float16")
    net = Net(Normed())
    small, large = net(torch.randn(4, 4)), net(torch.randn(64, 4))
    assert demotions() == [("part", False)]
    (small.sum() + large.sum()).backward()
    assert int(net.part.norm.num_batches_tracked) == 2


def test_running_statistics_of_calls_before_one_that_runs_again_are_kept(mixed: Mixed) -> None:
    """Norms write them without counting it as an edit."""
    mixed("default", "float16")
    part = Normed()
    part.linear.requires_grad_(False).weight.zero_()
    part.linear.bias.zero_()
    net = nn.ModuleList([part])
    net.forward = lambda: [part(torch.ones(4, 4)), part(torch.ones(64, 4))]
    net()
    assert demotions() == [("0", False)]
    torch.testing.assert_close(part.norm.running_mean, torch.full((4,), 1.9))  # 0.9 x 1 + 1
