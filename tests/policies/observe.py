"""The dtypes in which a call really computes, on the CPU and on a CUDA of fake tensors."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from .samples import Sample, floats

MOVING = (
    # what makes, moves or converts tensors, and computes nothing
    *("_to_copy", "copy_", "clone", "detach", "lift_fresh", "_local_scalar_dense", "resize_"),
    *("*_like", "new_*", "zero_", "zeros", "fill_", "set_", "unsafe_chunk", "is_same_size"),
)
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


PRECISION = {torch.complex32: torch.float16, torch.complex64: torch.float32}
"""Complex numbers are counted by the precision of their parts."""


@dataclass(frozen=True)
class Observation:
    """What a call did: the dtypes of the operands of the ops that computed, and of its results.

    Double and integers are not counted: autocast leaves them alone. Where the call raised, `error`
    says what, and `compute` what came before.
    """

    compute: frozenset[torch.dtype]
    outputs: tuple[torch.dtype, ...]
    result: Any
    error: str = ""


class _Computing(TorchDispatchMode):
    """Notes the dtypes of the floating operands of every op that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and not _is_moving(func):
            read = floats([v for argument, v in _bound(func, args, kwargs) if not is_out(argument)])
            asked = _asked_dtype(func, args, kwargs)
            self.dtypes += [asked if asked else tensor.dtype for tensor in read]
        return func(*args, **kwargs)


def observe(call: Callable[[], Any]) -> Observation:
    """Run `call`, without gradients and without keeping casts, and look at every op below it."""
    result, error = None, ""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.no_grad(), _Computing() as seen:
            result = call()
    except Exception as raised:  # noqa: BLE001 - many kinds, and the caller judges
        error = f"{type(raised).__name__}: {raised}".partition("\n")[0]
    finally:
        torch.set_autocast_cache_enabled(cached)
    outputs = counted(tensor.dtype for tensor in floats(result))
    return Observation(frozenset(counted(seen.dtypes)), outputs, result, error)


def counted(dtypes: Iterable[torch.dtype]) -> tuple[torch.dtype, ...]:
    """Those that autocast knows."""
    found = (PRECISION.get(dtype, dtype) for dtype in dtypes)
    return tuple(d for d in found if d is torch.float32 or d in HALVES.values())


def _is_moving(func: Any) -> bool:
    name = func._schema.name.removeprefix("aten::")
    is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
    return is_view or any(fnmatch.fnmatchcase(name, pattern) for pattern in MOVING)


def _bound(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        yield argument, value
    for argument in func._schema.arguments:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]


def is_out(argument: Any) -> bool:
    return bool(argument.kwarg_only and argument.alias_info and argument.alias_info.is_write)


def _asked_dtype(func: Any, args: Any, kwargs: Any) -> torch.dtype | None:
    """The dtype that a call computes in because an argument says so."""
    for argument, value in _bound(func, args, kwargs):
        if argument.name == "dtype" and value is not None:
            return value  # type: ignore[no-any-return]
        if argument.name == "half_to_float" and value:
            return torch.float32
    return None


@contextlib.contextmanager
def autocast(device: str, dtype: torch.dtype) -> Iterator[None]:
    """torch's own autocast, by the switches: the context refuses CUDA where there is none."""
    torch.autocast_increment_nesting()
    torch.set_autocast_enabled(device, True)
    before = torch.get_autocast_dtype(device)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_dtype(device, before)
        torch.set_autocast_enabled(device, False)
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


@contextlib.contextmanager
def tensors_on(device: str) -> Iterator[None]:
    """Tensors of `device` can be made: fake ones where this machine has no such device."""
    if device == "cpu" or torch.get_device_module(device).is_available():
        yield
    else:
        with FakeTensorMode():
            yield


def on(device: str, sample: Sample, *dtypes: torch.dtype) -> Sample:
    """`sample` on `device`, its operands in `dtypes` in turn, the last one for the rest.

    What is written into, and is no operand, stays as it is.
    """
    left = list(dtypes)
    outs = [sample.kwargs[name] for name in sample.writes if isinstance(name, str)]

    def move(tensor: torch.Tensor) -> torch.Tensor:
        dtype = tensor.dtype
        if tensor.is_floating_point() and not any(tensor is out for out in outs):
            dtype = left.pop(0) if len(left) > 1 else left[0]
        if device == "cpu":
            return tensor.to(dtype, copy=True)
        return torch.empty(tensor.shape, dtype=dtype, device=device)

    return sample.changed(move)


class Around(nn.Module):
    """A module with a parameter on `device`: a call of it is a region, and `call` runs in there."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.empty(1, device=device))
        self.returned: Any = None

    def forward(self, call: Callable[[], Any]) -> None:
        self.returned = call()


def in_region(device: str, call: Callable[[], Any]) -> Any:
    """What `call` returns inside a region of ours, half tensors as they are in there."""
    around = Around(device)
    around(call)
    return around.returned
