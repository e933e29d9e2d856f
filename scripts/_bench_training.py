"""Training steps: autoamp beside hand-written `torch.amp`, float32, and a model that is all half.

What could favour one of them, and what is done about it:

* Switching autoamp on and off changes classes of torch, after which Python looks attributes up anew
  and specialises its bytecode again. Every sample begins with such a switch, autoamp's or not, and
  with warm-up steps after it.
* The garbage collector runs when it likes: before a sample, never in it.
* Nothing of autoamp may stay on for the others, and all must do the same work: before anything is
  timed, the losses of the first steps are compared. autoamp's are those of hand-written code, bit
  for bit; float32's are others.
* What is left is the noise of comparing a thing with itself. "hand-written again" is a second
  hand-written training, with a model of its own: its ratio to the first is the noise floor.
"""

from __future__ import annotations

import functools
import gc
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import _bench
import torch
from _bench import Finding, interleave, ratios
from torch import nn
from torch.nn import functional as F

import autoamp
from autoamp.devices import cpu_has_bfloat16_arithmetic

SECONDS = 0.1
"""How long a sample lasts at least."""
HAND, AGAIN = "hand-written", "hand-written again"


def mlp(layers: int = 20) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Tiny layers: Python and torch's dispatcher take all the time."""
    modules = [module for _ in range(layers) for module in (nn.Linear(16, 16), nn.ReLU())]
    return nn.Sequential(*modules[:-1]), torch.randn(8, 16), torch.randn(8, 16)


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al. 2015, figure 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet18() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """ResNet-18: 11.7 million parameters."""
    stages = ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *(Block(*stage) for i, o, s in stages for stage in ((i, o, s), (o, o, 1))),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 1000),
    )
    return model, torch.randn(8, 3, 128, 128), torch.randint(1000, (8,))


def transformer() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Four encoder layers of width 512, with dropout."""
    layer = nn.TransformerEncoderLayer(512, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return encoder, torch.randn(4, 128, 512), torch.randn(4, 128, 512)


class Recurrent(nn.Module):
    """Two LSTM layers of width 512, and a head on the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(512, 512, num_layers=2, batch_first=True)
        self.head = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(x)
        return self.head(states[:, -1])


