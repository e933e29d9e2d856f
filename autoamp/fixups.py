"""The table of ops that half precision breaks, and what is done about each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .categories import FLOAT32
from .kernels import Kernel


@dataclass(frozen=True, slots=True)
class Fixup:
    """Kernels needed where `dtype` on `device` breaks an op; `breaks` asks the installed torch."""

    device: str
    dtype: str
    breaks: Callable[[], bool]
    kernels: tuple[Kernel, ...]


def _half_lstm_is_missing() -> bool:
    x, weight = torch.zeros(1, 1, 1), torch.zeros(4, 1, requires_grad=True)
    bias = torch.zeros(4, requires_grad=True)
    weights = [weight, weight, bias, bias]
    try:
        with torch.autocast("cpu", torch.float16):
            torch.lstm(x, (x, x), weights, True, 1, 0.0, True, False, False)
    except RuntimeError:
        return True
    return False


_LSTM = "fix-up: oneDNN has no float16 LSTM for this CPU, the whole layer runs in float32"

FIXUPS = (
    Fixup(
        "cpu",
        "float16",
        _half_lstm_is_missing,
        (
            Kernel("lstm.input", "cpu", FLOAT32, _LSTM),
            Kernel("lstm.data", "cpu", FLOAT32, _LSTM),
        ),
    ),
)


def kernels_for(device_type: str, dtype: str) -> list[Kernel]:
    """The kernels that regions in `dtype` on a device need in this torch."""
    return [
        kernel
        for fixup in FIXUPS
        if (fixup.device, fixup.dtype) == (device_type, dtype) and fixup.breaks()
        for kernel in fixup.kernels
    ]
