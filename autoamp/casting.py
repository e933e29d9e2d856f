"""The dtype of every tensor in a nested value: what leaves a region becomes float32.

Containers are copied, never edited; a value with nothing to change is returned as it is, by
identity.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

HALF = (torch.float16, torch.bfloat16)


def to_float32(value: Any, came_in: tuple[Any, ...] = ()) -> Any:
    """`value` with each half tensor in it as float32, connected in autograd.

    Reaches into tuples, lists, dicts, dataclasses, their subclasses (named tuples, ``ModelOutput``)
    and ``torch.distributions``. Tensors that the caller passed in as half (`came_in`: the call's
    arguments) stay half; a tensor that stands in several places is cast once.
    """
    if isinstance(value, torch.Tensor) and value.dtype not in HALF:
        return value
    return _cast(value, {id(tensor): tensor for tensor in _half_tensors(came_in)})


def _cast(value: Any, done: dict[int, Any]) -> Any:
    """`done`: what became of each value by identity; an open container stands for itself."""
    if id(value) in done:
        return done[id(value)]
    result: Any
    if isinstance(value, torch.Tensor):
        result = value.float() if value.dtype in HALF else value
    elif isinstance(value, tuple):
        items = [_cast(item, done) for item in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        # A named tuple has no constructor that takes a list; `tuple.__new__` passes by whatever a
        # subclass checks.
        result = value if same else tuple.__new__(type(value), items)
    else:
        result = _cast_mutable(value, done)
    done[id(value)] = result
    return result


def _cast_mutable(value: Any, done: dict[int, Any]) -> Any:
    if isinstance(value, list):
        items = dict(enumerate(value))
    elif isinstance(value, dict):
        items = value
    else:
        items = {}
    attributes = _attributes(value)
    if not items and not attributes:
        return value
    done[id(value)] = value
    new_items = {key: new for key, old in items.items() if (new := _cast(old, done)) is not old}
    new_attributes = {
        key: new for key, old in attributes.items() if (new := _cast(old, done)) is not old
    }
    if not new_items and not new_attributes:
        return value
    result = copy.copy(value)
    for key, new in new_items.items():
        result[key] = new
    for name, new in new_attributes.items():
        object.__setattr__(result, name, new)  # frozen dataclasses too: this is our own copy
    return result


def _attributes(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return dict(vars(value)) if isinstance(value, torch.distributions.Distribution) else {}


def _half_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.dtype in HALF:
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _half_tensors(item)
    elif isinstance(value, dict):
        yield from _half_tensors(tuple(value.values()))
