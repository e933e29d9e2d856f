"""Weights that a script edits inside an open region: the next op in it has to see them.

Torch keeps its casts of weights until the outermost context ends, and does not look whether the
weights are still the same. A training loop in a module is seen to by its backward and step; here is
the rest: weights change where gradients are switched off, or through ``.data``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo

from .kernels import FULL, Local
from .session import Session
from .stepping import dynamo_is_off

is_compiling = torch.compiler.is_dynamo_compiling
_compile_context = torch._guards.CompileContext.try_get


def grad_mode_set(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`torch.set_grad_enabled(mode)`, which is also how `torch.no_grad` begins and ends."""
    local = session.local

    def __init__(self: Any, mode: bool) -> None:  # noqa: N807
        original(self, mode)
        if local.region is not None:
            (_follow_grad_mode if dynamo_is_off() else _follow_eagerly)(local)

    return __init__


def block_left(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """The end of a ``with`` block in which gradients were off."""
    local = session.local

    def __exit__(self: Any, exc_type: Any, exc_value: Any, traceback: Any) -> None:  # noqa: N807
        original(self, exc_type, exc_value, traceback)
        if local.region is not None:
            (_follow_grad_mode if dynamo_is_off() else _follow_eagerly)(local)

    return __exit__


def edit(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """A function that assigns new values to weights, and refuses those that a cast refers to."""
    local, weights = session.local, session.weights

    def assign(*args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            if local.region is not None:
                local.forget_casts()
            weights.forget_all()  # what is swapped must not be referred to
        return original(*args, **kwargs)

    return assign


class _Named(property):
    """A property with a name, as the attributes of tensors that are written in C have one."""

    def __init__(self, get: Callable[..., Any], set: Callable[..., Any], like: Any) -> None:  # noqa: A002
        super().__init__(get, set, doc=like.__doc__)
        self.__name__, self.__qualname__ = like.__name__, like.__qualname__


def data(original: Any, session: Session) -> property:
    """`Tensor.data`: what is done to such a tensor, the version of the weight does not tell."""
    local, weights = session.local, session.weights

    def get(tensor: Any) -> Any:
        note(tensor)
        return original.__get__(tensor)

    def set(tensor: Any, value: Any) -> None:  # noqa: A001 - what it is
        note(tensor)
        original.__set__(tensor, value)

    def note(tensor: Any) -> None:
        weights.forget(tensor)
        if local.region is not None and type(tensor) is torch.nn.Parameter:
            _keep_no_casts(local)

    return _Named(get, set, original)


def _follow_grad_mode(local: Local) -> None:
    """Keep casts while gradients are recorded: with them off, weights may change at any moment.

    A region that opened with gradients off keeps casts until the script switches them for the first
    time.
    """
    if not torch.is_grad_enabled():
        _keep_no_casts(local)
    elif _may_forget(local):
        local.forget_casts()
        if local.paused is not None:
            torch.set_autocast_cache_enabled(local.paused)
            local.uncached, local.paused = False, None


_follow_eagerly = _disable_dynamo(_follow_grad_mode)
"""In frames of torch that Dynamo does not compile (to print a tensor) it would compile ours."""


def _keep_no_casts(local: Local) -> None:
    """Make none that stay from here on, and forget those that there are.

    It is in the words that a backward uses (`Local.uncached`), so that islands and the end of the
    region do the right thing.
    """
    if _may_forget(local):
        local.forget_casts()
        if not local.uncached:
            local.uncached, local.paused = True, torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)


def _may_forget(local: Local) -> bool:
    """Not in front of a dispatch mode, where torch may hold the lock of its cast cache, and not
    under Dynamo, which wants to find the state that it began with."""
    is_in_front = local.precision not in FULL and not torch.is_autocast_enabled(local.region)
    return not is_in_front and _compile_context() is None
