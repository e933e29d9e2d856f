"""Weights that change inside an open region are seen by the next op, and no cast outlives its use.

Each edit is made at top level and inside one outer module, with float32 as the reference.
"""

from __future__ import annotations

import copy
import gc
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrizations

import autoamp

Result = list[float]
X = torch.ones(1, 4)


def net() -> nn.Linear:
    layer = nn.Linear(4, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def out(layer: nn.Module) -> float:
    return layer(X).item()


def no_grad_block(layer: nn.Linear) -> Result:
    seen = [out(layer)]
    with torch.no_grad():
        layer.weight.mul_(2)
    return [*seen, out(layer)]


def no_grad_function(layer: nn.Linear) -> Result:
    @torch.no_grad()
    def clip(low: float, high: float) -> None:
        layer.weight.clamp_(low, high)

    seen = [out(layer)]
    clip(0.25, 0.5)
    return [*seen, out(layer)]


def gradients_off_and_on(layer: nn.Linear) -> Result:
    seen = [out(layer)]
    torch.set_grad_enabled(False)
    layer.weight.mul_(2)
    torch.set_grad_enabled(True)
    return [*seen, out(layer)]


def set_grad_enabled_block(layer: nn.Linear) -> Result:
    seen = [out(layer)]
    with torch.set_grad_enabled(False):
        layer.weight.mul_(2)
    return [*seen, out(layer)]


def inference_block(layer: nn.Linear) -> Result:
    seen = [out(layer)]
    with torch.inference_mode():
        layer.weight.mul_(2)
        seen.append(out(layer))
    return [*seen, out(layer)]


def evolution_strategy(layer: nn.Linear) -> Result:
    """Edits and forwards in turn, all in one block."""
    seen = []
    with torch.no_grad():
        base = layer.weight.clone()
        for step in range(4):
            layer.weight.copy_(base + step * 0.5)
            seen.append(out(layer))
    return seen


def nested_blocks(layer: nn.Linear) -> Result:
    with torch.no_grad():
        seen = [out(layer)]
        with torch.no_grad():
            layer.weight.mul_(2)
        seen.append(out(layer))
        layer.weight.mul_(2)
        seen.append(out(layer))
    return [*seen, out(layer)]


def finite_differences(layer: nn.Linear) -> Result:
    seen = []
    for shift in (0.25, -0.5):
        with torch.no_grad():
            layer.weight[0, 0] += shift
        seen.append(out(layer))
    return seen


def load_state_dict(layer: nn.Linear) -> Result:
    other = {"weight": torch.full((1, 4), 3.0)}
    seen = [out(layer)]
    layer.load_state_dict(other)
    seen.append(out(layer))
    layer.load_state_dict({"weight": torch.full((1, 4), 5.0)}, assign=True)
    return [*seen, out(layer)]


def initialised_again(layer: nn.Linear) -> Result:
    seen = [out(layer)]
    nn.init.constant_(layer.weight, 2.0)
    return [*seen, out(layer)]


def vector(layer: nn.Linear) -> Result:
    seen = [out(layer)]
    four_times = parameters_to_vector(layer.parameters()).detach() * 4
    torch.nn.utils.vector_to_parameters(four_times, layer.parameters())
    seen.append(out(layer))
    torch.nn.utils.convert_parameters.vector_to_parameters(torch.ones(4), layer.parameters())
    return [*seen, out(layer)]


def functional_call(layer: nn.Linear) -> Result:
    sets = [{"weight": nn.Parameter(torch.full((1, 4), value))} for value in (1.0, 2.0, 3.0)]
    return [torch.func.functional_call(layer, own, (X,)).item() for own in sets]


def swapped(layer: nn.Linear) -> Result:
    other = nn.Parameter(torch.full((1, 4), 7.0))
    seen = [out(layer)]
    torch.utils.swap_tensors(layer.weight, other)
    return [*seen, out(layer)]


def parametrised(layer: nn.Linear) -> Result:
    seen = [out(layer)]
    parametrizations.weight_norm(layer)
    seen.append(out(layer))
    with torch.no_grad():
        layer.parametrizations.weight.original0.mul_(3)
    seen.append(out(layer))
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    return [*seen, out(layer)]


def exponential_average(layer: nn.Linear) -> Result:
    average = copy.deepcopy(layer)
    seen = [out(average)]
    for value in (3.0, 5.0):
        with torch.no_grad():
            layer.weight.fill_(value)
            average.weight.lerp_(layer.weight, 0.5)
        seen += [out(layer), out(average)]
    return seen


def moved(layer: nn.Linear) -> Result:
    """`Module._apply` gives each parameter new ``.data``."""
    seen = [out(layer)]
    layer._apply(lambda tensor: tensor * 2)
    return [*seen, out(layer)]


def stepped(layer: nn.Linear) -> Result:
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.25)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        layer(X).sum().backward()
        optimizer.step()
        seen.append(out(layer))
    return seen


