"""The loss scale: what it is, when it moves, and how gradients are unscaled and checked.

Nothing here waits for a device: scale and counters are device tensors, replaced and never edited,
so that a backward keeps the one it ran with; what is reported is read back later, many steps at
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .policy import SCALES, LossScaleRule
from .reporting.curves import KEPT, thinned, thinned_steps

PENDING = 64
"""How many steps wait on the device before their outcome is read back."""


Heard = Callable[[int, float, float, bool], None]
"""(step, scale before, scale after, whether it was skipped)."""


class LossScale:
    """The scale of one process, moved as `torch.amp.GradScaler` moves its own.

    `history` holds ``[step, scale]`` wherever the scale changed, `skips` the skipped steps, both
    thinned when they get long; `taken` and `skipped` count gated steps. What the user should know
    is given to `say`, in one line, once. `heard` is told how each step ended.
    """

    def __init__(self, rule: LossScaleRule) -> None:
        self.say: Callable[[str], None] = _nobody_listens
        self.heard: Heard | None = None
        self._patience, self._impatient = 0, _nobody_waits
        self.follow(rule)

    def follow(self, rule: LossScaleRule) -> None:
        """Start anew, by a rule."""
        self.rule = rule
        self.was_loaded = False
        # Where nothing bounds it, it still stays a number that float32 holds and inverts.
        self._bounds = max(rule.min, SCALES[0]), min(rule.max, SCALES[1])
        self._has_warned = False
        self._skips_in_a_row = 0  # that have been read back
        self._before_skips = rule.init
        self.taken = 0
        self.skipped = 0
        self.history: list[list[float]] = [[0, rule.init]]
        self.skips: list[int] = []
        self._state = {"scale": rule.init, "growth_tracker": 0, "skips_in_a_row": 0}
        self._tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._inverse: tuple[torch.Tensor, torch.Tensor] | None = None
        self._flags: tuple[torch.Tensor, torch.Tensor] | None = None
        self._good_steps = 0  # good steps that the tracker on the device does not know of yet
        self._until_growth: int | None = rule.interval  # None: only the device knows
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def description(self) -> str:
        """As the start line says it."""
        if self.rule.mode == "off":
            return "no loss scale"
        return f"{self.rule.mode} loss scale {self._state['scale']:.10g}"

    def current(self, device: torch.device) -> torch.Tensor:
        """The scale: float32, no dimensions, on the device where it was first asked for."""
        if self._tensors is None:
            state = self._state
            self._tensors = (
                torch.tensor(state["scale"], dtype=torch.float32, device=device),
                torch.tensor(state["growth_tracker"], dtype=torch.int32, device=device),
                torch.tensor(state["skips_in_a_row"], dtype=torch.int32, device=device),
            )
        return self._tensors[0]

    def inverse(self, scale: torch.Tensor) -> torch.Tensor:
        """1 / `scale`, computed once for as long as the scale does not move."""
        if self._inverse is None or self._inverse[0] is not scale:
            self._inverse = scale, inverse_of(scale)
        return self._inverse[1]

    def update(
        self,
        found_inf: torch.Tensor | bool,
        ran_with: torch.Tensor,
        skipped: torch.Tensor | bool | None = None,
        may_move: bool = True,
    ) -> None:
        """The end of a gated step.

        Args:
            found_inf: whether the optimizer's gradients are not finite; where the host does not
                know, a float32 flag on the device, not 0 if so.
            ran_with: the scale of the backward that made them; back-off starts from there, so that
                two losses that overflow at one scale cost one halving.
            skipped: whether the step was not taken; `found_inf` unless given (a closure that
                overflows is evaluated again).
            may_move: not if other ranks have the same scale and know nothing of this step.
        """
        scale = self.current(ran_with.device)
        known = found_inf if isinstance(found_inf, bool) else None
        if may_move and self.rule.mode == "dynamic" and not self._only_counts(known):
            flag = self._flag(found_inf, scale.device)
            self._move(scale, flag, ran_with.to(scale.device, non_blocking=True))
            scale = self.current(scale.device)
            # An overflow starts torch's counter again at zero, and so does a growth that was due.
            starts_again = known is True or (known is False and self._until_growth is not None)
            self._until_growth = self.rule.interval if starts_again else None
        self._pending.append(
            (self._flag(found_inf if skipped is None else skipped, scale.device), scale)
        )
        if known or len(self._pending) >= PENDING:  # known: the host has waited just now
            self.read_back()

    def _only_counts(self, known: bool | None) -> bool:
        """A good step that the host knows of, growth not due: nothing to do on the device yet."""
        if known is not False or self._until_growth is None or self.rule.hysteresis > 1:
            return False
        if self._until_growth <= 1:
            return False
        self._until_growth -= 1
        self._good_steps += 1
        return True

    def _flag(self, value: torch.Tensor | bool, device: torch.device) -> torch.Tensor:
        if not isinstance(value, bool):
            return value.to(device, non_blocking=True)
        if self._flags is None:
            self._flags = torch.zeros((), device=device), torch.ones((), device=device)
        return self._flags[value]

    def _move(self, scale: torch.Tensor, found_inf: torch.Tensor, ran_with: torch.Tensor) -> None:
        assert self._tensors is not None
        rule, (_, tracker, in_a_row) = self.rule, self._tensors
        new, tracker, self._good_steps = scale.clone(), tracker + self._good_steps, 0
        torch._amp_update_scale_(new, tracker, found_inf, rule.growth, rule.backoff, rule.interval)
        if ran_with is not scale:
            new = torch.where(found_inf > 0, torch.minimum(scale, ran_with * rule.backoff), new)
        if rule.hysteresis > 1:
            in_a_row = torch.where(found_inf > 0, in_a_row + 1, 0)
            patient = (found_inf > 0) & (in_a_row < rule.hysteresis)
            new = torch.where(patient, scale, new)
            in_a_row = torch.where(in_a_row >= rule.hysteresis, 0, in_a_row)
        new.clamp_(*self._bounds)
        self._tensors = (new, tracker, in_a_row)

    def read_back(self) -> None:
        """Bring counts and history up to date: one synchronisation for all steps that wait."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        rows = torch.stack([torch.stack(pair) for pair in pending]).tolist()
        for skip, scale in rows:
            before = self.history[-1][1]
            self._note(skip > 0, before, scale)
            if skip > 0 and not self._skips_in_a_row:
                self._before_skips = before
            self._skips_in_a_row = self._skips_in_a_row + 1 if skip > 0 else 0
            if self._patience and skip > 0 and self._skips_in_a_row % self._patience == 0:
                self._impatient()
            if self._skips_in_a_row > 1 or scale < before:
                self._warn(before, scale)

    def _note(self, was_skipped: bool, before: float, scale: float) -> None:
        self.skipped += was_skipped
        self.taken += not was_skipped
        step = self.taken + self.skipped
        if scale != before:
            self.history.append([step, scale])
            if len(self.history) > 4 * KEPT:
                self.history[:] = thinned(self.history)
        if was_skipped:
            self.skips.append(step)
            if len(self.skips) > 4 * KEPT:
                self.skips[:] = thinned_steps(self.skips)
        if self.heard is not None:
            self.heard(step, before, scale, was_skipped)

    def watch_skips(self, patience: int, impatient: Callable[[], None]) -> None:
        """Have `impatient` called whenever so many steps have been skipped in a row."""
        self._patience, self._impatient = patience, impatient

    def is_at_floor(self) -> bool:
        """Whether the scale that was read back last cannot fall any more."""
        return self.rule.mode == "static" or self.history[-1][1] <= self._bounds[0]

    def restore(self) -> None:
        """Go back to the scale of before the last steps that were skipped in a row."""
        self.put({**self.state(), "scale": self._before_skips})
        self._skips_in_a_row = 0

    def _warn(self, before: float, scale: float) -> None:
        """Say what a scale means that keeps overflowing and cannot fall, or has fallen below 1."""
        is_static = self.rule.mode == "static"
        if self._has_warned:
            return
        if scale == before and (is_static or scale <= self._bounds[0]):
            line = (
                f"gradients keep overflowing at the {'static' if is_static else 'least'} loss "
                f"scale, {scale:.10g}: steps are skipped"
            )
        elif scale < min(before, 1.0):
            line = f"the loss scale has fallen below 1, to {scale:.10g}: FP16 loses small gradients"
        else:
            return
        self._has_warned = True
        self.say(
            f"autoamp: {line}; look for inf and nan in the loss and the data, and give the layers "
            "that overflow 'precision: float32' under 'modules' in a policy, or use BF16"
        )

    def forget_counts(self) -> None:
        """Start counting, and the history, at the present scale."""
        self.read_back()
        self.taken = self.skipped = 0
        self.history, self.skips = [[0, self.history[-1][1]]], []

    def state(self) -> dict[str, float]:
        """What a checkpoint needs to go on as if nothing had happened: plain numbers."""
        if self._tensors is not None:
            scale, tracker, in_a_row = (tensor.item() for tensor in self._tensors)
            tracker += self._good_steps
            self._state = dict(zip(self._state, (scale, tracker, in_a_row), strict=True))
        return dict(self._state)

    def load(self, state: Mapping[str, float]) -> None:
        """Take over the `state` of a checkpoint, within what the policy says.

        Entries that are missing, or no numbers that could be used, keep their present value.
        """
        self.was_loaded = True
        self.put(state)

    def put(self, state: Mapping[str, float]) -> None:
        """As `load`, of what this process has found itself."""
        self.read_back()
        rule, known = self.rule, self.state()
        for key, value in known.items():
            asked = state.get(key)
            if isinstance(asked, (int, float)) and 0 <= asked < math.inf:
                known[key] = type(value)(asked)
        if rule.mode == "static":
            known["scale"] = rule.init
        else:
            known["scale"] = min(max(known["scale"], self._bounds[0]), self._bounds[1])
        # torch's counter grows the scale when it equals the interval: past it, never.
        known["growth_tracker"] = min(known["growth_tracker"], rule.interval - 1)
        self._state = known
        self._tensors, self._good_steps = None, 0
        self._until_growth = rule.interval - int(known["growth_tracker"])
        if known["scale"] != self.history[-1][1]:
            self.history.append([self.taken + self.skipped, known["scale"]])


