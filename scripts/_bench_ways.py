"""How a script spells mixed precision: not at all, by hand, or by the word of a trainer."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import autoamp

VARIABLE = "AUTO_MIXED_PRECISION_DTYPE"
NOTHING = contextlib.nullcontext()


class Way:
    """Not at all: float32, or what autoamp makes of it."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def begin(self) -> None:
        """What a script does once, before its steps."""

    def setup(self, model: nn.Module, optimizer: Any = None) -> tuple[Any, Any]:
        """What the script trains with in their place."""
        return model.to(self.device), optimizer

    def take(self, data: torch.Tensor) -> torch.Tensor:
        """Data as the model wants it."""
        return data.to(self.device)

    def context(self) -> Any:
        """What the model is called in."""
        return NOTHING

    def backward(self, loss: torch.Tensor) -> None:
        """The gradients."""
        loss.backward()

    def step(self, optimizer: Any) -> None:
        """The update."""
        optimizer.step()


class ByHand(Way):
    """`torch.autocast` around the model; the script makes float32 of what comes out."""

    def context(self) -> Any:
        """Made anew each time, as scripts do."""
        return torch.autocast(self.device, self.dtype)


class Scaled(ByHand):
    """The same with a `GradScaler`, as new as autoamp's loss scale is after the switch."""

    def begin(self) -> None:
        """A new scale."""
        self.scaler = torch.amp.GradScaler(self.device)

    def backward(self, loss: torch.Tensor) -> None:
        """Of the scaled loss."""
        self.scaler.scale(loss).backward()

    def step(self, optimizer: Any) -> None:
        """Skipped where gradients are not finite."""
        self.scaler.step(optimizer)
        self.scaler.update()


def by_hand(device: str, dtype: torch.dtype) -> Way:
    """As torch's documentation has it: only FP16 needs its loss scaled."""
    return (Scaled if dtype is torch.float16 else ByHand)(device, dtype)


class Pure(Way):
    """A model with half parameters, and no casts but of what goes in and comes out: the limit."""

    def setup(self, model: nn.Module, optimizer: Any = None) -> tuple[Any, Any]:
        """The parameters stay the same objects: the optimizer has them."""
        return model.to(self.device, self.dtype), optimizer

    def take(self, data: torch.Tensor) -> torch.Tensor:
        """Numbers in half."""
        return data.to(self.device, self.dtype if data.is_floating_point() else None)


class Accelerate(Way):
    """`Accelerator(mixed_precision="bf16")`."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        from accelerate import Accelerator

        super().__init__(device, dtype)
        self.accelerator = Accelerator(cpu=device == "cpu", mixed_precision="bf16")

    def setup(self, model: nn.Module, optimizer: Any = None) -> tuple[Any, Any]:
        """Its `prepare`."""
        if optimizer is None:
            return self.accelerator.prepare(model), None
        return self.accelerator.prepare(model, optimizer)

    def backward(self, loss: torch.Tensor) -> None:
        """Its own."""
        self.accelerator.backward(loss)


class Lightning(Way):
    """`Fabric(precision="bf16-mixed")`."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it imports is deprecated here and there
            from lightning.fabric import Fabric

            for name in ("lightning.fabric", "lightning.pytorch"):
                logging.getLogger(name).setLevel(logging.ERROR)
            super().__init__(device, dtype)
            self.fabric = Fabric(accelerator=device, devices=1, precision="bf16-mixed")

    def setup(self, model: nn.Module, optimizer: Any = None) -> tuple[Any, Any]:
        """Its `setup`."""
        if optimizer is None:
            return self.fabric.setup(model), None
        return self.fabric.setup(model, optimizer)

    def backward(self, loss: torch.Tensor) -> None:
        """Its own."""
        self.fabric.backward(loss)


@dataclass(frozen=True, slots=True)
class Variant:
    """A way, and the policy that autoamp is on with meanwhile, if it is.

    `is_forced`: a dtype is named, so half precision is used also where the device or the model
    gains nothing from it; autoamp would decline there. `package`: what it needs, if anything.
    """

    way: Callable[[str, torch.dtype], Way]
    policy: str | None = None
    is_forced: bool = True
    package: str = ""
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)


BOTH = (torch.bfloat16, torch.float16)
HAND, AGAIN = "hand-written", "hand-written again"
TORCH, DEFAULT, SAFE, FAST = (
    f"autoamp {policy}" for policy in ("torch", "default", "safe", "fast")
)
FORCED, FLOAT32, PURE = "autoamp default, forced", "float32", "pure half"
VARIANTS = {
    HAND: Variant(by_hand, dtypes=BOTH),
    TORCH: Variant(Way, "torch", dtypes=BOTH),
    FORCED: Variant(Way, "default", dtypes=BOTH),
    AGAIN: Variant(by_hand, dtypes=BOTH),
    SAFE: Variant(Way, "safe"),
    FAST: Variant(Way, "fast"),
    DEFAULT: Variant(Way, "default", is_forced=False),
    FLOAT32: Variant(Way),
    PURE: Variant(Pure),
    "accelerate": Variant(Accelerate, package="accelerate"),
    "Lightning Fabric": Variant(Lightning, package="lightning"),
}


def variants(dtype: torch.dtype) -> dict[str, Variant]:
    """Those for this dtype whose packages are installed."""
    return {
        name: variant
        for name, variant in VARIANTS.items()
        if dtype in variant.dtypes
        and (not variant.package or importlib.util.find_spec(variant.package))
    }


@contextlib.contextmanager
def switched(policy: str, dtype: torch.dtype | None, stays: bool = True) -> Iterator[None]:
    """autoamp on with this policy, or just switched on and off again: in both cases torch's classes
    have changed. `dtype` forces it; without, autoamp decides.
    """
    os.environ.pop(VARIABLE, None)
    if dtype is not None:
        os.environ[VARIABLE] = str(dtype).removeprefix("torch.")
    autoamp.enable(policy)
    if not stays:
        autoamp.disable()
    try:
        yield
    finally:
        if stays:
            autoamp.disable()
