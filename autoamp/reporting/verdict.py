"""Do two training curves agree? The rule is simple enough to be named with the answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from .scalars import LOSSES, Curve

TOLERANCE = 0.05
"""How far the smoothed curves may be apart, as a share of the float32 one."""
NOISE = 3.0
"""And how many times the noise of a smoothed curve they may be apart besides."""
MOST_NOISE = 0.25
"""But no more for that than this share of the way that the float32 curve goes."""
FOR_GOOD = 0.8
"""Curves part where they are apart at this share of all later steps."""
SMOOTHED = 10
"""A curve is smoothed over a tenth of its length."""
RULE = (
    f"curves, smoothed over a tenth of their length, may differ by {TOLERANCE:.0%} of the float32 "
    f"value and {NOISE:g} times its noise (at most {MOST_NOISE:.0%} of the way it goes)"
)


@dataclass(frozen=True, slots=True)
class Agreement:
    """What became of one scalar: `agrees`, the largest difference as a share of the tolerated one,
    where they part.

    `first` and `last` are the final values, each the mean of the last tenth.
    """

    name: str
    agrees: bool
    difference: float
    parted: float | None
    first: float
    last: float

    def sentence(self) -> str:
        """One line for a person."""
        ends = f"{self.first:.4g} in float32, {self.last:.4g} in mixed precision"
        if self.agrees:
            used = f"{self.difference:.1%} of what is tolerated"
            return f"{self.name} agrees, the largest difference is {used}; at the end {ends}"
        return f"{self.name} disagrees from step {self.parted:g} on; at the end {ends}"


def judged(curves: Mapping[str, Curve]) -> list[str]:
    """The names that a verdict is about: those of losses."""
    return [name for name in curves if LOSSES.search(name)]


def compare(name: str, full: Sequence[Curve], mixed: Sequence[Curve]) -> Agreement | None:
    """Judge a scalar by its curves in float32 and in mixed precision, one or more runs of each.

    None where they have no two steps in common.
    """
    a, b = _mean(full), _mean(mixed)
    steps = sorted(a.keys() & b.keys())
    if len(steps) < 2:
        return None
    first, second = [a[step] for step in steps], [b[step] for step in steps]
    ends = max(1, len(steps) // SMOOTHED)
    final = fmean(first[-ends:]), fmean(second[-ends:])
    broken = [
        index
        for index, (x, y) in enumerate(zip(first, second, strict=True))
        if math.isfinite(x) and not math.isfinite(y)
    ]
    if broken:
        return Agreement(name, False, math.inf, steps[broken[0]], *final)
    kept = [i for i, (x, y) in enumerate(zip(first, second, strict=True)) if _both_finite(x, y)]
    if len(kept) < 2:
        return None
    window = max(1, len(kept) // SMOOTHED)
    x, y = ([values[i] for i in kept] for values in (first, second))
    smooth_x, smooth_y = _smoothed(x, window), _smoothed(y, window)
    noise = min(
        max(_noise(x), _noise(y)) * NOISE / math.sqrt(window),
        MOST_NOISE * (max(smooth_x) - min(smooth_x)),
    )
    size = fmean(map(abs, x)) / 10  # a curve that goes through zero is not measured there
    tolerated = [TOLERANCE * max(abs(value), size, 1e-12) + noise for value in smooth_x]
    parts = [abs(p - q) / t for p, q, t in zip(smooth_x, smooth_y, tolerated, strict=True)]
    beyond, largest = [part > 1 for part in parts], max(parts)
    at = _parting(beyond)
    parted = None if at is None else steps[kept[at]]
    return Agreement(name, at is None, largest, parted, *final)


def _both_finite(x: float, y: float) -> bool:
    return math.isfinite(x) and math.isfinite(y)


def _parting(beyond: Sequence[bool]) -> int | None:
    """Where curves part that are apart at the end, or for a tenth of the way; else None."""
    length = len(beyond)
    if not beyond[-1] and sum(beyond) <= length // 10:
        return None
    for at in range(length):
        if beyond[at] and sum(beyond[at:]) >= FOR_GOOD * (length - at):
            return at
    return beyond.index(True)


def _smoothed(values: Sequence[float], window: int) -> list[float]:
    return [fmean(values[max(0, index - window + 1) : index + 1]) for index in range(len(values))]


def _noise(values: Sequence[float]) -> float:
    """The standard deviation around the trend, from neighbours; outliers do little."""
    if len(values) < 8:
        return 0.0
    bends = [abs(values[i - 1] - 2 * values[i] + values[i + 1]) for i in range(1, len(values) - 1)]
    return 1.4826 * median(bends) / math.sqrt(6)


def _mean(curves: Sequence[Curve]) -> dict[float, float]:
    found: dict[float, list[float]] = {}
    for curve in curves:
        for step, value in curve:
            found.setdefault(step, []).append(value)
    return {step: fmean(values) for step, values in found.items() if len(values) == len(curves)}
