"""Casts of weights that are kept from call to call: used, equal to fresh ones, and never stale."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autoamp

WIDTH = 16
HALF = torch.bfloat16


@pytest.fixture
def on(mixed: Any) -> Callable[..., Any]:
    return lambda policy="default": mixed(policy, "bfloat16", LOG="quiet")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


def by_hand(module: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """What the module computes under torch's own autocast, without autoamp."""
    with torch.autocast("cpu", HALF), torch.no_grad():
        return module(*inputs).float()


class Casts(TorchDispatchMode):
    """Counts the casts of tensors of a weight's shape."""

    def __init__(self, shape: tuple[int, ...] = (WIDTH, WIDTH)) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += 1
        return func(*args, **(kwargs or {}))


def casts_of(call: Callable[[], Any], shape: tuple[int, ...] = (WIDTH, WIDTH)) -> int:
    with Casts(shape) as casts:
        call()
    return casts.count


# --- used ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["default", "safe"])
def test_without_gradients_a_weight_is_cast_once_for_all_calls(on, policy):
    net = model()
    on(policy)
    with torch.no_grad():
        net(X)
        assert casts_of(lambda: net(X)) == 0
    with torch.no_grad():
        assert casts_of(lambda: [net(X) for _ in range(3)]) == 0


def test_torch_itself_and_its_policy_cast_each_weight_at_each_call(on):
    net = model()
    on("torch")
    with torch.no_grad():
        net(X)
        assert casts_of(lambda: [net(X) for _ in range(3)]) == 6


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (lambda: nn.Linear(WIDTH, WIDTH), (3, WIDTH)),
        (lambda: nn.Conv1d(64, 64, 3), (2, 64, 9)),
        (lambda: nn.Conv2d(32, 32, 3), (2, 32, 9, 9)),
        (lambda: nn.ConvTranspose2d(32, 32, 3), (2, 32, 9, 9)),
    ],
    ids=["linear", "conv1d", "conv2d", "conv_transpose2d"],
)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_what_kept_casts_give_is_what_torch_gives(on, layer, inputs, context):
    module, x = layer(), torch.randn(inputs)
    expected = by_hand(module, x)
    session = on()
    with context():
        got = [module(x) for _ in range(3)]
    assert all(torch.equal(one, expected) for one in got)
    assert len(session.weights._kept) == 2
    assert not got[-1].requires_grad


def test_a_cast_made_in_inference_mode_serves_training_with_frozen_weights(on):
    net = model().requires_grad_(False)
    x = X.clone().requires_grad_()
    with torch.autocast("cpu", HALF):
        by_torch = net(x).float()
    (expected,) = torch.autograd.grad(by_torch.square().sum(), x)
    on()
    with torch.inference_mode():
        net(X)
    result = net(x)
    (gradient,) = torch.autograd.grad(result.square().sum(), x)
    assert torch.equal(result, by_torch)
    assert torch.equal(gradient, expected)


def test_gradients_inside_of_inference_may_go_through_a_kept_cast(on):
    class Guided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.layer(x)
            with torch.inference_mode(False):
                start = torch.ones(1, WIDTH, requires_grad=True)
                (gradient,) = torch.autograd.grad(self.layer(start).sum(), start)
            return gradient

    net = Guided()
    expected = net(X)
    session = on()
    with torch.inference_mode():
        for _ in range(3):
            assert torch.allclose(net(X), expected, rtol=0.02, atol=0.02)
    assert session.weights._kept
    assert session.demotions == []


