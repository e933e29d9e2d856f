"""Kernels of our own on torch's Autocast dispatch keys, put in and taken out.

A kernel there is found by every spelling of an op (function, method, module, TorchScript, names
imported early) and acts only while autocast is on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Kernel:
    """One overload of an aten op on one device; `factory` takes (op, dispatch key)."""

    op: str
    device: str
    factory: Callable[[Any, torch._C.DispatchKey], Callable[..., Any]]
    why: str


class Kernels:
    """The kernels in force; `remove` leaves the dispatcher as it was."""

    def __init__(self) -> None:
        self.registered: list[Kernel] = []
        self._libraries: list[Any] = []

    def register(self, kernels: Iterable[Kernel]) -> None:
        """Put kernels in. torch warns once a process of an override: not the script's business."""
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self._libraries.append(library)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for kernel in kernels:
                key = getattr(torch._C.DispatchKey, f"Autocast{kernel.device.upper()}")
                library.impl(
                    kernel.op,
                    kernel.factory(_overload(kernel.op), key),
                    f"Autocast{kernel.device.upper()}",
                )
                self.registered.append(kernel)

    def remove(self) -> None:
        """Take all of them out again."""
        while self._libraries:
            self._libraries.pop()._destroy()
        self.registered.clear()


def in_float32(op: Any, key: torch._C.DispatchKey) -> Callable[..., Any]:
    """A kernel that casts half tensors to float32 and runs the op, all of it, without autocast."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return op(*_float32(args), **_float32(kwargs))

    return kernel


def _float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, (tuple, list)):
        return type(value)(_float32(item) for item in value)
    if isinstance(value, dict):
        return {key: _float32(item) for key, item in value.items()}
    return value


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")
