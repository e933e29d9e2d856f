"""The rows of `scripts/bench`: autoamp beside hand-written `torch.amp`, trainers, float32, and a
model that is all half.

What could favour one of them, and what is done about it:

* Switching autoamp on and off changes classes of torch, after which Python looks attributes up anew
  and specialises its bytecode again. Every sample begins with such a switch, autoamp's or not, and
  with warm-up steps after it.
* The garbage collector runs when it likes: before a sample, never in it.
* Nothing of autoamp may stay on for the others, and all must do the same work: before anything is
  timed, the losses of the first steps are compared. Those of autoamp's policy `torch` are those of
  hand-written code, bit for bit; float32's are others, and all are near.
* What is left is the noise of comparing a thing with itself. "hand-written again" is a second
  hand-written training, with a model of its own: its ratio to the first is the noise floor.
"""

from __future__ import annotations

import functools
import gc
import math
import statistics
from dataclasses import dataclass

import _bench
import torch
from _bench import Finding, Samples, interleave, ratios
from _bench_tasks import FASTER_OF_BOTH, WORKLOADS, Workload
from _bench_ways import (
    AGAIN,
    DEFAULT,
    FAST,
    FLOAT32,
    FORCED,
    HAND,
    PURE,
    SAFE,
    TORCH,
    Variant,
    switched,
    variants,
)

from autoamp.devices import cpu_has_bfloat16_arithmetic


class Training:
    """One of the variants at one of the tasks."""

    def __init__(self, workload: Workload, variant: Variant, dtype: torch.dtype) -> None:
        self.way = variant.way(_bench.device, dtype)
        self.task = workload.make(self.way)
        self.switch = functools.partial(
            switched,
            variant.policy or "torch",
            dtype if variant.is_forced else None,
            stays=variant.policy is not None,
        )
        self.times_part = bool(workload.part)
        self.steps = 1

    def first_losses(self, steps: int = 2) -> list[float]:
        """What the task computes, with the dropout that everyone gets; also warms up."""
        with self.switch():
            torch.manual_seed(1)
            self.way.begin()
            return [self.task.step().item() for _ in range(steps)]

    def sample(self) -> float:
        """Seconds a step (or a call, where the task counts those), or of the part that is timed."""
        with self.switch():
            self.way.begin()
            gc.collect()
            gc.disable()
            try:
                self._run()
                worked, part = self.task.work, getattr(self.task, "seconds", 0.0)
                watch = _bench.stopwatch()
                self._run()
                seconds = watch()
            finally:
                gc.enable()
        if self.times_part:
            seconds = self.task.seconds - part
        return seconds / (self.task.work - worked)

    def _run(self) -> None:
        for _ in range(self.steps):
            self.task.step()


@dataclass(frozen=True, slots=True)
class Comparison:
    """The ratio of two variants' times. What it should be may depend on the arithmetic of half
    precision: where there is none, it has no target.
    """

    what: str
    above: str
    below: str
    needs_arithmetic: bool = False


COMPARISONS = (
    Comparison("hand-written / itself: the noise", AGAIN, HAND),
    Comparison("autoamp torch / hand-written", TORCH, HAND),
    Comparison("autoamp default / hand-written", DEFAULT, HAND),
    Comparison("autoamp default, forced / hand-written", FORCED, HAND),
    Comparison("autoamp safe / hand-written", SAFE, HAND),
    Comparison("autoamp fast / hand-written", FAST, HAND, needs_arithmetic=True),
    Comparison("accelerate / hand-written", "accelerate", HAND),
    Comparison("Lightning Fabric / hand-written", "Lightning Fabric", HAND),
    Comparison("pure half / hand-written", PURE, HAND),
    Comparison("autoamp default / float32", DEFAULT, FLOAT32),
    Comparison(f"autoamp default / {FASTER_OF_BOTH}", DEFAULT, FASTER_OF_BOTH),
    Comparison("speed-up of hand-written over float32", FLOAT32, HAND),
    Comparison("speed-up of autoamp default over float32", FLOAT32, DEFAULT),
    Comparison("speed-up of a pure half model over float32", FLOAT32, PURE),
)


def compare(name: str, rounds: int | None) -> list[Finding]:
    """Have one of the `WORKLOADS` done by every variant; only FP16 pays for loss scaling, so the
    launch-bound one is trained in that too.
    """
    workload, findings, threads = WORKLOADS[name], [], torch.get_num_threads()
    for dtype in workload.dtypes:
        word = str(dtype).removeprefix("torch.")
        torch.set_num_threads(1 if workload.is_launch_bound else threads)
        samples = _train(f"{name} {word}", workload, dtype, rounds or workload.rounds)
        if {FLOAT32, FORCED} <= samples.keys():
            faster = min((FLOAT32, FORCED), key=lambda way: statistics.median(samples[way]))
            samples[FASTER_OF_BOTH] = samples[faster]
        torch.set_num_threads(threads)
        findings += [
            Finding(
                f"{name} {word}",
                f"{workload.part}{comparison.what}",
                "x",
                ratios(samples, comparison.above, comparison.below),
                _target(workload, comparison),
            )
            for comparison in COMPARISONS
            if {comparison.above, comparison.below} <= samples.keys()
        ]
    return findings


def has_arithmetic() -> bool:
    """Whether the device multiplies half numbers in hardware."""
    return _bench.device == "cuda" or cpu_has_bfloat16_arithmetic()


def _target(workload: Workload, comparison: Comparison) -> float | None:
    if comparison.needs_arithmetic and not has_arithmetic():
        return None
    return workload.targets.get((comparison.above, comparison.below))


def _train(row: str, workload: Workload, dtype: torch.dtype, rounds: int) -> Samples:
    trainings, losses = {}, {}
    for name, variant in variants(dtype).items():
        try:
            training = Training(workload, variant, dtype)
            losses[name] = training.first_losses()
            trainings[name] = training
        except RuntimeError as error:  # oneDNN has no BF16 LSTM for some CPUs, say
            _bench.leave_out(row, name, error)
    check(losses, workload.tolerance)
    set_steps(trainings)
    return interleave({name: training.sample for name, training in trainings.items()}, rounds)


def set_steps(trainings: dict[str, Training]) -> None:
    """As many for all as hand-written code (where it runs) makes in `sample_seconds`."""
    first, steps = trainings.get(HAND) or trainings[FLOAT32], 1
    if _bench.sample_seconds:
        worked = first.task.work
        seconds = min(first.sample() for _ in range(2))
        seconds *= (first.task.work - worked) / 4  # each sample makes two steps
        steps = math.ceil(_bench.sample_seconds / seconds)
    for training in trainings.values():
        training.steps = steps


def check(losses: dict[str, list[float]], tolerance: float) -> None:
    """All compute what they should, or their times mean nothing."""
    expected = losses.get(HAND) or losses[FLOAT32]
    for name, found in losses.items():
        if HAND in losses and name in (TORCH, AGAIN) and found != expected:
            raise SystemExit(f"{name} computes {found}, and {HAND} {expected}")
        if not all(
            math.isclose(a, b, rel_tol=tolerance) for a, b in zip(found, expected, strict=True)
        ):
            raise SystemExit(f"{name} computes {found}, far from {HAND}: {expected}")
    if HAND in losses and losses.get(FLOAT32) == expected:
        raise SystemExit(f"{FLOAT32} and {HAND} both compute {expected}")


SECTIONS = {name: functools.partial(compare, name) for name in WORKLOADS}
