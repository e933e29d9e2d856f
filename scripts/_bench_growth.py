"""How autoamp's own work grows with the number of modules: what it adds to a step, a module.

The modules do next to nothing (one addition of one number), or their own time would hide it. What
hand-written code takes for the same step is taken away.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import _bench
import torch
from _bench import Finding, differences, interleave
from _bench_tasks import Fit, Task, Workload
from _bench_training import Training
from _bench_ways import BOTH, DEFAULT, HAND, VARIANTS, Way
from torch import nn
from torch.nn import functional as F

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
        found = {}
        for count in COUNTS:
            added = _added(count, dtype, rounds or 12)
            found[count] = [seconds / count for seconds in added]
            what = f"{count:,} modules: added to a"
            yield Finding(row, f"{what} step", "us", [seconds / 1e3 for seconds in added])
            yield Finding(row, f"{what} module", "ns", found[count])
        first, last = statistics.median(found[100]), max(found)
        values = [value / first for value in found[last]]
        yield Finding(row, f"a module of {last:,} / of 100", "x", values, LINEAR)
    torch.set_num_threads(threads)


def _added(count: int, dtype: torch.dtype, rounds: int) -> list[float]:
    """Nanoseconds a step, round by round."""
    size = {"count": count}
    workload = Workload(chain, rounds, {}, usual=size, small=size)
    trainings = {kind: Training(workload, VARIANTS[kind], dtype) for kind in (HAND, DEFAULT)}
    for training in trainings.values():
        training.first_losses()
        training.steps = max(1, 3_000 // count) if _bench.sample_seconds else 1
    samples = interleave({kind: one.sample for kind, one in trainings.items()}, rounds)
    return differences(samples, DEFAULT, HAND, 1e9)


SECTIONS = {"growth": growth}
