"""One run of the autograd engine: its gradients carry the scale, except in the hands of user code.

On CUDA hooks and custom Functions run on the engine's own threads, where a plain thread-local is
empty: the pass travels in the thread-local state that torch hands to them.
"""

from __future__ import annotations

import ctypes
import operator
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .casting import HALF
from .ranks import local_values
from .scaling import any_of, check, multiply_, unscale_

KEY = "autoamp.pass"
_requires_grad = operator.attrgetter("requires_grad")


class Pass:
    """One run of the engine: its gradients carry `scale`, and so does the ``.grad`` of `leaves`.

    One that `may_repeat` remembers what it found there. `is_heard` once user code has acted on a
    finished gradient of it, in a post-accumulate hook: from then on it cannot run again.
    """

    def __init__(
        self,
        scale: torch.Tensor,
        inverse: torch.Tensor,
        outer: Pass | None,
        may_repeat: bool = False,
    ) -> None:
        self.scale = scale
        self.inverse = inverse
        self.outer = outer
        self.leaves: dict[int, torch.Tensor] = {}
        self.flags: list[torch.Tensor] = []
        self.before: list[Found] | None = [] if may_repeat else None
        self.is_heard = False
        self._lent: list[torch.Tensor] = []

    def take(self, tensors: list[torch.Tensor]) -> None:
        """Make these tensors' gradients scaled ones: what they hold already is multiplied."""
        if self.leaves:  # torch runs the engine again inside: they may be among ours already
            tensors = [tensor for tensor in tensors if id(tensor) not in self.leaves]
        if self.outer is not None:
            self.outer.lend(tensors)
        if self.before is not None:
            self.before += map(found, tensors)
        self.leaves.update(zip(map(id, tensors), tensors, strict=True))
        grads = _gradients(tensors)
        if grads:
            grads = _plain(tensors, grads, self.scale)
            with torch.no_grad():
                multiply_(local_values(grads), self.scale)

    def settle(self, tensor: torch.Tensor | None = None) -> None:
        """Give this tensor its true gradient back, or all of them; note whether it is finite."""
        tensors = list(self.leaves.values())
        if tensor is not None:
            tensors = [self.leaves.pop(id(tensor))] if id(tensor) in self.leaves else []
        else:
            self.leaves.clear()
        grads = _gradients(tensors)
        if grads:
            grads = _plain(tensors, grads, self.inverse, self.flags)
            with torch.no_grad():
                self.flags += unscale_(local_values(grads), self.inverse)

    def lend(self, tensors: list[torch.Tensor]) -> None:
        """To user code that may add to their gradients, or to a pass inside it: true ones."""
        if self.outer is not None:
            self.outer.lend(tensors)
        lent = [tensor for tensor in tensors if id(tensor) in self.leaves]
        for tensor in lent:
            self.settle(tensor)
        self._lent += lent

    def take_back(self) -> None:
        """When that user code is done."""
        if self._lent:
            lent, self._lent = self._lent, []
            self.take(lent)

    def overflowed(self) -> bool:
        """Whether any gradient was not finite. Waits for the device."""
        return bool(self.flags) and bool(any_of(self.flags).item())

    def to_true(self, value: Any) -> Any:
        """Gradients as user code sees them: unscaled, half ones as float32."""
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            value = value.float() if value.dtype in HALF else value
            return value * self.inverse.to(value.device, non_blocking=True)
        if isinstance(value, (tuple, list)):
            return type(value)(self.to_true(item) for item in value)
        return value

    def to_scaled(self, value: Any, like: Any = None) -> Any:
        """What user code returned, for the engine: scaled, in the dtypes of `like` if given."""
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            scaled = value * self.scale.to(value.device, non_blocking=True)
            return scaled.to(like.dtype) if isinstance(like, torch.Tensor) else scaled
        if isinstance(value, (tuple, list)):
            known = isinstance(like, (tuple, list)) and len(like) == len(value)
            return type(value)(map(self.to_scaled, value, like if known else [None] * len(value)))
        return value


def _gradients(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What they have in ``.grad``; a tensor that several share is one gradient."""
    grads = {id(grad): grad for tensor in tensors if (grad := tensor.grad) is not None}
    return list(grads.values())


class Found(NamedTuple):
    """A tensor, its ``.grad`` at one time, and a copy where the engine edits that in place."""

    tensor: torch.Tensor
    grad: torch.Tensor | None
    copy: torch.Tensor | None

    def put_back(self) -> None:
        """Make ``.grad`` what it was, the same tensor with the same values."""
        grad, copy = self.grad, self.copy
        if grad is not None and copy is not None:
            with torch.no_grad():
                grad.copy_(copy)
        self.tensor.grad = grad


def found(tensor: torch.Tensor) -> Found:
    """What is found there now."""
    grad = tensor.grad
    is_edited = grad is not None and not grad.requires_grad
    return Found(tensor, grad, grad.clone() if grad is not None and is_edited else None)


def _plain(
    tensors: list[torch.Tensor],
    grads: list[torch.Tensor],
    factor: torch.Tensor,
    flags: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """The gradients that can be edited in place.

    One with a graph (``create_graph``) is multiplied, checked and replaced here instead, so that it
    can be differentiated again.
    """
    if not any(map(_requires_grad, grads)):
        return grads
    for tensor in tensors:
        if tensor.grad is not None and tensor.grad.requires_grad:
            tensor.grad = tensor.grad * factor
            if flags is not None:
                flags += check([tensor.grad])
    return [grad for grad in grads if not grad.requires_grad]


class UserCode:
    """Stands in a pass's place while a hook or Function of the user runs: gradients are true."""

    def __init__(self, outer: Pass | None) -> None:
        self.outer = outer


def current() -> Pass | UserCode | None:
    """What the engine is running on this thread, engine threads included."""
    if torch._C._is_key_in_tls(KEY):
        return torch._C._get_obj_in_tls(KEY)  # type: ignore[no-any-return]
    return None


def run_in(value: Pass | UserCode, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` while `value` is what runs, on this thread and on those of the engine."""
    before = current()
    _stash(KEY, value)
    try:
        return function(*args, **kwargs)
    finally:
        if before is None:
            _forget(KEY)
        else:
            _stash(KEY, before)


def _stash_counted(key: str, value: object) -> None:
    """`_stash_obj_in_tls` of a torch that takes over a reference of its caller and counts none."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


def _counts_references() -> bool:
    """Whether the stash holds on to what it is given, as in torch 2.13; 2.11 only let go of it."""
    value = object()
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(KEY, value)
    counts = sys.getrefcount(value) > before
    if not counts:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    return counts


def _overwrite(key: str) -> None:
    _stash(key, None)


_stash: Callable[[str, Any], None] = (
    torch._C._stash_obj_in_tls if _counts_references() else _stash_counted
)
# Erasing is safer at thread exit, says torch/autograd/graph.py; older versions can only overwrite.
_forget: Callable[[str], None] = getattr(torch._C, "_remove_obj_from_tls", _overwrite)
_forget(KEY)