def test_frozen_parts_are_not_cast_again_from_step_to_step(on):
    net = model()
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net[2].parameters(), 0.1)
    on()

    def step() -> None:
        net(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    assert casts_of(lambda: net(X)) == 1  # the trained one
    with torch.no_grad():
        net(X)
    assert casts_of(lambda: net(X)) == 1  # an evaluation between steps takes nothing away


def test_the_same_training_with_and_without_kept_casts(on, tmp_path):
    (tmp_path / "fresh.yaml").write_text("extends: default\nperformance: {weight_cache: off}\n")

    def train(policy: str) -> list[torch.Tensor]:
        session = on(policy)
        net = nn.Sequential(model(), model().requires_grad_(False))
        optimizer = torch.optim.SGD(net.parameters(), 0.5, momentum=0.9)
        seen = []
        for _ in range(5):
            loss = net(X).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen += [loss.detach(), net(X), net(X)]
        assert bool(session.weights._kept) == (policy == "default")
        autoamp.disable()
        return seen

    fresh = train(str(tmp_path / "fresh.yaml"))
    assert all(map(torch.equal, train("default"), fresh))
    assert not torch.equal(fresh[1], fresh[4])


def test_our_own_kernels_cast_a_weight_that_is_used_twice_once_for_a_training_call(on):
    layer = nn.Linear(WIDTH, WIDTH)
    tied = nn.Sequential(layer, nn.ReLU(), layer)
    expected = by_hand(tied, X)
    on("safe")
    result = tied(X)
    assert torch.allclose(result, expected, rtol=0.02, atol=0.02)
    assert casts_of(lambda: tied(X)) == 1
    result.sum().backward()
    ours = layer.weight.grad
    autoamp.disable()
    layer.weight.grad = None
    tied(X).sum().backward()
    assert torch.allclose(ours, layer.weight.grad, rtol=0.05, atol=0.2)


# --- never stale ---------------------------------------------------------------------------------


def _kept_alias(weight: nn.Parameter) -> Callable[[], Any]:
    alias = weight.data
    return lambda: alias.mul_(-2)


def _kept_array(weight: nn.Parameter) -> Callable[[], Any]:
    array = weight.detach().numpy()
    return lambda: array.__imul__(-2)


def _kept_storage(weight: nn.Parameter) -> Callable[[], Any]:
    alias = torch.empty(0).set_(weight.untyped_storage(), 0, weight.shape)
    return lambda: alias.mul_(-2)


def _loaded(weight: nn.Parameter) -> None:
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    layer.weight = weight
    layer.load_state_dict({"weight": torch.ones(WIDTH, WIDTH)})


def _stepped(weight: nn.Parameter) -> None:
    class Raw(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    _write_raw(parameter)

    Raw([weight], {}).step()


def _write_raw(tensor: torch.Tensor) -> None:
    """As kernels of other packages do that do not count versions."""
    import ctypes

    ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)


EDITS: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda w: w.mul_(-2),
    "copy": lambda w: w.copy_(torch.ones_like(w)),
    "data in place": lambda w: w.data.mul_(-2),
    "data assigned": lambda w: setattr(w, "data", torch.ones(WIDTH, WIDTH)),
    "data transposed": lambda w: setattr(w, "data", w.data.t()),
    "detached": lambda w: w.detach().mul_(-2),
    "data of a view": lambda w: w.view(-1).data.mul_(-2),
    "a column": lambda w: w[:, 0].mul_(-2),
    "an array": lambda w: w.detach().numpy().fill(1),
    "an array by asarray": lambda w: __import__("numpy").asarray(w.detach()).fill(1),
    "dlpack": lambda w: torch.from_dlpack(w.detach()).mul_(-2),
    "foreach": lambda w: torch._foreach_mul_([w], -2),
    "lerp": lambda w: w.lerp_(torch.ones_like(w), 0.5),
    "loaded": _loaded,
    "set_": lambda w: w.set_(torch.ones(WIDTH, WIDTH)),
    "init": nn.init.ones_,
    "vector": lambda w: nn.utils.vector_to_parameters(torch.ones(WIDTH**2), [w]),
    "swapped": lambda w: torch.utils.swap_tensors(w, nn.Parameter(torch.ones(WIDTH, WIDTH))),
    "an optimizer that writes to raw memory": _stepped,
}


