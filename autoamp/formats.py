"""2-D convolutions in channels-last, inside regions: the layout that Tensor Cores and oneDNN want.

The casts of operands are laid out so, which costs nothing besides; the script's own tensors and
parameters, and what leaves a region, have the layout that they would have without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .casting import HALF

if TYPE_CHECKING:
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
    return cast(value, dtype, CHANNELS_LAST)


def cast(tensor: torch.Tensor, dtype: torch.dtype, layout: Any) -> torch.Tensor:
    """A tensor in `dtype` and a memory format, or in the one that it has (``preserve_format``).

    On CPUs in two steps: a copy that casts and transposes at once takes twice as long. The gradient
    goes back in two, too; autograd would transpose it in the other dtype, where it is twice as
    large.
    """
    if not tensor.is_cpu:
        return tensor.to(dtype, memory_format=layout)
    result = tensor.to(dtype)
    if layout is torch.preserve_format or result.is_contiguous(memory_format=layout):
        return result
    if result is not tensor and result.grad_fn is not None:
        result.grad_fn.register_prehook(_contiguous)
    return result.contiguous(memory_format=layout)


def _contiguous(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    return tuple(gradient if gradient is None else gradient.contiguous() for gradient in gradients)


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
