"""What a policy can say: frozen values, no torch, no YAML (`policyfile` reads those).

The words are those of the file; `devices` turns them into torch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

DEVICES = ("cuda", "cpu", "xpu", "mps")
PRECISIONS = ("float16", "bfloat16", "off")
OUTPUTS = ("float32", "keep")
MODES = ("dynamic", "static", "off")
SCALES = (2.0**-126, 2.0**126)
"""The loss scales that float32 can hold, and whose inverse it can hold."""


@dataclass(frozen=True, slots=True)
class LossScaleRule:
    """How gradients of FP16 regions are scaled; the constants are those of `torch.amp.GradScaler`.

    `interval` counts taken steps between two growths; `hysteresis` is the number of skipped steps
    in a row that cost one back-off (Paddle's ``decr_every_n_nan_or_inf``); `min` and `max` bound
    the scale.
    """

    mode: str = "dynamic"
    init: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    hysteresis: int = 1
    min: float = 0.0
    max: float = float("inf")


@dataclass(frozen=True, slots=True)
class Policy:
    """All that one policy decides; `name` is how it was asked for, `source` its file.

    The defaults are what ``policies/torch.yaml`` says: a file without ``extends`` starts from
    there.
    """

    name: str = ""
    source: str = ""
    devices: Mapping[str, str] = field(
        default_factory=lambda: dict(
            zip(DEVICES, ("float16", "bfloat16", "bfloat16", "float16"), strict=True)
        )
    )
    outputs: str = "float32"
    loss_scale: LossScaleRule = LossScaleRule()

    @property
    def scales(self) -> bool:
        """Whether any device may run in FP16, the only precision whose losses need scaling."""
        return self.loss_scale.mode != "off" and "float16" in self.devices.values()

    def forced(self, dtype: str | None, loss_scale: str | float | None) -> Policy:
        """This policy with ``AUTO_MIXED_PRECISION_DTYPE`` and ``_LOSS_SCALE`` put over it."""
        policy = self
        if dtype is not None:
            devices = {k: v if v == "off" else dtype for k, v in policy.devices.items()}
            policy = replace(policy, devices=devices)
        if loss_scale == "dynamic":
            policy = replace(policy, loss_scale=replace(policy.loss_scale, mode="dynamic"))
        elif isinstance(loss_scale, float):
            rule = replace(policy.loss_scale, mode="static", init=loss_scale)
            policy = replace(policy, loss_scale=rule)
        return policy