@pytest.mark.parametrize("policy", ["default", "safe"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_weight_is_seen_by_the_next_call(on, edit, policy):
    net = model()
    session = on(policy)
    with torch.no_grad():
        before = net(X)
        net(X)
        assert session.weights._kept
        EDITS[edit](net[0].weight)
        after = net(X)
    autoamp.disable()
    assert not torch.equal(before, after)
    with torch.no_grad():
        exact = net(X)
    error = (after - exact).abs().max() / exact.abs().max()
    assert error < 0.02


@pytest.mark.parametrize("make", [_kept_alias, _kept_array, _kept_storage])
def test_somebody_holds_the_memory_of_a_weight_and_edits_it_again_and_again(on, make):
    net = model()
    on()
    with torch.no_grad():
        net(X)
        edit = make(net[0].weight)
        seen = []
        for _ in range(3):
            seen.append((net(X), by_hand(net, X)))
            edit()
    assert all(torch.equal(ours, expected) for ours, expected in seen)
    assert not torch.equal(seen[0][0], seen[1][0])


def test_the_memory_that_parameters_share_is_not_trusted(on):
    flat = torch.randn(2 * WIDTH * WIDTH)
    net = model()
    net[0].weight.data = flat[: WIDTH**2].view(WIDTH, WIDTH)
    net[2].weight.data = flat[WIDTH**2 :].view(WIDTH, WIDTH)
    on()
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(net(X), by_hand(net, X))
            flat.mul_(0.5)


def test_an_edit_through_data_in_the_middle_of_a_region_is_seen_by_the_next_op(on):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.layer(x)
            self.layer.weight.data.mul_(-1)
            return first + self.layer(x)

    net = Twice()
    on()
    assert torch.equal(net(X), torch.zeros(3, WIDTH))
    with torch.no_grad():
        assert torch.equal(net(X), torch.zeros(3, WIDTH))


def test_a_transform_does_not_leave_its_wrapped_casts_behind(on):
    net = model().requires_grad_(False)
    on()
    jacobian = torch.func.jacrev(net)(X[0])
    assert jacobian.shape == (WIDTH, WIDTH)
    assert torch.equal(net(X), by_hand(net, X))


# --- gone ----------------------------------------------------------------------------------------


def test_a_cast_dies_with_its_weight(on):
    net = model()
    session = on()
    with torch.no_grad():
        net(X)
    cast = weakref.ref(next(iter(session.weights._kept.values())).cast)
    del net
    gc.collect()
    assert cast() is None
    assert not session.weights._kept


def test_casts_for_evaluation_take_no_memory_while_training_goes_on(on):
    net = model()
    session = on()
    with torch.no_grad():
        net(X)
    assert len(session.weights._kept) == 4
    net(X)
    assert not session.weights._kept


def test_nothing_is_kept_where_memory_is_short(on, monkeypatch):
    from autoamp import weights

    net = model()
    session = on()
    monkeypatch.setattr(weights, "_free_memory", lambda device: 16 * 2 * WIDTH**2 - 1.0)
    with torch.no_grad():
        assert torch.equal(net(X), by_hand(net, X))
    assert not session.weights._kept


def test_nothing_is_left_on_weights_and_torch_is_as_it_was(on):
    net = model()
    before = set(vars(torch.Tensor))
    on()
    assert isinstance(vars(torch.Tensor)["data"], property)
    with torch.no_grad():
        net(X)
    assert vars(net[0].weight) == {}
    autoamp.disable()
    assert set(vars(torch.Tensor)) == before


def test_compiled_code_reads_data_as_ever(on):
    def scaled(weight: torch.Tensor) -> torch.Tensor:
        return weight.data * 2

    weight = nn.Parameter(torch.ones(3))
    on()
    compiled = torch.compile(scaled, backend="eager", fullgraph=True)
    assert torch.equal(compiled(weight), torch.full((3,), 2.0))
