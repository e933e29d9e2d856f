"""Gradients that no gate stands before: whose they are, and with which scale they stay finite.

The gate skips steps of optimizers. Nobody skips what a script does with the gradient of an input,
with what `torch.autograd.grad` returns, or with parameters that it moves by itself; and where it
leaves out `step()` because of what it sees in ``.grad``, no gate hears of an overflow.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from weakref import WeakSet, ref

import torch

from .policy import LossScaleRule
from .ranks import has_ranks
from .session import Backward, Session

PATIENCE = 4
"""How many overflows in a row a script may throw away before the loss scale falls for them."""
ROUND = 16
"""After so many backwards without a step it is asked whether the gradients were set to zero."""


class Owners:
    """Which tensors belong to an optimizer.

    Optimizers that have stepped are known. Others are found through Python's garbage collector, in
    a tenth of a second: it is done after an overflow, where it matters.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._found: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._owners: dict[int, tuple[ref[torch.Tensor], ref[torch.optim.Optimizer]]] = {}
        self._ids: set[int] = set()  # the keys of that: a set is compared three times as fast

    def of(self, tensor: torch.Tensor) -> torch.optim.Optimizer | None:
        """The optimizer that `tensor` is known to belong to."""
        entry = self._owners.get(id(tensor))
        return None if entry is None else entry[1]()

    def strangers(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those that are not known to belong to an optimizer."""
        if self._ids.issuperset(map(id, tensors)):
            return []
        self._learn((*self._session.gates.stepped(), *self._found))
        return [tensor for tensor in tensors if id(tensor) not in self._ids]

    def look(self) -> None:
        """Find every optimizer that there is.

        By what refers to their classes, and not among all objects: those that other threads are
        just making do not stand being referred to.
        """
        classes = [torch.optim.Optimizer]
        for cls in classes:
            classes += [sub for sub in cls.__subclasses__() if sub not in classes]
        kind = torch.optim.Optimizer
        self._found.update([o for o in gc.get_referrers(*classes) if issubclass(type(o), kind)])

    def _learn(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            keys: list[int] = []
            owner = ref(optimizer, self._forgetter(keys))
            for tensor in (t for group in optimizer.param_groups for t in group["params"]):
                key = id(tensor)
                if key not in self._ids:
                    keys.append(key)
                    self._ids.add(key)
                    self._owners[key] = ref(tensor, self._forgetter([key])), owner

    def _forgetter(self, keys: list[int]) -> Callable[[object], None]:
        def forget(_: object) -> None:  # when garbage is collected: in the middle of anything
            for key in keys:
                self._ids.discard(key)
                self._owners.pop(key, None)

        return forget


class Limit:
    """The scale at which runs that nobody can skip begin, once the loss scale was too high for one.

    It is found by falling, and grows again as the loss scale does.
    """

    def __init__(self, rule: LossScaleRule) -> None:
        self._rule = rule
        self._value = float("inf")
        self._good_runs = 0

    def below(self, scale: torch.Tensor) -> torch.Tensor:
        """`scale`, or the limit where that is lower."""
        return scale if self._value == float("inf") else scale.clamp(max=self._value)

    def note(self, fell_to: float | None) -> None:
        """A run was finite: at once, or with the scale that it `fell_to`."""
        if fell_to is not None:
            self._value, self._good_runs = fell_to, 0
            return
        self._good_runs += 1
        if self._good_runs >= self._rule.interval:
            self._value, self._good_runs = self._value * self._rule.growth, 0


def _nothing() -> None:
    return None


@dataclass(slots=True)
class _Streak:
    """Backwards that reached parameters of one optimizer since it stepped.

    `mark` counts those before the last one, which left a gradient in `sample`; what that one ran
    with, and its flag, is `last` until the gradient is gone, and then among the `thrown_away`.
    """

    owner: ref[torch.optim.Optimizer]
    sample: Callable[[], torch.Tensor | None] = _nothing
    mark: int = 0
    last: Backward | None = None
    thrown_away: list[Backward] = field(default_factory=list)
    length: int = 0
    sets_to_zero: bool = False


class _Streaks(threading.local):
    """Of one thread, by the ids of optimizers: others may be writing their gradients just now."""

    def __init__(self) -> None:
        self.by_owner: dict[int, _Streak] = {}


class Unheeded:
    """Overflows that a script sees by itself, and answers by leaving out the step.

    The loss scale falls at the end of a step: without one, it would stay too high for ever.
    """

    def __init__(self, session: Session, owners: Owners) -> None:
        self._session = session
        self._owners = owners
        self._local = _Streaks()

    def note(self, tensors: list[torch.Tensor], mark: int, backward: Backward) -> None:
        """A backward has ended that reached these tensors: the first layers' come last."""
        if has_ranks():  # others may see other gradients, and all have to keep one scale
            return
        for tensor in reversed(tensors):
            owner = self._owners.of(tensor)
            if owner is not None and tensor.grad is not None:
                streaks = self._local.by_owner
                streak = streaks.get(id(owner))
                if streak is None:
                    streak = streaks[id(owner)] = _Streak(ref(owner))
                streak.sample, streak.mark, streak.last = ref(tensor), mark, backward
                streak.length += 1
                return

    def look_back(self) -> None:
        """Before the next one. Waits for the device where several were thrown away, not before."""
        streaks = self._local.by_owner
        for key, streak in list(streaks.items()):
            owner = streak.owner()
            if owner is None or self._has_stepped(owner, streak.mark):
                del streaks[key]
            elif streak.last is not None and _is_gone(streak):
                streak.thrown_away.append(streak.last)
                streak.last = None
                if len(streak.thrown_away) >= PATIENCE:
                    self._judge(streak)

    def _has_stepped(self, owner: torch.optim.Optimizer, mark: int) -> bool:
        """Whether it has, or another that works on its parameter groups (wrappers, SAM)."""
        stepped = self._session.gates.stepped()
        if stepped.get(owner, 0) > mark:
            return True
        groups = {id(group) for group in owner.param_groups}
        return any(
            count > mark and any(id(group) in groups for group in other.param_groups)
            for other, count in stepped.items()
        )

    def _judge(self, streak: _Streak) -> None:
        scales, flags = zip(*streak.thrown_away, strict=True)
        overflowed = torch.stack([flag.cpu() for flag in flags]).bool().tolist()
        if not all(overflowed):
            last_good = len(overflowed) - overflowed[::-1].index(False)
            del streak.thrown_away[:last_good]
            return
        del streak.thrown_away[: 1 - PATIENCE]
        self.lower_to(float(scales[-1]) * self._session.loss_scale.rule.backoff)
        self._session.speech.info(
            "autoamp: gradients that are not finite were thrown away; the loss scale falls"
        )

    def lower_to(self, limit: float) -> None:
        """Let the loss scale fall outside of a step."""
        scale = self._session.loss_scale
        if scale.rule.mode == "dynamic":
            lower = min(scale.state()["scale"], limit)
            scale.put({"scale": lower, "growth_tracker": 0, "skips_in_a_row": 0})


def _is_gone(streak: _Streak) -> bool:
    """Whether the gradient is None, or was set to zero, which only the device knows."""
    tensor = streak.sample()
    if tensor is None or tensor.grad is None:
        return True
    if streak.sets_to_zero or streak.length % ROUND == 0:
        streak.sets_to_zero = not tensor.grad.any()
    return streak.sets_to_zero
