"""Optimizers of torch in their fused form, for which the script has asked for no form.

For the time of a step alone: what stands in their groups is what the script wrote. A fused Adam
counts its steps on the device, a plain one on the host; checkpoints hold what a plain one would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakSet

import torch

DEVICES: Mapping[str, tuple[str, ...]] = {"keep": (), "fused": ("cuda", "cpu"), "auto": ("cuda",)}
"""By the policy's word, where optimizers are fused."""
_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
_DECIDES = ("fused", "foreach", "capturable", "differentiable")
"""Options of a group with which the script chooses a form; no word is None or False."""
_SCALES = "_step_supports_amp_scaling"
_NOTES = (_SCALES, "_need_device_dtype_check_for_fused")
"""What torch notes on an optimizer that is fused."""
_PLAIN = (torch.nn.Parameter, torch.Tensor)


class Fusing:
    """Which steps of one session are fused."""

    def __init__(self, word: str) -> None:
        self.is_on = word != "keep"
        self._devices = DEVICES[word]
        self._classes: dict[type, bool] = {}
        self._counts_on_device: WeakSet[torch.optim.Optimizer] = WeakSet()

    @contextlib.contextmanager
    def step(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Around a step of `optimizer`."""
        groups = optimizer.param_groups if self._has_fused_form(type(optimizer)) else []
        if not groups or not all(map(self._takes, groups)):
            yield
            return
        if groups[0]["params"][0].is_cuda:
            self._counts_on_device.add(optimizer)
            _count_on(optimizer, device=True)
        own = {note: vars(optimizer)[note] for note in _NOTES if note in vars(optimizer)}
        before = [group["fused"] for group in groups]
        try:
            vars(optimizer)[_SCALES] = True
            for group in groups:
                group["fused"] = True
            yield
        finally:
            for group, was in zip(groups, before, strict=False):
                group["fused"] = was
            for note in _NOTES:
                vars(optimizer).pop(note, None)
            vars(optimizer).update(own)

    def plain_state(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        """Have a ``state_dict`` hold the counts of steps as a plain optimizer counts them."""
        if optimizer in self._counts_on_device:
            saved["state"] = {key: _on_host(state) for key, state in saved["state"].items()}

    def end(self) -> None:
        """The optimizers count on the host again."""
        for optimizer in self._counts_on_device:
            _count_on(optimizer, device=False)

    def _has_fused_form(self, cls: type) -> bool:
        if cls not in self._classes:
            owner = next(base for base in cls.__mro__ if "step" in vars(base))
            self._classes[cls] = owner in _FUSED
        return self._classes[cls]

    def _takes(self, group: Mapping[str, Any]) -> bool:
        if any(group.get(option) for option in _DECIDES) or group.get("foreach") is False:
            return False
        if group.get("fused", False) is not None or isinstance(group["lr"], torch.Tensor):
            return False
        return bool(group["params"]) and all(map(self._can_be_fused, group["params"]))

    def _can_be_fused(self, parameter: torch.Tensor) -> bool:
        gradient = parameter.grad
        return (
            type(parameter) in _PLAIN
            and parameter.is_floating_point()
            and parameter.device.type in self._devices
            and (gradient is None or gradient.layout is torch.strided)
        )


def _count_on(optimizer: torch.optim.Optimizer, device: bool) -> None:
    for parameter, state in optimizer.state.items():
        step = state.get("step")
        if isinstance(step, torch.Tensor) and step.is_cpu is device:
            state["step"] = step.to(parameter.device) if device else step.cpu()


def _on_host(state: Any) -> Any:
    step = state.get("step") if isinstance(state, dict) else None
    return {**state, "step": step.cpu()} if isinstance(step, torch.Tensor) else state
