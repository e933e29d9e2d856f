"""What a module call changes besides its results, kept so that it can be made again from the start.

Buffers, random states, and what a checkpoint in whose forward it runs has noted. What else a
forward does (prints, lists that grow) cannot be undone.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .inspection import quietly, tensors_in
from .naming import all_below

Module = torch.nn.Module
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Watch:
    """One call of a root that is watched: what it has changed so far."""

    def __init__(self, device_type: str) -> None:
        self.is_in_doubt = False
        self.mark = 0
        """What `ranks.collectives` was when the innermost module call began."""
        self._device_type = device_type
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def snapshot(self, module: Module) -> Snapshot:
        """What a call of this module may change besides its results."""
        with quietly():
            buffers = [
                (part, name, buffer, copy)
                for part in all_below(module)
                for name, buffer in part.__dict__.get("_buffers", {}).items()
                if buffer is not None and (copy := self._copy(buffer)) is not None
            ]
        return Snapshot(buffers, list(_random_states(self._device_type)), checkpoint_frame())

    def _copy(self, buffer: torch.Tensor) -> torch.Tensor | None:
        """The values of a buffer; None where it has none yet, or does not give them.

        Kernels of norms write running statistics without counting that as an edit.
        """
        known = self._copies.get(id(buffer))
        try:
            if known is None or not _are_equal(known[1], buffer):
                known = self._copies[id(buffer)] = buffer, buffer.clone()
        except Exception:  # noqa: BLE001 - classes of the script, lazy and quantized ones
            return None
        return known[1]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Buffers, random states and what an open checkpoint has noted, at one moment."""

    buffers: list[tuple[Module, str, torch.Tensor, torch.Tensor]]
    states: list[tuple[Callable[[Any], Any], Any]]
    checkpoint: tuple[Any, int] | None

    def restore(self) -> None:
        """Have them as they were."""
        with quietly():
            for module, name, buffer, copy in self.buffers:
                module._buffers[name] = buffer
                if not _are_equal(buffer, copy):
                    buffer.data.copy_(copy)  # graphs that hold it do not take it for edited
            for put, state in self.states:
                put(state)
        if self.checkpoint is not None:
            frame, count = self.checkpoint
            del frame.weak_holders[count:]
            del frame.x_metadatas[count:]


def everything(module: Module, device_type: str) -> Callable[[], None]:
    """What puts back all that a call of this module may change in it, and random states.

    Parameters, buffers and attributes, and of these what is in dicts, lists and sets one level
    deep. What a script keeps elsewhere is not known here.
    """
    parts = [part.__dict__ for part in all_below(module)]
    held = [value for part in parts for value in part.values() if type(value) in _CONTAINERS]
    containers = [(container, copy.copy(container)) for container in (*parts, *held)]
    with quietly():
        tensors = [(t, t.detach().clone()) for t in dict.fromkeys(tensors_in(parts))]
    states = Snapshot([], list(_random_states(device_type)), None)

    def restore() -> None:
        for container, before in containers:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(before)
        with quietly():
            for tensor, before in tensors:
                if not _are_equal(tensor, before):
                    tensor.data.copy_(before)  # graphs that hold it do not take it for edited
        states.restore()

    return restore


def _are_equal(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    return copy.layout is torch.strided and torch.equal(tensor, copy)


_CONTAINERS = (dict, OrderedDict, list, set)


def _random_states(device_type: str) -> Iterator[tuple[Callable[[Any], Any], Any]]:
    yield torch.set_rng_state, torch.get_rng_state()
    if device_type != "cpu":
        device = torch.get_device_module(device_type)
        yield device.set_rng_state, device.get_rng_state()
    yield random.setstate, random.getstate()
    if (numpy := sys.modules.get("numpy")) is not None:
        yield numpy.random.set_state, numpy.random.get_state()


def checkpoint_frame() -> tuple[Any, int] | None:
    """The checkpoint in whose forward this is, and how many tensors it has noted."""
    hooks = _top_hooks(False)
    pack: Any = hooks[0] if hooks else None
    if getattr(pack, "__qualname__", "") != "_checkpoint_hook.__init__.<locals>.pack_hook":
        return None
    frame = pack.__closure__[pack.__code__.co_freevars.index("frame")].cell_contents
    return frame, len(frame.weak_holders)
