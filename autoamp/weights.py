"""Casts of weights that are kept: until the weight changes, or for the rest of a region.

torch keeps those of trainable weights until its outermost context ends, and casts all others at
each use. Here a cast is kept for as long as nothing can have written to its weight: what is used
without gradients (inference, decoding, frozen parts) is not cast again from call to call. What
writes without telling torch (raw pointers, storages, kernels of other packages) is not seen, but
casts that are used for evaluation alone end with the next step of any optimizer.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from . import formats
from .inspection import has_numbers, is_plain
from .kernels import Local
from .ranks import collectives

_PARAMETER = torch.nn.Parameter
_use_count = torch._C._storage_Use_Count
_no_inference = torch._C._InferenceMode
_ALONE = 2
"""The references to a storage that nobody shares: that of its tensor, and of who asks. Then the
version of the weight tells of all that is written there."""
_ROOM = 16
"""A cast is kept where this many like it would find room in the memory that is free."""


@dataclass(slots=True)
class _Kept:
    """A cast, and what was true of its weight when it was made."""

    cast: torch.Tensor
    weight: weakref.ref[torch.Tensor]
    version: int
    mark: int
    stream: int
    is_frozen: bool = False
    """Whether it was used where gradients are recorded, but not for this weight."""


class WeightCasts:
    """The casts that one session keeps, by where their weights are in memory."""

    def __init__(self, local: Local, is_on: bool) -> None:
        self.is_on = is_on
        self.evaluates = False
        """Whether some are used for evaluation alone."""
        self.has_ranks = False
        """Whether other ranks may write to weights."""
        self._local = local
        self._kept: dict[int, _Kept] = {}
        self._is_full = False

    def of(
        self, weight: torch.Tensor, dtype: torch.dtype, layout: Any = torch.preserve_format
    ) -> torch.Tensor:
        """The cast of a parameter that an op may use here, or the parameter: let the op cast it.

        Where a gradient goes through it, it lasts for the region, as torch's own casts do; else
        until the weight changes. A fresh one has the memory format `layout`.
        """
        if type(weight) is not _PARAMETER or weight.dtype is not torch.float32:
            return weight
        if weight.requires_grad and torch.is_grad_enabled():
            return self._for_region(weight, dtype, layout)
        return self._until_it_changes(weight, dtype, layout) if self.is_on else weight

    def places(self) -> set[int]:
        """Where the weights are in memory whose casts are kept."""
        return set(self._kept)

    def forget(self, tensor: torch.Tensor) -> None:
        """Somebody may write to the memory of `tensor` without telling its weight."""
        if self._kept and has_numbers(tensor):
            self._kept.pop(tensor.untyped_storage().data_ptr(), None)

    def forget_all(self) -> None:
        """The weights concerned are not known."""
        self._kept.clear()

    def end_evaluation(self) -> None:
        """Training goes on: what is not frozen in it takes no memory meanwhile."""
        if self.evaluates:
            self.evaluates = self._is_full = False
            self._kept = {place: kept for place, kept in self._kept.items() if kept.is_frozen}

    def _for_region(self, weight: torch.Tensor, dtype: torch.dtype, layout: Any) -> torch.Tensor:
        local = self._local
        if local.region is None or not torch.is_autocast_cache_enabled() or not is_plain():
            return weight
        known = local.casts.get(id(weight))
        if known is None or known[0] != weight._version or known[1].dtype is not dtype:
            cast = formats.cast(weight, dtype, layout)
            known = local.casts[id(weight)] = (weight._version, cast, weight)
        return known[1]

    def _until_it_changes(
        self, weight: torch.Tensor, dtype: torch.dtype, layout: Any
    ) -> torch.Tensor:
        place = weight.data_ptr()
        kept = self._kept.get(place)
        if not (
            kept is not None
            and kept.weight() is weight
            and kept.version == weight._version
            and kept.cast.dtype is dtype
            and _use_count(weight.untyped_storage()._cdata) == _ALONE
            and (not self.has_ranks or kept.mark == collectives())
            and (weight.is_cpu or kept.stream == _stream(weight))
        ):
            self._kept.pop(place, None)
            kept = self._keep(weight, dtype, layout)
            if kept is None:
                return weight
        if not kept.is_frozen and torch.is_grad_enabled():
            kept.is_frozen = True
        return kept.cast

    def _keep(self, weight: torch.Tensor, dtype: torch.dtype, layout: Any) -> _Kept | None:
        stream = _stream(weight)
        if stream is None or self._is_full or weight.is_inference() or not is_plain():
            return None
        storage = weight.untyped_storage()
        place, is_alone = storage.data_ptr(), _use_count(storage._cdata) == _ALONE
        if place != weight.data_ptr() or not is_alone or (weight.is_cpu and storage.is_shared()):
            return None
        self._is_full = _free_memory(weight.device) < _ROOM * weight.numel() * dtype.itemsize
        if self._is_full:
            return None
        with _no_inference(False):  # such tensors are of no use in training
            cast = formats.cast(weight.detach(), dtype, layout)

        def drop(dead: Any) -> None:
            if (kept := self._kept.get(place)) is not None and kept.weight is dead:
                del self._kept[place]

        reference = weakref.ref(weight, drop)
        kept = _Kept(cast, reference, weight._version, collectives(), stream)
        self._kept[place] = kept
        self.evaluates = self.evaluates or not torch.is_grad_enabled()
        return kept


def _stream(weight: torch.Tensor) -> int | None:
    """Where a cast would be computed, by its number; None where it cannot be kept."""
    if weight.is_cpu:
        return 0
    if not weight.is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.current_stream(weight.device).cuda_stream


def _free_memory(device: torch.device) -> float:
    """Bytes that nobody uses, of the device or the machine."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):  # not on every system
        return float("inf")
