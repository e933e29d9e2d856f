"""`apex.normalization` by torch: the same arguments and parameter names."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

__all__ = [
    "FusedLayerNorm",
    "FusedRMSNorm",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
]
Shape = int | Sequence[int]


def fused_layer_norm(
    input: torch.Tensor,  # noqa: A002
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Layer norm without parameters."""
    return F.layer_norm(input, _sizes(normalized_shape), eps=eps)


def fused_layer_norm_affine(
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor,
    bias: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Layer norm with parameters."""
    return F.layer_norm(input, _sizes(normalized_shape), weight, bias, eps)


def fused_rms_norm(
    input: torch.Tensor,  # noqa: A002
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """RMS norm without parameters."""
    return F.rms_norm(input, _sizes(normalized_shape), eps=eps)


def fused_rms_norm_affine(
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """RMS norm with a parameter."""
    return F.rms_norm(input, _sizes(normalized_shape), weight, eps)


def manual_rms_norm(
    input: torch.Tensor,  # noqa: A002
    normalized_shape: Shape,
    weight: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """The same under the name that Apex has for it without kernels."""
    return fused_rms_norm_affine(input, weight, normalized_shape, eps)


def _sizes(shape: Shape) -> list[int]:
    return [int(shape)] if isinstance(shape, numbers.Integral) else list(shape)  # type: ignore[arg-type]


class FusedLayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm`."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient


class FusedRMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient


class _OfItsParameters(torch.nn.Module):
    """A norm whose result has the dtype of its parameters; it has to have some."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        **kwargs: Any,
    ) -> None:
        _refuse_without_parameters(self, kwargs)
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        normalized: torch.Tensor = super().forward(input.to(self.get_parameter("weight").dtype))
        return normalized


class MixedFusedLayerNorm(_OfItsParameters, FusedLayerNorm):
    """Layer norm whose result has the dtype of its parameters."""


class MixedFusedRMSNorm(_OfItsParameters, FusedRMSNorm):
    """RMS norm whose result has the dtype of its parameter."""


def _refuse_without_parameters(norm: object, kwargs: dict[str, Any]) -> None:
    if not kwargs.pop("elementwise_affine", True):
        raise RuntimeError(f"{type(norm).__name__} does not support `elementwise_affine = False`")
    if kwargs:
        raise TypeError(f"{type(norm).__name__}: unknown arguments {', '.join(kwargs)}")
