"""torch's own autocast list for every op on a device, asked of the installed torch.

An op is called with tensors that show what its autocast kernel does to them, and stopped before it
computes anything: the first cast, or the first op below the kernel, tells. Documentation and
headers are incomplete, and differ between versions.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .inspection import Watcher

LOWER, FLOAT32, WIDEST, REFUSED, AS_GIVEN = "lower", "float32", "widest", "refused", ""
"""What autocast does to an op: its operands are cast to the lower precision, to float32, to the
widest of theirs; an error is raised; or, for ops in no list, nothing."""


@functools.cache
def torchs_lists(device_type: str) -> Mapping[str, str]:
    """``{overload: list}`` of every aten op with an autocast kernel (``addmm``, ``pow.Scalar``).

    Where the machine has no such device fake tensors stand for it. Kernels that autoamp has put in
    are not told from torch's own: ask before there are any.
    """
    key = autocast_key(device_type)
    names = sorted(
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    )
    with _probing(device_type), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: _probe(overload(name), device_type) for name in names}


def autocast_key(device_type: str) -> str:
    """The name of the dispatch key where a device's autocast kernels are."""
    return f"Autocast{device_type.upper()}"


def overload(name: str) -> Any:
    """``torch.ops.aten.pow.Scalar`` for ``pow.Scalar``."""
    packet, _, which = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), which or "default")


class _Stop(Exception):  # noqa: N818 - a way out, not an error
    """Enough has been seen."""


class _FirstEvent(Watcher):  # type: ignore[no-untyped-call]
    """Notes the first thing that happens below an autocast kernel, and stops there."""

    def __init__(self) -> None:
        super().__init__()
        self.cast_to: torch.dtype | None = None
        self.sets_dtype = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asking for the device of a fake tensor
            return func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default:
            self.cast_to = kwargs.get("dtype")
        else:
            self.sets_dtype = any(value is torch.float32 for value in (*args, *kwargs.values()))
        raise _Stop


LOWER_DTYPE, OTHER_HALF = torch.float16, torch.bfloat16  # softmax on CUDA takes float16 as it is


def _probe(op: Any, device_type: str) -> str:
    # Half tensors that are not of the lower precision are cast by both other lists.
    seen, error = _watch(op, device_type, (OTHER_HALF,))
    if seen.cast_to is LOWER_DTYPE:
        return LOWER
    if seen.cast_to is torch.float32 or seen.sets_dtype:
        return FLOAT32
    for dtypes in ((LOWER_DTYPE, torch.float32), (torch.float32, LOWER_DTYPE)):
        seen, _ = _watch(op, device_type, dtypes)
        if seen.cast_to is torch.float32:
            return WIDEST
    # The kernel raised before anything below it was called.
    return REFUSED if error is not None else "unknown"


def _watch(
    op: Any, device_type: str, dtypes: tuple[torch.dtype, ...]
) -> tuple[_FirstEvent, Exception | None]:
    """What happens first in a call with tensors of these dtypes, the last one for the rest."""
    left = list(dtypes)

    def tensor() -> torch.Tensor:
        return torch.ones(1, 1, dtype=left.pop(0) if len(left) > 1 else left[0], device=device_type)

    args, kwargs = [], {}
    for argument in op._schema.arguments:
        if argument.has_default_value():
            continue
        value = _value(str(argument.type), tensor)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    with _FirstEvent() as seen:
        try:
            op(*args, **kwargs)
        except _Stop:
            return seen, None
        except Exception as error:  # noqa: BLE001 - the values mean nothing to the op
            return seen, error
    return seen, None


_VALUES: Mapping[str, Any] = {
    "int": 0,
    "SymInt": 0,
    "float": 1.0,
    "number": 1,
    "Scalar": 1,
    "bool": False,
    "str": "fro",
    "List[int]": [1],
    "List[SymInt]": [1],
    "List[float]": [1.0],
    "List[bool]": [False],
}


def _value(kind: str, tensor: Any) -> Any:
    if kind == "Tensor":
        return tensor()
    if kind.startswith("List[Tensor"):
        return [tensor(), tensor()]
    if kind.startswith("List[Optional[Tensor"):
        return [tensor()]
    return _VALUES.get(kind)


@contextlib.contextmanager
def _probing(device_type: str) -> Iterator[None]:
    """Autocast on for a device, which may be a fake one, and as it was afterwards; no inference."""
    enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, LOWER_DTYPE)
    torch.set_autocast_cache_enabled(False)
    try:
        # In inference mode a dispatch mode sees other ops: `to`, and not what it is made of.
        with torch._C._InferenceMode(False), torch.no_grad(), _device(device_type):
            yield
    finally:
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_cache_enabled(cached)


def _device(device_type: str) -> contextlib.AbstractContextManager[Any]:
    if device_type == "cpu" or torch.get_device_module(device_type).is_available():
        return contextlib.nullcontext()
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()
