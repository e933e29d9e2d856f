"""User code inside a backward: hooks and custom Functions see true gradients.

What torch itself defines stays in scaled units. A hook is wrapped when it is registered, since the
engine calls it from C++.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .backward import Pass, UserCode, current, run_in
from .scaling import any_of
from .session import Session


def tensor_hook(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`Tensor.register_hook`: true gradients in; what comes back, or was edited, is scaled."""

    def register_hook(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
        return original(self, _with_true_gradients(hook))

    return register_hook


def post_accumulate_hook(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`Tensor.register_post_accumulate_grad_hook`: the parameter is unscaled by then."""

    def register_post_accumulate_grad_hook(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
        if is_torchs_own(hook):
            return original(self, hook)

        @_named_after(hook)
        def settled(parameter: torch.Tensor) -> Any:
            running = current()
            if not isinstance(running, Pass):
                return hook(parameter)
            running.settle(parameter)
            if running.flags:
                session.backwards.append((running.scale, any_of(running.flags)))
            return run_in(UserCode(running), hook, parameter)

        return original(self, settled)

    return register_post_accumulate_grad_hook


def module_backward_hooks(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`Module._get_backward_hooks`: the (full, non-full) hooks of one call, in true units."""

    def _get_backward_hooks(self: torch.nn.Module) -> Any:
        full, non_full = original(self)
        return [_with_true_gradients(h) for h in full], [_with_true_gradients(h) for h in non_full]

    return _get_backward_hooks


def module_backward_pre_hooks(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`Module._get_backward_pre_hooks`: likewise."""

    def _get_backward_pre_hooks(self: torch.nn.Module) -> Any:
        return [_with_true_gradients(hook) for hook in original(self)]

    return _get_backward_pre_hooks


def function_backward(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """The ``backward`` of a custom `autograd.Function`: true gradients in, its result scaled.

    torch's own Functions and those that declare ``custom_fwd`` stay in scaled units, as in
    hand-written mixed precision.
    """

    def apply(self: Any, *args: Any) -> Any:
        running = current()
        if not isinstance(running, Pass) or _stays_scaled(self._forward_cls):
            return original(self, *args)
        result = run_in(UserCode(running), original, self, *running.to_true(args))
        return running.to_scaled(result)

    return apply


def retain_grad(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`Tensor.retain_grad`: remember, weakly, that this tensor's ``.grad`` will be written too."""

    def retain_grad(self: torch.Tensor) -> None:
        original(self)
        session.retain(self)

    return retain_grad


def _with_true_gradients(hook: Callable[..., Any]) -> Callable[..., Any]:
    if is_torchs_own(hook):
        return hook

    @_named_after(hook)
    def in_true_units(*args: Any) -> Any:
        running = current()
        if not isinstance(running, Pass):
            return hook(*args)
        true = running.to_true(args)
        result = run_in(UserCode(running), hook, *true)
        if (
            result is None
            and len(true) == 1
            and isinstance(true[0], torch.Tensor)
            and true[0]._version
        ):
            result = true[0]
        like = args[0] if len(args) == 1 else args[1]  # a tensor's hook, or (module, gradients, …)
        return running.to_scaled(result, like)

    return in_true_units


def _named_after(hook: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return functools.wraps(hook, updated=())


def is_torchs_own(function: Any) -> bool:
    """Whether a hook or class was defined by torch itself, which works in scaled units."""
    module = getattr(function, "__module__", None) or ""
    return module == "torch" or module.startswith("torch.")


def _stays_scaled(function: type) -> bool:
    if is_torchs_own(function):
        return True
    code = getattr(getattr(function, "forward", None), "__code__", None)
    return code is not None and code.co_filename == torch.amp.autocast_mode.__file__
