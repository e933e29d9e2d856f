"""User code inside a backward: hooks and custom Functions see true gradients.

What torch itself defines stays in scaled units. A hook is wrapped when it is registered, since the
engine calls it from C++.

True gradients are float32, and what a forward saved inside a region may be half: in user code every
op of torch's lower-precision list runs in float32, so that the two can meet, as in a script without
autoamp.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .backward import half_devices
from .casting import to_float32
from .graphs import AccumulateGrad
from .passes import Pass, UserCode, current, run_in
from .scaling import any_of
from .session import Session


def tensor_hook(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`Tensor.register_hook`: true gradients in; what comes back, or was edited, is scaled."""

    def register_hook(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
        return original(self, _with_true_gradients(hook, session))

    return register_hook


def post_accumulate_hook(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`Tensor.register_post_accumulate_grad_hook`: the parameter is unscaled by then.

    Where nothing is scaled the gradient is true anyway, and only its products run in float32.
    """

    def register_post_accumulate_grad_hook(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
        if is_torchs_own(hook):
            return original(self, hook)

        @_named_after(hook)
        def settled(parameter: torch.Tensor) -> Any:
            units = _units(session)
            if units is None:
                return hook(parameter)
            if isinstance(units, Pass):
                units.settle(parameter)
                _note(session, units, [parameter])
            return _call(session, units, hook, parameter)

        return original(self, settled)

    return register_post_accumulate_grad_hook


def step_in_backward(
    session: Session, units: Pass, parameters: list[torch.Tensor], step: Callable[[], Any]
) -> Any:
    """An optimizer's step in the middle of a pass, called by a hook on a node of the graph.

    Such hooks cannot be reached; the optimizer gets true gradients all the same. What it leaves of
    them goes back to the pass, which may add to it.
    """
    units.lend(parameters)
    _note(session, units, parameters)
    try:
        return run_in(UserCode(units), step)
    finally:
        units.take_back()


def _note(session: Session, units: Pass, parameters: list[torch.Tensor]) -> None:
    """Tell the gates what user code in the middle of a pass finds in these gradients."""
    if units.flags:
        flags, units.flags = units.flags, []
        session.backwards.append((units.scale, any_of(flags)))
        session.spoilt.note(parameters, any_of(flags))
    units.is_heard = True


def module_backward_hooks(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`Module._get_backward_hooks`: the (full, non-full) hooks of one call, in true units."""

    def _get_backward_hooks(self: torch.nn.Module) -> Any:
        full, non_full = original(self)
        return (
            [_with_true_gradients(hook, session) for hook in full],
            [_with_true_gradients(hook, session) for hook in non_full],
        )

    return _get_backward_hooks


def module_backward_pre_hooks(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`Module._get_backward_pre_hooks`: likewise."""

    def _get_backward_pre_hooks(self: torch.nn.Module) -> Any:
        return [_with_true_gradients(hook, session) for hook in original(self)]

    return _get_backward_pre_hooks


def function_backward(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """The ``backward`` of a custom `autograd.Function`: true gradients in, its result scaled.

    torch's own Functions and those that declare ``custom_fwd`` stay in scaled units, as in
    hand-written mixed precision. One whose forward was a float32 island is one again: modules that
    it calls (to compute activations anew) run as they ran then. One that knows only half stays in
    scaled units too, and where islands are made others got what the script gave them: half, if it
    is that, and get half gradients.
    """
    makes_islands = session.policy.fallback.on_error == "float32"

    def apply(self: Any, *args: Any) -> Any:
        units = _units(session)
        device_type = session.function_devices.get(self._forward_cls)
        refuses_float32 = device_type == ""
        if units is None or refuses_float32 or stays_scaled(self._forward_cls):
            return original(self, *args)
        if isinstance(units, Pass):  # some add to the gradients of their parameters by themselves
            nodes = [node for node, _ in self.next_functions if type(node) is AccumulateGrad]
            units.lend([node.variable for node in nodes])
        backward, true = original, units.to_true(args)
        if device_type is None and makes_islands:
            true = _ONLY_HALF.to_scaled(true, args)
        elif device_type:
            call_own = session.islands.call_own
            backward = lambda *args: call_own(original, args, {}, device_type=device_type)  # noqa: E731
        return units.to_scaled(_call(session, units, backward, self, *true))

    return apply


def retain_grad(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`Tensor.retain_grad`: remember, weakly, that this tensor's ``.grad`` will be written too."""

    def retain_grad(self: torch.Tensor) -> None:
        original(self)
        session.retain(self)

    return retain_grad


def _with_true_gradients(hook: Callable[..., Any], session: Session) -> Callable[..., Any]:
    if is_torchs_own(hook):
        return hook

    @_named_after(hook)
    def in_true_units(*args: Any) -> Any:
        units = _units(session)
        if units is None:
            return hook(*args)
        true = units.to_true(args)
        result = _call(session, units, hook, *true)
        if (
            result is None
            and len(true) == 1
            and isinstance(true[0], torch.Tensor)
            and true[0]._version
        ):
            result = true[0]
        like = args[0] if len(args) == 1 else args[1]  # a tensor's hook, or (module, gradients, …)
        return units.to_scaled(result, like)

    return in_true_units


class _OnlyHalf:
    """What stands for a `Pass` where nothing is scaled: half gradients are float32 in user code."""

    def to_true(self, value: Any) -> Any:
        return to_float32(value)

    def to_scaled(self, value: Any, like: Any = None) -> Any:
        if isinstance(value, torch.Tensor) and isinstance(like, torch.Tensor):
            return value.to(like.dtype)
        if isinstance(value, tuple) and isinstance(like, tuple):
            return tuple(map(self.to_scaled, value, like))
        return value


_ONLY_HALF = _OnlyHalf()


def _units(session: Session) -> Pass | _OnlyHalf | None:
    """How gradients are turned into true ones here; None where they are that already."""
    running = current()
    if isinstance(running, Pass):
        return running
    is_half = session.active and not session.scales and half_devices(session)
    return _ONLY_HALF if is_half else None


def _call(
    session: Session, units: Pass | _OnlyHalf, function: Callable[..., Any], *args: Any
) -> Any:
    """Call user code in the middle of a backward."""
    running = units if isinstance(units, Pass) else None
    try:
        with _lower_is_float32(session):
            return run_in(UserCode(running), function, *args)
    finally:
        if running is not None:
            running.take_back()


@contextlib.contextmanager
def _lower_is_float32(session: Session) -> Iterator[None]:
    before = [
        (name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name))
        for name in half_devices(session)
    ]
    for name, _, _ in before:
        torch.set_autocast_dtype(name, torch.float32)
        torch.set_autocast_enabled(name, True)
    try:
        yield
    finally:
        for name, was_enabled, dtype in before:
            torch.set_autocast_enabled(name, was_enabled)
            torch.set_autocast_dtype(name, dtype)


def _named_after(hook: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return functools.wraps(hook, updated=())


FOR_USERS = ("torch.autograd.graph", "torch.functional", "torch.nn.functional")
"""Modules of torch whose functions scripts use as hooks, or that wrap the hooks of scripts."""


def is_torchs_own(function: Any) -> bool:
    """Whether a hook or class was defined by torch itself, which works in scaled units."""
    module = getattr(function, "__module__", None) or ""
    return (module == "torch" or module.startswith("torch.")) and module not in FOR_USERS


def stays_scaled(function: type) -> bool:
    """Whether a Function is torch's own, or declares how it meets autocast (``custom_fwd``)."""
    if is_torchs_own(function):
        return True
    code = getattr(getattr(function, "forward", None), "__code__", None)
    return code is not None and code.co_filename == torch.amp.autocast_mode.__file__
