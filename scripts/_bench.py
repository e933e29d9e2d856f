"""How `scripts/bench` measures: in rounds, where every subject has its turn and meets the others.

A busy machine is slow for seconds at a time. What ran in the same round met the same machine, so
only samples of one round are compared, and only their median and quartiles over many are said.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Samples = dict[str, list[float]]
clock: Callable[[], float] = time.perf_counter
"""Seconds; `scripts/bench --busy` sets it to `cpu_seconds`."""
device = "cpu"
"""Where the rows' models are; `--device`."""
is_small = False
"""Whether the rows are made small; `--small`."""
sample_seconds = 0.1
"""How long a sample lasts at least; `--small` halves it, `--quick` sets it to 0: one step."""
left_out: list[dict[str, str]] = []
"""What this machine cannot run, and why: `row`, `what`, `reason`."""


def cpu_seconds() -> float:
    """What this process and the children that it has waited for have computed so far."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def leave_out(row: str, what: str, reason: object) -> None:
    """Say that something cannot be measured here."""
    left_out.append({"row": row, "what": what, "reason": str(reason).partition("\n")[0]})
    print(*left_out[-1].values(), sep=": ", flush=True)


def stopwatch() -> Callable[[], float]:
    """Starts, and gives what tells the seconds since: on CUDA, by events, those of the device."""
    if device == "cpu":
        started = clock()
        return lambda: clock() - started
    import torch

    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()

    def seconds() -> float:
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    return seconds


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table: what was measured, one value a round, and the `target` that the median
    should not exceed, if it has one.
    """

    row: str
    what: str
    unit: str
    values: list[float] = field(repr=False)
    target: float | None = None

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The lower quartile, the median and the upper quartile."""
        if len(self.values) < 2:
            return (self.values[0],) * 3
        low, median, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, median, high

    @property
    def verdict(self) -> str:
        """`held` or `missed`, by the median; a `?` where the quartiles are on both sides."""
        if self.target is None:
            return ""
        low, median, high = self.quartiles
        word = "held" if median <= self.target else "missed"
        return f"{word}?" if low <= self.target < high else word

    def as_json(self) -> dict[str, object]:
        """The keys that the docstring of `scripts/bench` lists."""
        low, median, high = self.quartiles
        return {
            "row": self.row,
            "what": self.what,
            "unit": self.unit,
            "median": median,
            "lower_quartile": low,
            "upper_quartile": high,
            "target": self.target,
            "values": self.values,
        }


def interleave(subjects: Mapping[str, Callable[[], float]], rounds: int) -> Samples:
    """Ask every subject for one sample a round, so that none owns a place in it.

    The order moves on by one each round and turns around after each full turn: over two turns every
    subject has every place twice, and both of its neighbours go before it equally often.
    """
    names = list(subjects)
    samples: Samples = {name: [] for name in names}
    for number in range(rounds):
        turn, first = divmod(number, len(names))
        order = names[first:] + names[:first]
        for name in reversed(order) if turn % 2 else order:
            samples[name].append(subjects[name]())
    return samples


def ratios(samples: Samples, above: str, below: str) -> list[float]:
    """`above` / `below`, round by round."""
    return [a / b for a, b in zip(samples[above], samples[below], strict=True)]


def differences(samples: Samples, more: str, less: str, scale: float) -> list[float]:
    """(`more` - `less`) * `scale`, round by round."""
    return [(a - b) * scale for a, b in zip(samples[more], samples[less], strict=True)]
