"""What `scripts/bench` has done over and over, and the table of its rows."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import _bench
import _bench_models as models
import torch
from _bench_ways import BOTH, DEFAULT, FAST, FLOAT32, FORCED, HAND, Way
from torch import nn
from torch.nn import functional as F

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Task(abc.ABC):
    """One step after the other; each leaves a number that tells what it has computed.

    `work` counts what seconds are told for: steps, or calls of the model where it depends on the
    numbers how many there are.
    """

    work = 0

    @abc.abstractmethod
    def step(self) -> torch.Tensor:
        """The next one."""


class Fit(Task):
    """Forward, loss, backward, step."""

    def __init__(
        self, way: Way, model: nn.Module, loss: Loss, target: torch.Tensor, *data: torch.Tensor
    ) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self.way, self.loss, self.target = way, loss, target.to(way.device)
        self.model, self.optimizer = way.setup(model, optimizer)
        self.data = [way.take(tensor) for tensor in data]

    def step(self) -> torch.Tensor:
        self.work += 1
        self.optimizer.zero_grad()
        with self.way.context():
            output = self.model(*self.data)
        loss = self.loss(output.float(), self.target)
        self.update(loss)
        return loss

    def update(self, loss: torch.Tensor) -> None:
        """What comes after the loss."""
        self.way.backward(loss)
        self.way.step(self.optimizer)


class Adversarial(Task):
    """A discriminator and a generator, each with an optimizer of its own, in turn."""

    def __init__(self, way: Way, noise: int, width: int, batch: int) -> None:
        self.way = way
        adam = functools.partial(torch.optim.Adam, lr=1e-5, betas=(0.5, 0.999))
        made, judge = models.generator(noise, width), models.discriminator(width)
        self.generator, self.generating = way.setup(made, adam(made.parameters()))
        self.discriminator, self.judging = way.setup(judge, adam(judge.parameters()))
        self.noise = way.take(torch.randn(batch, noise, 1, 1))
        self.real = way.take(torch.randn(batch, 3, 32, 32))

    def step(self) -> torch.Tensor:
        self.work += 1
        with self.way.context():
            fake = self.generator(self.noise)
        self.judging.zero_grad()
        loss = self._judge(self.real, 1.0) + self._judge(fake.detach(), 0.0)
        self.way.backward(loss)
        self.way.step(self.judging)
        self.generating.zero_grad()
        fooled = self._judge(fake, 1.0)
        self.way.backward(fooled)
        self.way.step(self.generating)
        return loss + fooled

    def _judge(self, images: torch.Tensor, truth: float) -> torch.Tensor:
        with self.way.context():
            score = self.discriminator(images)
        score = score.float()
        return F.binary_cross_entropy_with_logits(score, torch.full_like(score, truth))


class Decoding(Task):
    """Token by token with what is kept of those before; a sequence is a step, a token its work."""

    def __init__(self, way: Way, model: models.GPT, length: int, mode: Callable[[], Any]) -> None:
        self.way, self.length, self.mode = way, length, mode
        self.model, _ = way.setup(model.eval())

    def step(self) -> torch.Tensor:
        self.work += self.length
        token = torch.zeros(1, 1, dtype=torch.long, device=self.way.device)
        past = models.Past()
        total = torch.zeros((), device=self.way.device)
        with self.mode(), self.way.context():
            for _ in range(self.length):
                logits = self.model(token, past)[:, -1].float()
                token = logits.argmax(-1, keepdim=True)
                total = total + logits.logsumexp(-1)
        return total


class Evaluation(Task):
    """A model in eval mode, without gradients."""

    def __init__(self, way: Way, model: nn.Module, x: torch.Tensor) -> None:
        self.way, self.x = way, way.take(x)
        self.model, _ = way.setup(model.eval())

    def step(self) -> torch.Tensor:
        self.work += 1
        with torch.no_grad(), self.way.context():
            output = self.model(self.x)
        return output.float().square().mean()


class Flow(Task):
    """A neural ODE, its solver (Bogacki and Shampine 1989) stepping by the error that it sees.

    What is learned is small beside a rotation: rounding does not decide how many steps there are.
    """

    def __init__(self, way: Way, width: int, batch: int, end: float) -> None:
        model = models.tanh_net(2, width, 2)
        self.way, self.end = way, end
        self.model, self.optimizer = way.setup(model, torch.optim.SGD(model.parameters(), lr=1e-4))
        self.start = torch.randn(batch, 2).to(way.device)
        self.turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], device=way.device)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self._solve(self.start).square().mean()
        self.way.backward(loss)
        self.way.step(self.optimizer)
        return loss

    def _field(self, y: torch.Tensor) -> torch.Tensor:
        self.work += 1
        with self.way.context():
            learned = self.model(self.way.take(y))
        return y.mm(self.turn) + 0.01 * learned.float()

    def _solve(self, y: torch.Tensor, tolerance: float = 1e-3) -> torch.Tensor:
        t, h, k1 = 0.0, 0.1, self._field(y)
        while t < self.end:
            h = min(h, self.end - t)
            k2 = self._field(y + h / 2 * k1)
            k3 = self._field(y + 3 * h / 4 * k2)
            new = y + h / 9 * (2 * k1 + 3 * k2 + 4 * k3)
            k4 = self._field(new)
            with torch.no_grad():
                error = h / 72 * (-5 * k1 + 6 * k2 + 8 * k3 - 9 * k4).abs().max().item()
            if error <= tolerance:
                t, y, k1 = t + h, new, k4
            h *= min(2.0, max(0.2, 0.9 * (tolerance / max(error, 1e-12)) ** (1 / 3)))
        return y


class Agent(Task):
    """An episode of a pendulum in plain Python, one observation at a time; then REINFORCE."""

    def __init__(self, way: Way, width: int, length: int) -> None:
        model = models.tanh_net(3, width, 1)
        self.way, self.noise = way, torch.randn(length).tolist()
        self.model, self.optimizer = way.setup(model, torch.optim.Adam(model.parameters(), lr=1e-4))

    def step(self) -> torch.Tensor:
        self.work += len(self.noise)
        angle, speed, chances, reward = 0.3, 0.0, [], 0.0
        for noise in self.noise:
            seen = torch.tensor([[math.cos(angle), math.sin(angle), speed]])
            with self.way.context():
                mean = self.model(self.way.take(seen))
            mean = mean.float()
            action = mean.item() + noise
            chances.append((action - mean).square())
            speed += 0.05 * (math.sin(angle) + action) - 0.01 * speed
            angle += 0.05 * speed
            reward += math.cos(angle) / len(self.noise)
        loss = reward * torch.cat(chances).mean()
        self.optimizer.zero_grad()
        self.way.backward(loss)
        self.way.step(self.optimizer)
        return loss


class LineSearch(Task):
    """A curve fitted by L-BFGS, anew each time; an evaluation is its work."""

    def __init__(self, way: Way, width: int, points: int) -> None:
        model = models.tanh_net(1, width, 1)
        self.raw = torch.optim.LBFGS(model.parameters(), max_iter=8, line_search_fn="strong_wolfe")
        self.way = way
        self.model, self.optimizer = way.setup(model, self.raw)
        x = torch.linspace(-2, 2, points)[:, None]
        self.x, self.y = way.take(x), x.sin().to(way.device)
        self.start = [parameter.detach().clone() for parameter in model.parameters()]

    def step(self) -> torch.Tensor:
        self.raw.state.clear()
        with torch.no_grad():
            for parameter, start in zip(self.model.parameters(), self.start, strict=True):
                parameter.copy_(start)
        self.optimizer.step(self._evaluate)
        return self.last

    def _evaluate(self) -> torch.Tensor:
        self.work += 1
        self.optimizer.zero_grad()
        with self.way.context():
            output = self.model(self.x)
        loss = F.mse_loss(output.float(), self.y)
        self.way.backward(loss)
        self.last = loss.detach()
        return loss


def mlp(way: Way, layers: int = 20) -> Task:
    """A batch of 8, of width 16."""
    return Fit(way, models.mlp(layers), F.mse_loss, torch.randn(8, 16), torch.randn(8, 16))


class Updates(Fit):
    """`seconds` are those of what comes after the loss."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seconds = 0.0

    def update(self, loss: torch.Tensor) -> None:
        seconds = _bench.stopwatch()
        super().update(loss)
        self.seconds += seconds()


