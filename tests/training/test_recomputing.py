"""Checkpoints outside of regions recompute what the forward computed, as under `torch.autocast`.

The script is the same with and without autoamp; written by hand, each call of a module (or of an op
outside any) has a context of its own, and what leaves it is made float32.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as checkpoints

Mixed = Callable[..., Any]
Wrap = Callable[[Any], Any]
"""What stands around a call by hand; nothing (`as_it_is`) in the script."""


def as_it_is(function: Any) -> Any:
    return function


def checkpoint(*args: Any, **kwargs: Any) -> Any:
    return checkpoints.checkpoint(*args, **kwargs)  # as patched: this file was imported before


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 6)
        self.body = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).pow(2).mean(dim=1, keepdim=True)


def linear(net: Net, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, net.body[0].weight)


def whole(net: Net, wrap: Wrap, reentrant: bool) -> Callable[..., Any]:
    return wrap(functools.partial(checkpoint, net, use_reentrant=reentrant))


def partial(net: Net, wrap: Wrap, reentrant: bool) -> Callable[..., Any]:
    return wrap(functools.partial(checkpoint, functools.partial(net), use_reentrant=reentrant))


def bound(net: Net, wrap: Wrap, reentrant: bool) -> Callable[..., Any]:
    """A method that is not a module's call: the modules that it calls are what is in half."""
    body = wrap(net.body)
    by_hand = lambda x: body(x).pow(2).mean(dim=1, keepdim=True)  # noqa: E731
    method = net.loss if wrap is as_it_is else by_hand
    return functools.partial(checkpoint, method, use_reentrant=reentrant)


def arithmetic(net: Net, wrap: Wrap, reentrant: bool) -> Callable[..., Any]:
    """Float32 work around two calls, and numbers that half could not hold."""
    body = wrap(net)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (body(body(x) * 2) * 1e4).pow(2).sum(dim=1) * 1e-9

    return functools.partial(checkpoint, loss, use_reentrant=reentrant)


def ops(net: Net, wrap: Wrap, reentrant: bool) -> Callable[..., Any]:
    """An op outside any module, and products that are nobody's."""
    call = wrap(functools.partial(linear, net))

    def run(x: torch.Tensor) -> torch.Tensor:
        return call(x).tanh() @ x.new_ones(8, 2) / 32

    return functools.partial(checkpoint, run, use_reentrant=reentrant)


def nested(net: Net, wrap: Wrap, reentrant: bool) -> Callable[..., Any]:
    inner, outer = arithmetic(net, wrap, False), wrap(net)
    both = lambda x: inner(outer(x)) + inner(x)  # noqa: E731
    return functools.partial(checkpoint, both, use_reentrant=reentrant)


def segments(net: Net, wrap: Wrap, reentrant: bool) -> Callable[..., Any]:
    """The modules are called one by one, and those without parameters are float32."""
    parts = [wrap(part) if [*part.parameters()] else part for part in net.body]
    sequential = checkpoints.checkpoint_sequential
    return lambda x: sequential(parts, 2, x, use_reentrant=reentrant)


KINDS = (whole, partial, bound, arithmetic, ops, nested, segments)


def train(
    kind: Callable[..., Any], reentrant: bool, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Two steps' losses and gradients; written by hand if a dtype is given.

    Casts are not kept there: in a recomputation torch would keep them between two contexts.
    """

    def by_hand(function: Any) -> Any:
        def call(*args: Any) -> Any:
            with torch.autocast("cpu", dtype, cache_enabled=False):
                out = function(*args)
            return out.float()

        return call

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    function = kind(net, by_hand if dtype else as_it_is, reentrant)
    torch.manual_seed(1)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 24).reshape(4, 6).requires_grad_()
        loss = function(x).pow(2).mean() * 2**-5
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found += [loss.detach(), x.grad / scaler.get_scale()]
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        scaler.step(optimizer)
        scaler.update()
    return found


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_equals_hand_written_code_bit_for_bit(
    mixed: Mixed, kind: Callable[..., Any], reentrant: bool, dtype: str
) -> None:
    reference = train(kind, reentrant, getattr(torch, dtype))
    plain = train(kind, reentrant)
    mixed(dtype=dtype)
    found = train(kind, reentrant)
    torch.testing.assert_close(found, reference, rtol=0, atol=0)
    assert not torch.equal(found[-1], plain[-1])
    assert (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()) == (1, 0)
    assert not torch.is_autocast_enabled("cpu")


def test_the_first_region_of_all_may_be_in_a_checkpoint(mixed: Mixed) -> None:
    """What autoamp asks of the device then is not among the tensors that the script saves."""
    saved: list[torch.Tensor] = []
    mixed(policy="default")
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda nothing: nothing):
        nn.Linear(6, 8)(torch.ones(2, 6))
    assert sorted(tuple(tensor.shape) for tensor in saved) in ([(2, 6)], [(2, 6), (6, 8)])


def test_regions_open_in_a_recomputation_and_nowhere_else_in_a_backward(mixed: Mixed) -> None:
    """A module in a hook runs in float32; after an error in a recomputation it still does."""
    session = mixed(LOSS_SCALE="1")
    net = Net()
    calls, seen = [], []

    def count(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        calls.append(out.dtype)
        if len(calls) == 4:
            raise ZeroDivisionError

    def look(grad: torch.Tensor) -> None:
        nesting = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        seen.append((net.body[4](torch.ones(1, 8)).dtype, nesting, session.local.recomputes))

    net.body[0].register_forward_hook(count)
    for error in (contextlib.nullcontext(), pytest.raises(ZeroDivisionError)):
        x = torch.ones(2, 6, requires_grad=True)
        out = checkpoint(net, x, use_reentrant=False)
        out.register_hook(look)
        with error:
            out.sum().backward()
    out = net(x)
    out.register_hook(look)
    out.sum().backward()
    assert calls == [torch.float16] * 5
    assert seen == [(torch.float32, 0, False)] * 3
    assert session.local.region is None
    assert not torch.is_autocast_enabled("cpu")


COMPILED = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
net, x = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)), torch.randn(4, 6)


def whole(x):
    return checkpoint(net, x, use_reentrant=False).pow(2).mean()


def inner(x):
    torch._dynamo.graph_break()
    return net(x)


def broken(x):
    return checkpoint(inner, x, use_reentrant=False).pow(2).mean()


def gradients(function):
    net.zero_grad()
    function(x.clone().requires_grad_()).backward()
    return [p.grad.clone() for p in net.parameters()]


for function, fullgraph in ((whole, True), (broken, False)):
    compiled = torch.compile(function, backend="aot_eager", fullgraph=fullgraph)
    pairs = zip(gradients(function), gradients(compiled))
    assert all(torch.equal(eager, other) for eager, other in pairs)
"""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_compiled_checkpoints_equal_eager_ones(run_script: Any, dtype: str) -> None:
    """In one graph, and where a graph breaks inside the checkpointed function."""
    result = run_script(COMPILED, AUTO_MIXED_PRECISION="torch", AUTO_MIXED_PRECISION_DTYPE=dtype)
    assert result.returncode == 0, result.stderr
