"""2-D convolutions in channels-last, inside regions: the layout that Tensor Cores and oneDNN want.

The casts of operands are laid out so, which costs nothing besides; the script's own tensors and
parameters, and what leaves a region, have the layout that they would have without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .casting import HALF
from .session import Session

DEVICES: Mapping[str, tuple[str, ...]] = {
    "keep": (),
    "channels_last": ("cuda", "cpu"),
    "auto": ("cuda",),
}
"""By the policy's word, where convolutions run so."""
CONVOLUTIONS = ("conv2d", "conv_transpose2d")
"""The functions of `torch.nn.functional` concerned."""
CHANNELS_LAST = torch.channels_last
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_set_data = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]


def laid_out(value: Any, dtype: torch.dtype) -> Any:
    """The input of a convolution, (N, C, H, W), in `dtype` and channels-last."""
    if type(value) not in _PLAIN or value.dim() != 4 or value.dtype not in (torch.float32, *HALF):
        return value
    return value.to(dtype, memory_format=CHANNELS_LAST)


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether a tensor has that layout and no other."""
    return (
        type(tensor) in _PLAIN
        and tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=CHANNELS_LAST)
    )


def uses_channels_last(values: Iterable[Any]) -> bool:
    """Whether the script works with that layout itself, as far as these arguments tell."""
    return any(isinstance(value, torch.Tensor) and is_channels_last(value) for value in values)


def full_and_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as float32 if it is half, in the ordinary layout."""
    dtype = torch.float32 if tensor.dtype in HALF else tensor.dtype
    if is_channels_last(tensor):
        return tensor.to(dtype, memory_format=torch.contiguous_format)
    return tensor.to(dtype)


def view(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`Tensor.view`, which wants the ordinary layout: the tensor takes it, and stays itself."""

    def view(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except RuntimeError:
            if not session.active or not is_channels_last(self):
                raise
        _set_data(self, self.detach().contiguous())
        return original(self, *args, **kwargs)

    return view
