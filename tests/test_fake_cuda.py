"""The plan for CUDA, without a GPU: fake tensors dispatch through the CUDA autocast kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autoamp import devices
from autoamp.policyfile import load

Mixed = Callable[..., Any]


class Ops(TorchDispatchMode):
    """Notes the dtype in which each op really runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.seen.append((str(func).split(".")[1], out.dtype))
        return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_direct_functional_call_on_cuda_runs_in_the_policy_s_dtype(
    mixed: Mixed, dtype: torch.dtype
) -> None:
    mixed(dtype=str(dtype).removeprefix("torch."))
    torch.set_autocast_cache_enabled(False)
    try:
        with FakeTensorMode(), Ops() as ops, torch.no_grad():
            x = torch.empty(4, 8, device="cuda")
            out = F.linear(x, nn.Parameter(torch.empty(2, 8, device="cuda"), False))
            assert (out.dtype, out.device.type) == (torch.float32, "cuda")
    finally:
        torch.set_autocast_cache_enabled(True)
    assert ("mm", dtype) in ops.seen


def test_float32_ops_of_cuda_stay_float32_inside_a_region(mixed: Mixed) -> None:
    """Softmax is float32 on CUDA and half on the CPU: the region takes the device's own list."""
    mixed(dtype="float16")
    seen: list[torch.dtype] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.marker = nn.Parameter(torch.empty(1, device="cuda"))

        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            scores = x @ weight
            weights = scores.softmax(-1)
            seen.extend((scores.dtype, weights.dtype))
            return weights

    torch.set_autocast_cache_enabled(False)
    try:
        with FakeTensorMode(), torch.no_grad():
            model = Model()
            arguments = torch.empty(4, 8, device="cuda"), torch.empty(8, 3, device="cuda")
            assert model(*arguments).dtype is torch.float32
    finally:
        torch.set_autocast_cache_enabled(True)
    assert seen == [torch.float16, torch.float32]


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((6, 1), None), ((7, 0), torch.float16), ((7, 5), torch.float16), ((9, 0), torch.float16)],
)
def test_the_default_policy_on_cuda_asks_for_tensor_cores(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    decision = devices.decide(torch.device("cuda:0"), load("default"), forced=False)
    assert decision.dtype is dtype