def data_after_backward(layer: nn.Linear) -> Result:
    layer(X).sum().backward()
    layer.weight.data -= 0.25 * layer.weight.grad
    seen = [out(layer)]
    layer.weight.data.mul_(2)
    return [*seen, out(layer)]


EDITS = (
    no_grad_block,
    no_grad_function,
    gradients_off_and_on,
    set_grad_enabled_block,
    inference_block,
    evolution_strategy,
    nested_blocks,
    finite_differences,
    load_state_dict,
    initialised_again,
    vector,
    functional_call,
    swapped,
    parametrised,
    exponential_average,
    moved,
    stepped,
    data_after_backward,
)


class Outer(nn.Module):
    """A bigger model, of which what is played here is a part."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, play: Callable[[], Any]) -> Any:
        return play()


def at_top_level(play: Callable[[], Any]) -> Any:
    return play()


def inside(play: Callable[[], Any]) -> Any:
    return Outer()(play)


def in_child_module(play: Callable[[], Any]) -> Any:
    return Outer()(lambda: nn.Sequential(Outer())(play))


PLACES = (at_top_level, inside, in_child_module)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("edit", EDITS)
def test_the_next_forward_sees_every_edit(
    edit: Callable[[nn.Linear], Result], place: Any, dtype: str, mixed: Any
) -> None:
    expected = edit(net())
    assert len(set(expected)) > 1
    mixed("default", dtype, LOSS_SCALE="1")
    found = place(lambda: edit(net()))
    assert found == pytest.approx(expected, rel=1e-2)


def test_data_edited_without_a_block_is_seen_by_the_next_op(mixed: Any) -> None:
    mixed("default", "float16")
    layer = net()

    def edit() -> Result:
        seen = [out(layer)]
        layer.weight.data.mul_(2)
        return [*seen, out(layer)]

    assert inside(edit) == [4.0, 8.0]
    assert inside(lambda: out(layer)) == 8.0


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_cast_made_without_gradients_does_not_reach_training(
    off: Any, place: Any, mixed: Any
) -> None:
    mixed("default", "float16", LOSS_SCALE="1")

    def play() -> torch.Tensor:
        layer = net()
        with off():
            layer(X)
        loss = layer(X).sum()
        assert loss.requires_grad
        loss.backward()
        return layer.weight.grad  # type: ignore[return-value]

    torch.testing.assert_close(place(play), X)


def casts_of(layer: nn.Linear, play: Callable[[], None]) -> int:
    """How often its weight becomes half."""

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        casts = 0

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function is torch.ops.aten._to_copy.default:
                self.casts += args[0].data_ptr() == layer.weight.data_ptr()
            return function(*args, **(kwargs or {}))

    with Count() as count:
        play()
    return count.casts


def test_casts_are_kept_again_after_a_block(mixed: Any) -> None:
    mixed("default", "float16")
    layer, outer = net(), Outer()

    def repeat() -> None:
        for _ in range(5):
            layer(X)

    def without_gradients() -> None:
        with torch.no_grad():
            repeat()

    def both() -> None:
        repeat()
        with torch.no_grad():
            pass
        repeat()

    for play in (repeat, without_gradients, both):
        outer(play)  # the first call is inspected
    assert casts_of(layer, lambda: outer(repeat)) == 1
    assert casts_of(layer, lambda: outer(without_gradients)) == 1
    assert casts_of(layer, lambda: outer(both)) == 2
    assert casts_of(layer, lambda: outer(repeat)) == 1
    assert torch.is_autocast_cache_enabled()


def test_a_region_that_fails_in_a_block_leaves_the_cache_as_it_was(mixed: Any) -> None:
    session = mixed("default", "float16")

    def fail() -> None:
        torch.set_grad_enabled(False)
        raise KeyError("the script's own")

    with torch.enable_grad(), pytest.raises(KeyError):
        inside(fail)
    assert torch.is_autocast_cache_enabled()
    assert not session.local.uncached


def test_a_dispatch_mode_may_switch_gradients_off_while_a_weight_is_cast(mixed: Any) -> None:
    """Torch holds the lock of its cache meanwhile: clearing it there would wait for ever."""
    mixed("default", "float16")

    class Look(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            with torch.no_grad():
                return function(*args, **(kwargs or {}))

    with Look():
        assert inside(lambda: no_grad_block(net())) == [4.0, 8.0]


@pytest.mark.parametrize("place", PLACES)
def test_ten_thousand_forwards_keep_nothing(place: Any, mixed: Any) -> None:
    mixed("default", "float16")
    layer = nn.Linear(64, 64, bias=False)
    x = torch.ones(1, 64)

    def play(times: int) -> None:
        with torch.no_grad():
            for _ in range(times):
                layer(x)

    place(lambda: play(500))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    place(lambda: play(10_000))
    gc.collect()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 16 * 1024  # KiB; one cast of the weight is 8


def test_compiled_code_switches_gradients_in_one_graph(mixed: Any) -> None:
    mixed("default", "bfloat16")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                teacher = self.second(x)
            with torch.set_grad_enabled(False):
                teacher = teacher + self.second(x)
            return self.first(x) + teacher

    @torch.no_grad()
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def function(x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        scaled = doubled(x)
        torch.set_grad_enabled(True)
        return model(scaled)

    model, x = Net(), torch.randn(2, 4)
    expected = function(x)
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        assert torch.equal(compiled(x), expected)
        assert compiled(x).requires_grad


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripted_code_switches_gradients(mixed: Any) -> None:
    """TorchScript compiles the source of the methods of `no_grad`."""
    mixed("default", "float16")

    def frozen(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return x * 2

    weight = torch.ones(2, requires_grad=True)
    assert not torch.jit.script(frozen)(weight).requires_grad


def test_torch_is_as_it_was(mixed: Any) -> None:
    names = [
        (torch.autograd.grad_mode.set_grad_enabled, "__init__"),
        (torch.autograd.grad_mode.set_grad_enabled, "__exit__"),
        (torch.autograd.grad_mode.inference_mode, "__exit__"),
        (torch.nn.utils, "vector_to_parameters"),
        (torch.nn.utils.convert_parameters, "vector_to_parameters"),
        (torch.utils, "swap_tensors"),
    ]
    before = [vars(owner)[name] for owner, name in names]
    mixed("default", "float16")
    during = [vars(owner)[name] for owner, name in names]
    assert all(a is not b for a, b in zip(before, during, strict=True))
    autoamp.disable()
    assert [vars(owner)[name] for owner, name in names] == before


def test_hand_written_amp_is_what_the_policy_torch_does(mixed: Any) -> None:
    """It changes nothing about torch's cache."""
    init = vars(torch.autograd.grad_mode.set_grad_enabled)["__init__"]
    mixed("torch", "float16")
    assert vars(torch.autograd.grad_mode.set_grad_enabled)["__init__"] is init
