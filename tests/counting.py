"""Counts the ops of one training step, by dtype and module, in another way than the audit does.

A dispatch mode is on for the whole step; which module an op belongs to is told by a stack that a
wrapper around ``Module._call_impl`` keeps, and by the autograd nodes that modules' calls have made.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

FREE = ("detach", "alias", "clone", "lift_fresh", "_unsafe_view", "resize_", "set_")
FREE += ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""What computes nothing, besides views."""


class Count(TorchDispatchMode):
    """Ops and casts of module calls and of backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
        self.casts: Counter[str] = Counter()
        self.by_class: Counter[tuple[str, str]] = Counter()
        self.modules: list[torch.nn.Module] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_backward = torch._C._current_graph_task_id() != -1
        if is_backward or self.modules:
            self._count(func, args, result, "backward" if is_backward else "forward")
        return result

    def _count(self, func: Any, args: Any, result: Any, phase: str) -> None:
        name = func._schema.name.partition("::")[2]
        results = result if isinstance(result, (tuple, list)) else [result]
        tensors = [value for value in results if isinstance(value, torch.Tensor)]
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        if func.is_view or name in FREE or not tensors:
            return
        dtype = str((floats or tensors)[0].dtype).split(".")[1]
        if name in ("_to_copy", "copy_"):
            given = args[0] if name == "_to_copy" else args[1]
            if given.is_floating_point() and floats and given.dtype is not floats[0].dtype:
                self.casts[f"{str(given.dtype).split('.')[1]} to {dtype}"] += 1
            return
        self.ops[phase][dtype] += 1
        if phase == "forward":
            self.by_class[type(self.modules[-1]).__name__, dtype] += 1


@contextlib.contextmanager
def counted_step(number: int) -> Iterator[Count]:
    """Count the training step after `number` steps, up to the next step of the same optimizer."""
    count = Count()
    original = torch.nn.Module._call_impl
    steps, first = 0, None

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Loss modules and evaluations are no part of what the audit looks at.
        is_seen = count.modules or next(self.parameters(), None) is not None
        if not is_seen or not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        count.modules.append(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            count.modules.pop()

    def step_ended(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal steps, first
        steps += 1
        if steps == number:
            first = optimizer
            count.__enter__()
        elif optimizer is first:
            first = None
            count.__exit__(None, None, None)

    hook = register_optimizer_step_post_hook(step_ended)
    torch.nn.Module._call_impl = call
    try:
        yield count
    finally:
        torch.nn.Module._call_impl = original
        hook.remove()
