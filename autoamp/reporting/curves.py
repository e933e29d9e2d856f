"""Curves that stay small however long a run is: thinned, their extremes kept."""

from __future__ import annotations

from collections.abc import Sequence

KEPT = 1000
"""How many points a curve has in a report; while a run lasts, it may have four times as many."""

Point = list[float]
"""``[step, value]``."""


def thinned(points: Sequence[Point], most: int = KEPT) -> list[Point]:
    """At most so many of the points: the first, the last, and of each stretch between the extremes.

    A curve that is short enough is given back as it is.
    """
    if len(points) <= most:
        return list(points)
    inner, stretches = points[1:-1], (most - 2) // 2
    kept = [points[0]]
    for index in range(stretches):
        part = inner[index * len(inner) // stretches : (index + 1) * len(inner) // stretches]
        extremes = min(part, key=_value), max(part, key=_value)
        kept += sorted({id(point): point for point in extremes}.values(), key=_step)
    return [*kept, points[-1]]


def thinned_steps(steps: Sequence[int], most: int = KEPT) -> list[int]:
    """At most so many of these steps, the first and the last among them."""
    if len(steps) <= most:
        return list(steps)
    return [steps[index * (len(steps) - 1) // (most - 1)] for index in range(most)]


def _step(point: Point) -> float:
    return point[0]


def _value(point: Point) -> float:
    return point[1]