def _nobody_listens(line: str) -> None:
    pass


def _nobody_waits() -> None:
    pass


def inverse_of(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, rounded once from float64 as in `GradScaler.unscale_`; MPS has no float64."""
    if scale.device.type == "mps":
        return scale.reciprocal()
    return scale.double().reciprocal().float()


def multiply_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients in place by a tensor without dimensions, each on its own device."""
    for device, _, group in _grouped(tensors):
        torch._foreach_mul_(group, factor.to(device, non_blocking=True))


def unscale_(tensors: list[torch.Tensor], inverse: torch.Tensor) -> list[torch.Tensor]:
    """Multiply gradients in place and check them.

    Returns:
        Float32 flags, one for each device and dtype, not 0 if any value there is inf or nan.
    """
    flags = []
    for device, dtype, group in _grouped(tensors):
        flag = torch.zeros((), dtype=torch.float32, device=device)
        factor = inverse.to(device, non_blocking=True)
        if dtype is torch.bfloat16:  # the CPU has no such kernel for it
            torch._foreach_mul_(group, factor)
            (flag,) = check(group)
        else:
            torch._amp_foreach_non_finite_check_and_unscale_(group, flag, factor)
        flags.append(flag)
    return flags


def check(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Flags as those of `unscale_`, with nothing multiplied."""
    with torch.no_grad():
        return [
            (~torch.stack([tensor.isfinite().all() for tensor in group]).all()).float()
            for _, _, group in _grouped([tensor.detach() for tensor in tensors])
        ]


def any_of(flags: list[torch.Tensor]) -> torch.Tensor:
    """Several flags (at least one) as one, on the device of the first."""
    first, *others = flags
    for flag in others:
        first = first + flag.to(first.device, non_blocking=True)
    return first


def _grouped(
    tensors: list[torch.Tensor],
) -> Iterator[tuple[torch.device, torch.dtype, list[torch.Tensor]]]:
    """Gradients by device and dtype: of sparse ones the values, complex ones as real numbers."""
    if not tensors:
        return
    dense: Any = [_values(tensor) for tensor in tensors]
    groups: Any = torch._C._group_tensors_by_device_and_dtype([dense], False)
    for (device, dtype), ((group,), _) in groups.items():
        if dtype.is_complex:
            real = [torch.view_as_real(tensor) for tensor in group]
            yield device, real[0].dtype, real
        else:
            yield device, dtype, group


def _values(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is torch.strided:
        return tensor
    return tensor._values() if tensor.is_sparse else tensor.values()
