"""What a policy can say: frozen values, no torch, no YAML (`policyfile` reads those).

The words are those of the file; `devices` turns them into torch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

DEVICES = ("cuda", "cpu", "xpu", "mps")
PRECISIONS = ("float16", "bfloat16", "off")
OUTPUTS = ("float32", "keep")
FIXUPS = ("on", "off")
ON_ERROR = ("float32", "raise")
ON_OVERFLOW = ("float32", "keep")
MODES = ("dynamic", "static", "off")
GRADIENTS = ("keep", "half")
MEMORY_FORMATS = ("keep", "channels_last", "auto")
OPTIMIZERS = ("keep", "fused", "auto")
FLOAT32_MATMULS = ("keep", "tf32")
CUDNN_BENCHMARKS = ("keep", "on")
WEIGHT_CACHES = ("on", "off")
STAND_DOWNS = ("auto", "off")
BASES = ("device", "cuda", "none")
"""Whose op lists a policy starts from: torch's for the device, torch's for CUDA, or nobody's."""
LISTS = ("lower", "float32", "widest")
"""What can be said of an op; an op in no list runs in the dtypes it is given."""
OPERANDS = ("any", "parameter")
MODULE_PRECISIONS = ("float32", "lower", "float16", "bfloat16")
SCALES = (2.0**-126, 2.0**126)
"""The loss scales that float32 can hold, and whose inverse it can hold."""


@dataclass(frozen=True, slots=True)
class LossScaleRule:
    """How gradients of FP16 regions are scaled; the constants are those of `torch.amp.GradScaler`.

    `interval` counts taken steps between two growths; `hysteresis` is the number of skipped steps
    in a row that cost one back-off (Paddle's ``decr_every_n_nan_or_inf``); `min` and `max` bound
    the scale. `hold_schedulers`: after a skipped step learning rates stay as they are. In the first
    `repeat_first` steps a backward that overflows is run again at half the scale.
    """

    mode: str = "dynamic"
    init: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    hysteresis: int = 1
    min: float = 0.0
    max: float = float("inf")
    hold_schedulers: bool = False
    repeat_first: int = 0


@dataclass(frozen=True, slots=True)
class FallbackRule:
    """What becomes of modules that half precision breaks.

    `on_error`: one that raises because of it runs in float32, or the error is raised. `inspect`:
    the first calls of a model are looked at for what goes wrong silently. `on_overflow`: after
    `patience` skipped steps in a row modules whose results overflow run in float32, or are kept.
    """

    on_error: str = "raise"
    on_overflow: str = "keep"
    inspect: bool = False
    patience: int = 3


@dataclass(frozen=True, slots=True)
class PerformanceRule:
    """What is done for speed besides lower precision.

    `memory_format` of convolutions in a region; `optimizer`: whether those of torch take their
    fused form where the script asks for none; `float32_matmul` of what stays float32 on CUDA;
    `cudnn_benchmark`; `weight_cache`: whether casts of weights are kept until those change;
    `stand_down`: whether models that gain nothing stay float32.
    """

    memory_format: str = "keep"
    optimizer: str = "keep"
    float32_matmul: str = "keep"
    cudnn_benchmark: str = "keep"
    weight_cache: str = "off"
    stand_down: str = "off"


@dataclass(frozen=True, slots=True)
class OpRule:
    """One op put into a list of `LISTS`, or taken out of one; later rules win over earlier ones.

    `op` is spelled as in the table of `opnames`. `when` holds argument values, all of which a call
    must have. `leaves` is set where the op was removed from that list: what was in it is then in
    none. `origin` is ``file:line:column``, or the variable that said it.
    """

    op: str
    into: str
    origin: str
    when: tuple[tuple[str, Any], ...] = ()
    leaves: str = ""


@dataclass(frozen=True, slots=True)
class ModuleRule:
    """The precision of some modules, told by qualified name (`name`, a glob, or `regex`) or class.

    It holds from step `first` until before step `last`; steps are an optimizer's, skipped ones
    included.
    """

    precision: str
    origin: str
    name: str = ""
    regex: str = ""
    type: str = ""
    first: int = 0
    last: float = float("inf")


@dataclass(frozen=True, slots=True)
class ParameterRule:
    """Parameters, by qualified name, whose ops stay float32: Paddle's ``custom_black_varnames``."""

    origin: str
    name: str = ""
    regex: str = ""


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
    base: Mapping[str, str] = field(
        default_factory=lambda: {"float16": "device", "bfloat16": "device"}
    )
    """By lower precision dtype, the word of `BASES` for the lists that `ops` starts from."""
    ops: tuple[OpRule, ...] = ()
    lower_operands: str = "any"
    """Which calls of the ops in `lower` run in lower precision: any, or those with a parameter
    among the operands; the others run in float32."""
    lower_results: str = "keep"
    """What becomes of the results of those: kept in lower precision, or cast to float32."""
    fixups: str = "off"
    """Whether ops in no list that half precision breaks get the kernels of the table `fixups`."""
    modules: tuple[ModuleRule, ...] = ()
    """The first one that matches a module wins."""
    parameters: tuple[ParameterRule, ...] = ()
    outputs: str = "float32"
    loss_scale: LossScaleRule = LossScaleRule()
    fallback: FallbackRule = FallbackRule()
    gradients: str = "keep"
    """The dtype in which processes exchange gradients: their own, or the lower precision."""
    performance: PerformanceRule = PerformanceRule()

    @property
    def scales(self) -> bool:
        """Whether any device may run in FP16, the only precision whose losses need scaling."""
        asked = (*self.devices.values(), *(rule.precision for rule in self.modules))
        return self.loss_scale.mode != "off" and "float16" in asked

    def follows_torch(self, dtype: str) -> bool:
        """Whether every op of a region in `dtype` runs as torch's own lists for the device say."""
        looks = self.lower_operands != "any" or self.lower_results != "keep" or self.parameters
        return self.base[dtype] == "device" and not self.ops and not looks and self.fixups == "off"

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