def machinery(way: Way) -> Task:
    """80 layers of these: 160 parameters."""
    return Updates(way, models.mlp(80), F.mse_loss, torch.randn(8, 16), torch.randn(8, 16))


def resnet18(way: Way, width: int, batch: int, side: int) -> Task:
    """Images to 1,000 classes."""
    x, classes = torch.randn(batch, 3, side, side), torch.randint(1000, (batch,))
    return Fit(way, models.resnet18(width), F.cross_entropy, classes, x)


def unet(way: Way, width: int, batch: int, side: int) -> Task:
    """Images to two classes a pixel."""
    x, classes = torch.randn(batch, 3, side, side), torch.randint(2, (batch, side, side))
    return Fit(way, models.UNet(width), F.cross_entropy, classes, x)


def transformer(way: Way, width: int, batch: int, length: int) -> Task:
    """Four layers, with dropout."""
    x, target = torch.randn(2, batch, length, width).unbind()
    return Fit(way, models.encoder(width), F.mse_loss, target, x)


def next_tokens(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def gpt(way: Way, width: int, blocks: int, batch: int, length: int) -> Task:
    """Causal attention over a vocabulary of 4,096."""
    tokens = torch.randint(4096, (batch, length + 1))
    model = models.GPT(4096, width, 4, blocks, length)
    return Fit(way, model, next_tokens, tokens[:, 1:], tokens[:, :-1])


def lstm(way: Way, width: int, batch: int, length: int) -> Task:
    """Sequences to a vector."""
    target, x = torch.randn(batch, width), torch.randn(batch, length, width)
    return Fit(way, models.Recurrent(width), F.mse_loss, target, x)


def dlrm(way: Way, rows: int, width: int, batch: int) -> Task:
    """Clicks from 13 numbers and 26 bags of 4 categories."""
    clicks, categories = torch.rand(batch, 1).round(), torch.randint(rows, (batch, 26, 4))
    model, loss = models.Recommender(26, rows, width), F.binary_cross_entropy_with_logits
    return Fit(way, model, loss, clicks, torch.randn(batch, 13), categories)


def decoding(way: Way, width: int, length: int, mode: Callable[[], Any]) -> Task:
    """A small GPT of four blocks."""
    return Decoding(way, models.GPT(1024, width, 4, 4, length), length, mode)


def evaluation(way: Way, width: int, batch: int, length: int) -> Task:
    """torch's own encoder: float32 has a fast path there, and autocast has none."""
    return Evaluation(way, models.encoder(width), torch.randn(batch, length, width))


Target = Mapping[tuple[str, str], float]
"""The most that the first variant's time may be, in parts of the second's."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A row: what is done, at which size, over how many rounds, and what that may cost.

    `build` takes a way and the words of `usual`, or those of `small`.
    """

    build: Callable[..., Task]
    rounds: int
    targets: Target
    usual: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    is_launch_bound: bool = False
    """On one thread: waiting for others would hide what is looked for."""
    part: str = ""
    """What is timed of a step (the task's `seconds`), where it is not all of it."""
    tolerance: float = 0.05
    """How far losses may be from hand-written ones, relatively, where they are not to be equal."""
    weighed: Mapping[str, Any] = field(default_factory=dict)
    """The size at which `--small` compares its peak memory; without it that is not compared."""

    def make(self, way: Way) -> Task:
        """The task, the same for all ways."""
        torch.manual_seed(0)
        return self.build(way, **(self.small if _bench.is_small else self.usual))


FASTER_OF_BOTH = "the faster of float32 and forced"
RIGHT = {(DEFAULT, FASTER_OF_BOTH): 1.05}
"""Standing down is decided as it should be: what is left is its cost, and noise."""
PAR = {(DEFAULT, HAND): 1.01, (FORCED, HAND): 1.01, **RIGHT}
FASTER = {**PAR, (FAST, HAND): 0.90}
HARMLESS = {**PAR, (DEFAULT, FLOAT32): 1.02}
NO_GRAD, INFERENCE = {"mode": torch.no_grad}, {"mode": torch.inference_mode}
WORKLOADS = {
    "mlp": Workload(
        mlp,
        60,
        {**HARMLESS, (DEFAULT, HAND): 1.03, (FORCED, HAND): 1.03},
        dtypes=BOTH,
        is_launch_bound=True,
    ),
    "machinery": Workload(
        machinery,
        60,
        {(FORCED, HAND): 1.03},
        dtypes=(torch.float16,),
        is_launch_bound=True,
        part="backward, unscale, gate: ",
    ),
    "resnet18": Workload(
        resnet18,
        30,
        FASTER,
        {"width": 64, "batch": 16, "side": 128},
        {"width": 8, "batch": 4, "side": 64},
        weighed={"width": 16, "batch": 8, "side": 96},
    ),
    "unet": Workload(
        unet,
        30,
        FASTER,
        {"width": 32, "batch": 2, "side": 128},
        {"width": 4, "batch": 1, "side": 32},
        weighed={"width": 8, "batch": 4, "side": 96},
    ),
    "transformer": Workload(
        transformer,
        30,
        PAR,
        {"width": 512, "batch": 4, "length": 128},
        {"width": 32, "batch": 2, "length": 16},
        weighed={"width": 128, "batch": 8, "length": 128},
    ),
    "gpt": Workload(
        gpt,
        30,
        PAR,
        {"width": 512, "blocks": 4, "batch": 4, "length": 128},
        {"width": 32, "blocks": 2, "batch": 1, "length": 8},
        weighed={"width": 128, "blocks": 4, "batch": 8, "length": 128},
    ),
    "lstm": Workload(
        lstm,
        30,
        PAR,
        {"width": 512, "batch": 32, "length": 64},
        {"width": 16, "batch": 2, "length": 8},
    ),
    "dlrm": Workload(
        dlrm,
        30,
        PAR,
        {"rows": 10_000, "width": 64, "batch": 1024},
        {"rows": 100, "width": 8, "batch": 16},
    ),
    "gan": Workload(
        Adversarial,
        30,
        PAR,
        {"noise": 100, "width": 64, "batch": 64},
        {"noise": 8, "width": 4, "batch": 4},
    ),
    "decode": Workload(
        decoding,
        30,
        HARMLESS,
        NO_GRAD | {"width": 256, "length": 128},
        NO_GRAD | {"width": 32, "length": 8},
        is_launch_bound=True,
    ),
    "decode-inference": Workload(
        decoding,
        30,
        HARMLESS,
        INFERENCE | {"width": 256, "length": 128},
        INFERENCE | {"width": 32, "length": 8},
        is_launch_bound=True,
    ),
    "evaluation": Workload(
        evaluation,
        30,
        PAR,
        {"width": 512, "batch": 8, "length": 128},
        {"width": 32, "batch": 2, "length": 16},
    ),
    "ode": Workload(
        Flow,
        30,
        PAR,
        {"width": 32, "batch": 32, "end": 100.0},
        {"width": 8, "batch": 4, "end": 2.0},
        is_launch_bound=True,
    ),
    "agent": Workload(
        Agent,
        30,
        PAR,
        {"width": 64, "length": 500},
        {"width": 16, "length": 10},
        is_launch_bound=True,
    ),
    "lbfgs": Workload(
        LineSearch,
        30,
        PAR,
        {"width": 64, "points": 256},
        {"width": 8, "points": 16},
        is_launch_bound=True,
        tolerance=0.5,
    ),
}
