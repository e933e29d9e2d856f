"""What one active process holds: what was asked for, what was decided, what happened so far.

The only mutable state of the runtime. It is reached by argument, never imported.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from . import performance, plan
from .devices import Decision, decide
from .kernels import Local
from .policy import FallbackRule, Policy
from .scaling import LossScale
from .settings import Settings
from .speech import Speech, place_in_job

if TYPE_CHECKING:
    from .agreement import Agreement
    from .bootstrap import WhenImported
    from .dryrun import DryRun
    from .fallback import Demotion
    from .fusing import Fusing
    from .islands import Islands
    from .kernels import Kernels
    from .modules import Rules
    from .overflow import Spoilt
    from .patching import Ledger
    from .reducing import Reduction
    from .region import Regions
    from .reporting.audit import Audit
    from .reporting.live import Live
    from .reporting.watching import Watch
    from .standing import StandDown
    from .stepping import Gates
    from .weights import WeightCasts

Backward = tuple[torch.Tensor, torch.Tensor]
"""What one backward left to know: the scale it ran with, and a flag that is not 0 where a gradient
was not finite.
"""


class Backwards:
    """The last backwards, counted: each optimizer asks what came since its last step."""

    KEPT = 1024

    def __init__(self) -> None:
        self.count = 0
        self.collectives = 0
        """What `ranks.collectives` was when the last one ended."""
        self._kept: deque[Backward] = deque(maxlen=self.KEPT)

    def append(self, backward: Backward) -> None:
        """Note one more."""
        self._kept.append(backward)
        self.count += 1

    @property
    def last_scale(self) -> torch.Tensor:
        """What the last one ran with; there has to be one."""
        return self._kept[-1][0]

    def since(self, mark: int) -> list[Backward]:
        """Those after the first `mark`. Where some are forgotten, one counts as overflowed."""
        new = self.count - mark
        if new <= len(self._kept):
            return [self._kept[index] for index in range(-new, 0)]
        scale, flag = self._kept[0]
        return [(scale, torch.ones_like(flag)), *self._kept]


@dataclass(slots=True)
class Counts:
    """Regions entered, and steps taken outside loss scaling (`LossScale` counts the others)."""

    regions: int = 0
    steps: int = 0


@dataclass(slots=True)
class Session:
    """One activation, from `activation.activate` to `activation.deactivate`."""

    settings: Settings
    policy: Policy
    door: str
    speech: Speech
    loss_scale: LossScale
    ledger: Ledger
    kernels: Kernels
    local: Local
    weights: WeightCasts
    fusing: Fusing
    active: bool = True
    may_scale: bool = field(init=False)
    """Whether losses are scaled once FP16 is in use: by the policy, and by nobody else."""
    scales: bool = False
    """Whether FP16 is in use and losses are scaled."""
    scaler_owner: str = ""
    """Who scales losses instead of autoamp, empty if nobody does."""
    stands_aside: bool = False
    """Whether precision is left to the script altogether (`stand_aside`)."""
    decisions: dict[str, Decision] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    backwards: Backwards = field(default_factory=Backwards)
    stand_ins: dict[Callable[..., Any], Any] = field(default_factory=dict)
    """Our functions that stand in for builtins of torch, and those builtins (TorchScript asks)."""
    detours: list[bool] = field(default_factory=list)
    """Not empty while some thread is in a call whose modules must not be called straight away."""
    demotions: list[Demotion] = field(default_factory=list)
    function_devices: weakref.WeakKeyDictionary[type, str] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """By custom Function: on which type of device its forward ran as an island (`functions`)."""
    reductions: weakref.WeakKeyDictionary[torch.nn.Module, Reduction] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """By data-parallel model: what stands in the place of its communication hook (`reducing`)."""
    agreement: Agreement = field(init=False)
    agreement_matters: bool = field(init=False)
    """Whether ranks may have something to agree on besides the loss scale, by the policy."""
    spoilt: Spoilt = field(init=False)
    modules: Rules = field(init=False)
    islands: Islands = field(init=False)
    regions: Regions = field(init=False)
    stand_down: StandDown | None = None
    """Decides which models stay float32, where the policy says so and nobody named a dtype."""
    gates: Gates = field(init=False)
    dynamo_watch: WhenImported | None = None
    live: Live | None = None
    watch: Watch | None = None
    """Hears of steps, where a report is asked for."""
    audit: Audit | None = None
    """Looks at one training step, where a report is asked for; None when it has."""
    undo: list[Callable[[], None]] = field(default_factory=list)
    """What puts switches of torch back (`performance`)."""
    dry: DryRun | None = None
    """Has seen what mixed precision would do, where the script runs in float32 all the same."""
    pid: int = field(default_factory=os.getpid)
    started: float = field(default_factory=time.time)
    place: tuple[int, int] = (0, 1)
    """The rank of this process and the number of ranks, since its first region."""
    _retained: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)

    def decide(self, device: torch.device) -> Decision:
        """The decision for `device`'s type, made (and spoken) when the first model runs there."""
        decision = self.decisions.get(device.type)
        if decision is None:
            self.place = place_in_job()
            decision = decide(device, self.policy, self.settings.dtype is not None)
            self.decisions[device.type] = decision
            if decision.dtype is not None:
                covers = self.modules.covers if self.policy.parameters else None
                with torch.no_grad():  # nothing that is probed is seen by hooks on saved tensors
                    kernels = plan.kernels(self.policy, device.type, decision.word, covers)
                self.kernels.register(kernels)
                if device.type == "cuda":
                    self.undo += performance.throw(self.policy.performance)
            self._announce(device.type, decision)
        return decision

    def __post_init__(self) -> None:
        self.may_scale = self.policy.scales and not self.settings.dry
        is_fixed = self.policy.fallback == FallbackRule(patience=self.policy.fallback.patience)
        halves = self.policy.gradients == "half"
        self.agreement_matters = not is_fixed or halves

    def start_scaling(self) -> None:
        """Note that FP16 is in use."""
        self.scales = self.may_scale

    def leave_scaling_to(self, owner: str) -> None:
        """Stand aside for another loss scaler for the rest of the process; said once."""
        if not self.scaler_owner:
            self.scaler_owner, self.scales, self.may_scale = owner, False, False
            self.speech.notice(f"autoamp: loss scaling is left to {owner}")

    def stand_aside(self, why: str) -> None:
        """Open no region and scale no loss for the rest of the process; said once."""
        if not self.stands_aside:
            self.stands_aside, self.scales, self.may_scale = True, False, False
            self.scaler_owner = self.scaler_owner or "the script"
            self.decisions.update(dict.fromkeys(self.policy.devices, Decision(None, why)))
            self.kernels.remove()  # the region that may be open is the script's from here on
            version = sys.modules["autoamp"].__version__
            self.speech.notice(f"autoamp {version} stands aside: {why}")

    def retain(self, tensor: torch.Tensor) -> None:
        """Remember a tensor that keeps its gradient although it is no leaf."""
        key = id(tensor)
        self._retained[key] = weakref.ref(tensor, lambda _: self._retained.pop(key, None))

    def retained(self) -> Iterator[torch.Tensor]:
        """The living tensors among those."""
        return (
            tensor
            for reference in list(self._retained.values())
            if (tensor := reference()) is not None
        )

    def forget_counts(self) -> None:
        """In a forked child: what happened so far happened to the parent."""
        self.counts = Counts()
        self.loss_scale.forget_counts()

    def _announce(self, device_type: str, decision: Decision) -> None:
        version = sys.modules["autoamp"].__version__
        if decision.dtype is None:
            self.speech.notice(f"autoamp {version} stands aside on {device_type}: {decision.why}")
            return
        scale = f", {self.loss_scale.description}" if decision.dtype is torch.float16 else ""
        how = "on" if self.dry is None else "dry run"
        self.speech.notice(
            f"autoamp {version} {how}: {device_type} {decision.word}{scale}, "
            f'policy "{self.policy.name}", through {self.door}'
        )
