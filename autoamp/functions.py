"""Custom autograd Functions inside regions: they were written for float32, and run in it.

Those of torch itself, and those that declare ``custom_fwd``, stay as they are.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import torch

from . import formats
from .backward import half_devices
from .casting import to_float32
from .hooks import stays_scaled
from .kernels import nesting
from .session import Session

AS_GIVEN = ""
"""In the place of a device type: this Function refuses float32, and gets what it is given."""

_FAILED = object()
_SPEAKS_OF_DTYPES = re.compile(r"dtype|half|float|fp16|bf16", re.IGNORECASE)
_current_graph_task_id = torch._C._current_graph_task_id


def function_apply(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`autograd.Function.apply`: inside a region it is called as a float32 island.

    Modules that its forward calls are in the region as before. On which device is remembered by
    class: a backward that calls them again has to meet them as they were.
    """
    local, devices = session.local, session.function_devices
    full = (
        formats.full_and_contiguous if session.policy.performance.memory_format != "keep" else None
    )

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if local.region is None and _current_graph_task_id() == -1:
            return original(cls, *args, **kwargs)
        device_type = device_around(session)
        if (
            device_type is None
            or stays_scaled(cls)
            or devices.get(cls) == AS_GIVEN
            or _is_in_own_context(session)
        ):
            return original(cls, *args, **kwargs)
        devices[cls] = device_type
        full_args, full_kwargs = to_float32((args, kwargs), full=full)
        try:
            result = session.islands.call_own(
                original, (cls, *full_args), full_kwargs, device_type=device_type
            )
        except Exception as error:
            is_cast = full_args is not args or full_kwargs is not kwargs
            if not is_cast or not _is_about_dtypes(error):
                raise
            result = _FAILED
            with contextlib.suppress(Exception):  # what goes wrong in float32 is to be raised
                result = original(cls, *args, **kwargs)
            if result is _FAILED:
                raise
            devices[cls] = AS_GIVEN
            return result
        _write_back(full_args, args)
        return result

    return apply


def device_around(session: Session) -> str | None:
    """The type of device on which autocast is on here as in a region; None where there is no such.

    In a backward a checkpoint runs the forward of a region again, under the autocast state of then.
    """
    region = session.local.region
    if region is not None:
        return region if torch.is_autocast_enabled(region) else None
    if _current_graph_task_id() == -1 or not session.active:
        return None
    return next(filter(torch.is_autocast_enabled, half_devices(session)), None)


def _is_in_own_context(session: Session) -> bool:
    """Whether the script has opened a context of its own inside the region: that wins."""
    return session.local.region is not None and nesting() > 1


def _is_about_dtypes(error: Exception) -> bool:
    return isinstance(error, AssertionError) or bool(_SPEAKS_OF_DTYPES.search(str(error)))


def _write_back(full: tuple[Any, ...], given: tuple[Any, ...]) -> None:
    """What a Function has edited in place (``mark_dirty``) is edited for the script too."""
    for new, old in zip(full, given, strict=True):
        is_cast = new is not old and isinstance(new, torch.Tensor)
        if is_cast and not new.is_inference() and new._version:
            old.copy_(new)
