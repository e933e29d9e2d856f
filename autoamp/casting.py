"""The dtype of every tensor in a nested value: what leaves a region becomes float32.

Containers are copied, never edited; a value with nothing to change is returned as it is.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

Convert = Callable[[torch.Tensor], torch.Tensor]
HALF = (torch.float16, torch.bfloat16)
_ATOMS = (str, bytes, int, float, torch.nn.Module, type(None))
_PLAIN = (torch.Tensor, *_ATOMS)


def to_float32(value: Any, came_in: tuple[Any, ...] = (), full: Convert | None = None) -> Any:
    """`value` with each half tensor in it as float32, connected in autograd.

    Reaches into tuples, lists, dicts, dataclasses, their subclasses (named tuples, ``ModelOutput``)
    and ``torch.distributions``. Tensors that the caller passed in as half (`came_in`: the call's
    arguments) stay half; a tensor that stands in several places is cast once. A container that
    cannot be copied and changed is returned as it is: that is no reason for a call to fail. `full`
    is what is done to each tensor, if it is more than that.
    """
    if isinstance(value, torch.Tensor) and full is None:
        if value.dtype not in HALF:
            return value
        if all(isinstance(item, _PLAIN) and item is not value for item in came_in):
            return value.float()
    try:
        stay: dict[int, Any] = {}
        _note_half_tensors(came_in, stay, set())
        return _cast(value, stay, full or _full)
    except Exception:  # noqa: BLE001 - classes of the script run in here
        return value


def back_to_half(value: Any, came_in: Any) -> Any:
    """A float32 result in the half type of what the call was given, if that was half."""
    halves: dict[int, Any] = {}
    _note_half_tensors(came_in, halves, set())
    if not halves:
        return value
    dtype = next(iter(halves.values())).dtype
    try:
        return _cast(value, {}, lambda tensor: _halved(tensor, dtype))
    except Exception:  # noqa: BLE001 - classes of the script run in here
        return value


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor


def _halved(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.dtype is torch.float32 else tensor


def _cast(value: Any, done: dict[int, Any], convert: Convert) -> Any:
    """`done`: what became of each value by identity; an open container stands for itself."""
    if id(value) in done:
        return done[id(value)]
    result: Any = value
    if isinstance(value, torch.Tensor):
        result = convert(value)
    elif isinstance(value, tuple):
        items = [_cast(item, done, convert) for item in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            result = _tuple_like(value, items)
    elif contents := _contents(value):
        done[id(value)] = value
        changed = {
            key: new for key, old in contents if (new := _cast(old, done, convert)) is not old
        }
        if changed:
            result = copy.copy(value)
            for (is_attribute, key), new in changed.items():
                if is_attribute:
                    object.__setattr__(result, key, new)  # frozen dataclasses too: it is our copy
                else:
                    result[key] = new
    done[id(value)] = result
    return result


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> Any:
    if hasattr(type(value), "n_sequence_fields"):  # what torch.max and its like return
        return type(value)(items)
    # A named tuple has no constructor that takes a list; a subclass may check its arguments.
    return tuple.__new__(type(value), items)


def _contents(value: Any) -> list[tuple[tuple[bool, Any], Any]]:
    """((is it an attribute, key), item) of a container other than a tuple; empty if it is none."""
    items: Any = ()
    attributes: Any = ()
    if isinstance(value, list):
        items = enumerate(value)
    elif isinstance(value, dict):
        items = value.items()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        attributes = [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    elif isinstance(value, torch.distributions.Distribution):
        attributes = vars(value).items()
    return [((False, k), v) for k, v in items] + [((True, k), v) for k, v in attributes]


def _note_half_tensors(value: Any, found: dict[int, Any], seen: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        if value.dtype in HALF:
            found[id(value)] = value
        return
    if isinstance(value, _ATOMS) or id(value) in seen:
        return
    seen.add(id(value))
    items: Any = value
    if isinstance(value, dict):
        items = value.values()
    elif not isinstance(value, (tuple, list)):
        items = [item for _, item in _contents(value)]
    for item in items:
        _note_half_tensors(item, found, seen)