def lstm() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The same, on 32 sequences of 64."""
    return Recurrent(), torch.randn(32, 64, 512), torch.randn(32, 512)


class Training:
    """A model and its optimizer, and the steps that one of the `VARIANTS` makes with them."""

    def __init__(self, workload: Workload, variant: Variant, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model, self.x, self.target = workload.build()
        if variant.forward is all_half:
            self.model, self.x = self.model.to(dtype), self.x.to(dtype)
        self.loss, self.dtype, self.variant = workload.loss, dtype, variant
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.times_updates = bool(workload.part)
        self.steps = 1
        self.seconds_in_updates = 0.0

    def first_losses(self, steps: int = 2) -> list[float]:
        """What the training computes, with the dropout that everyone gets; also warms up."""
        with self._switched():
            torch.manual_seed(1)
            return [loss.item() for loss in self._losses(steps)]

    def sample(self) -> float:
        """Seconds a step, or of that what comes after the loss."""
        with self._switched():
            gc.collect()
            gc.disable()
            warm_up = self.steps
            losses = self._losses(warm_up + self.steps)
            for _ in range(warm_up):
                next(losses)
            self.seconds_in_updates, started = 0.0, _bench.clock()
            for _ in losses:
                pass
            seconds = _bench.clock() - started
            return (self.seconds_in_updates if self.times_updates else seconds) / self.steps

    def _losses(self, steps: int) -> Iterator[torch.Tensor]:
        forward, update = self.variant.forward(self), self.variant.update(self)
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.loss(forward(self.x), self.target)
            started = _bench.clock()
            update(loss)
            self.seconds_in_updates += _bench.clock() - started
            yield loss

    def _switched(self) -> _Switched:
        return _Switched(self.variant.runs_autoamp)


class _Switched:
    """autoamp on, or just switched on and off again."""

    def __init__(self, stays_on: bool) -> None:
        self.stays_on = stays_on

    def __enter__(self) -> None:
        autoamp.enable("torch")
        if not self.stays_on:
            autoamp.disable()

    def __exit__(self, *exception: object) -> None:
        gc.enable()
        if self.stays_on:
            autoamp.disable()


def as_it_is(training: Training) -> Callable[[torch.Tensor], torch.Tensor]:
    """The model, and nothing said of precision: float32, or what autoamp makes of it."""
    return training.model


def by_hand(training: Training) -> Callable[[torch.Tensor], torch.Tensor]:
    """`torch.autocast` around the model; what comes out is float32 again."""
    model, dtype = training.model, training.dtype

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            output = model(x)
        return output.float()

    return forward


def all_half(training: Training) -> Callable[[torch.Tensor], torch.Tensor]:
    """A model with half parameters; no casts but the last."""
    model = training.model
    return lambda x: model(x).float()


def learn(training: Training) -> Callable[[torch.Tensor], None]:
    """Backward and step."""
    optimizer = training.optimizer

    def update(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()

    return update


def learn_scaled(training: Training) -> Callable[[torch.Tensor], None]:
    """The same with a `GradScaler`, as new as autoamp's loss scale is after the switch."""
    optimizer, scaler = training.optimizer, torch.amp.GradScaler("cpu")

    def update(loss: torch.Tensor) -> None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return update


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train; `forward` and `update` make their functions of a `Training`."""

    forward: Callable[[Training], Callable[[torch.Tensor], torch.Tensor]]
    update: Callable[[Training], Callable[[torch.Tensor], None]] = learn
    runs_autoamp: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """The ratio of two variants' times."""

    what: str
    above: str
    below: str
    has_target: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained, over how many rounds, and what autoamp may cost over hand-written code."""

    build: Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor]]
    loss: Callable[..., torch.Tensor]
    rounds: int
    target: float
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    is_launch_bound: bool = False
    """On one thread: waiting for others would hide what is looked for."""
    part: str = ""
    """What is timed of a step, where it is not all of it but what comes after the loss."""


VARIANTS = {
    torch.bfloat16: {
        HAND: Variant(by_hand),
        "autoamp": Variant(as_it_is, runs_autoamp=True),
        AGAIN: Variant(by_hand),
        "float32": Variant(as_it_is),
        "pure": Variant(all_half),
    },
    torch.float16: {
        HAND: Variant(by_hand, learn_scaled),
        "autoamp": Variant(as_it_is, runs_autoamp=True),
        AGAIN: Variant(by_hand, learn_scaled),
    },
}
COMPARISONS = (
    Comparison("autoamp / hand-written", "autoamp", HAND, has_target=True),
    Comparison("hand-written / itself: the noise", AGAIN, HAND),
    Comparison("speed-up of autoamp over float32", "float32", "autoamp"),
    Comparison("speed-up of hand-written over float32", "float32", HAND),
    Comparison("speed-up of a pure half model over float32", "float32", "pure"),
)
WORKLOADS = {
    "mlp": Workload(mlp, F.mse_loss, 60, 1.05, (torch.bfloat16, torch.float16), True),
    "machinery": Workload(
        functools.partial(mlp, 80),  # 160 parameters
        F.mse_loss,
        60,
        1.03,
        (torch.float16,),
        is_launch_bound=True,
        part="backward, unscale, gate: ",
    ),
    "resnet18": Workload(resnet18, F.cross_entropy, 30, 1.02),
    "transformer": Workload(transformer, F.mse_loss, 30, 1.02),
    "lstm": Workload(lstm, F.mse_loss, 30, 1.02),
}


def compare(name: str, rounds: int | None) -> list[Finding]:
    """Train one of the `WORKLOADS` in every variant; only FP16 pays for loss scaling, so the
    launch-bound one is trained in that too.
    """
    workload, findings, threads = WORKLOADS[name], [], torch.get_num_threads()
    for dtype in workload.dtypes:
        word = str(dtype).removeprefix("torch.")
        torch.set_num_threads(1 if workload.is_launch_bound else threads)
        samples = _train(workload, dtype, rounds or workload.rounds)
        torch.set_num_threads(threads)
        findings += [
            Finding(
                f"{name} {word}",
                f"{workload.part}{comparison.what}",
                "x",
                ratios(samples, comparison.above, comparison.below),
                workload.target if comparison.has_target else None,
            )
            for comparison in COMPARISONS
            if {comparison.above, comparison.below} <= samples.keys()
        ]
    return findings


def _train(workload: Workload, dtype: torch.dtype, rounds: int) -> dict[str, list[float]]:
    # Autoamp declines where the CPU gains nothing from it, and is forced there: its cost over
    # hand-written code is the same.
    os.environ.pop("AUTO_MIXED_PRECISION_DTYPE", None)
    if dtype is torch.float16 or not cpu_has_bfloat16_arithmetic():
        os.environ["AUTO_MIXED_PRECISION_DTYPE"] = str(dtype).removeprefix("torch.")
    trainings = {
        name: Training(workload, variant, dtype) for name, variant in VARIANTS[dtype].items()
    }
    _check({name: training.first_losses() for name, training in trainings.items()})
    steps = math.ceil(SECONDS / min(trainings[HAND].sample() for _ in range(3)))
    for training in trainings.values():
        training.steps = steps
    return interleave({name: t.sample for name, t in trainings.items()}, rounds)


def _check(losses: dict[str, Any]) -> None:
    """All compute what they should, or their times mean nothing."""
    for name in ("autoamp", AGAIN):
        if losses[name] != losses[HAND]:
            raise SystemExit(f"{name} computes {losses[name]}, and {HAND} {losses[HAND]}")
    if losses.get("float32") == losses[HAND]:
        raise SystemExit(f"float32 and {HAND} both compute {losses[HAND]}")


SECTIONS = {name: functools.partial(compare, name) for name in WORKLOADS}
