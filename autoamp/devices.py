"""Policy words to torch dtypes, and the decision whether a device gains from lower precision.

Nothing here touches a device before a model runs on it: asking CUDA what it can do starts it.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from .policy import Policy

TORCH_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
FORCE = "force it with AUTO_MIXED_PRECISION_DTYPE={}"


@dataclass(frozen=True, slots=True)
class Decision:
    """What regions on one device type run in: `dtype`, or None and the reason why not."""

    dtype: torch.dtype | None
    why: str

    @property
    def word(self) -> str:
        """The dtype as the policy spells it, ``"off"`` where there is none."""
        return "off" if self.dtype is None else str(self.dtype).removeprefix("torch.")


def decide(device: torch.device, policy: Policy, forced: bool) -> Decision:
    """The policy's precision for `device`, unless it gains nothing there and nobody forced it.

    `forced`: ``AUTO_MIXED_PRECISION_DTYPE`` named the dtype, so the device is not asked whether it
    is fast.
    """
    if device.type not in policy.devices:
        return Decision(None, f"autoamp knows no device called {device.type}")
    word = policy.devices[device.type]
    if word == "off":
        return Decision(None, f'policy "{policy.name}" says off')
    dtype = TORCH_DTYPES[word]
    if forced:
        return Decision(dtype, "AUTO_MIXED_PRECISION_DTYPE")
    obstacle = _OBSTACLES[device.type](device, dtype)
    if obstacle:
        return Decision(None, f"{obstacle}; {FORCE.format(word)}")
    return Decision(dtype, f'policy "{policy.name}"')


def _cpu(device: torch.device, dtype: torch.dtype) -> str:
    if dtype is torch.float16:
        return "float16 is slower than float32 on CPUs"
    if not cpu_has_bfloat16_arithmetic():
        return "this CPU has no bfloat16 arithmetic (AVX512-BF16, AMX or ARM BF16)"
    return ""


def _cuda(device: torch.device, dtype: torch.dtype) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    if dtype is torch.float16 and major < 7:
        return f"no Tensor Cores at compute capability {major}.{minor} (7.0 or later has)"
    if dtype is torch.bfloat16 and major < 8:
        return f"no bfloat16 Tensor Cores at compute capability {major}.{minor} (8.0 or later has)"
    return ""


def _any(device: torch.device, dtype: torch.dtype) -> str:
    if not torch.amp.is_autocast_available(device.type):
        return f"this torch has no autocast for {device.type}"
    return ""


_OBSTACLES = {"cpu": _cpu, "cuda": _cuda, "xpu": _any, "mps": _any}


def cpu_has_bfloat16_arithmetic() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; else BF16 is slower (pytorch#86270)."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        try:
            return "bf16" in Path("/proc/cpuinfo").read_text().split()
        except OSError:
            return False
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, bool)() for probe in probes)
