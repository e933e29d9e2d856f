"""How autoamp's own work grows with the number of modules: what it adds to a step, a module.

The modules do next to nothing (one addition of one number), or their own time would hide it. What
hand-written code takes for the same step is taken away. On a busy machine that is noise; how many
lines of autoamp's Python a step runs is the same on every machine, so that is counted, too.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import _bench
import torch
from _bench import Finding, differences, interleave
from _bench_tasks import Fit, Task, Workload
from _bench_training import Training
from _bench_ways import BOTH, FORCED, HAND, VARIANTS, Way
from torch import nn
from torch.nn import functional as F

import autoamp

PACKAGE = str(Path(autoamp.__file__).parent)
COUNTS = (10, 100, 1_000, 10_000)
LINEAR = 1.5
"""The most that a module among 10,000 should cost, in parts of what one among 100 does."""


class Add(nn.Module):
    """x plus its only parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.parameter


def chain(way: Way, count: int) -> Task:
    """One after the other."""
    model = nn.Sequential(*(Add() for _ in range(count)))
    return Fit(way, model, F.mse_loss, torch.ones(1), torch.zeros(1))


def growth(rounds: int | None) -> Iterator[Finding]:
    """Of the policy `default`, in both dtypes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for dtype in BOTH:
        row = "growth {}".format(str(dtype).removeprefix("torch."))
        found, lines = {}, {}
        for count in COUNTS:
            added = _added(count, dtype, rounds or 12)
            found[count] = [seconds / count for seconds in added]
            what = f"{count:,} modules: added to a"
            yield Finding(row, f"{what} step", "us", [seconds / 1e3 for seconds in added])
            yield Finding(row, f"{what} module", "ns", found[count])
            lines[count] = _lines(count, dtype) / count
            yield Finding(row, f"{count:,} modules: lines run a module", "", [lines[count]])
        first, last = statistics.median(found[100]), max(found)
        values = [value / first for value in found[last]]
        yield Finding(row, f"a module of {last:,} / of 100: time", "x", values, LINEAR)
        values = [lines[last] / lines[100]]
        yield Finding(row, f"a module of {last:,} / of 100: lines", "x", values, LINEAR)
    torch.set_num_threads(threads)


def _added(count: int, dtype: torch.dtype, rounds: int) -> list[float]:
    """Nanoseconds a step, round by round."""
    trainings = {kind: _training(count, kind, dtype) for kind in (HAND, FORCED)}
    for training in trainings.values():
        training.first_losses()
        training.steps = max(1, 3_000 // count) if _bench.sample_seconds else 1
    samples = interleave({kind: one.sample for kind, one in trainings.items()}, rounds)
    return differences(samples, FORCED, HAND, 1e9)


def _lines(count: int, dtype: torch.dtype) -> int:
    """What autoamp runs in a step after the first two."""
    training, seen = _training(count, FORCED, dtype), 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal seen
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        seen += event == "line"
        return trace

    with training.switch():
        for step in range(3):
            sys.settrace(trace if step == 2 else None)
            try:
                training.task.step()
            finally:
                sys.settrace(None)
    return seen


def _training(count: int, kind: str, dtype: torch.dtype) -> Training:
    size = {"count": count}
    return Training(Workload(chain, 0, {}, usual=size, small=size), VARIANTS[kind], dtype)


SECTIONS = {"growth": growth}
