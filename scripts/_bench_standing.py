"""Small models in float32 and in lower precision: does `autoamp.standing` tell the faster one?

What its table of costs is measured against. Each model is timed with its casts as autoamp makes
them, and asked under the policy `default` whether it stays float32.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

import _bench
import _bench_models as models
import torch
from _bench import Finding, interleave
from _bench_ways import switched
from torch import nn

from autoamp import activation

WIDTHS, ROWS = (16, 64, 128, 256, 512, 1024), (1, 8, 64)
IMAGES = ((8, 16, 1), (16, 32, 8), (32, 32, 8), (64, 8, 8), (128, 16, 8))
SEQUENCES = ((32, 1, 4), (64, 4, 32), (128, 4, 32), (256, 4, 64))
CLOSE = 1.05
"""Where one takes no more of the other's time, either is right."""
ROUNDS = 7


def subjects() -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """Linear layers, convolutions and encoder layers, each with an input."""
    sizes = itertools.islice(itertools.product(WIDTHS, ROWS), 2 if _bench.is_small else None)
    for width, rows in sizes:
        yield models.mlp(6, width), torch.randn(rows, width)
    if _bench.is_small:
        return
    for channels, side, batch in IMAGES:
        layers = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(4)]
        net = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
        yield net, torch.randn(batch, channels, side, side)
    for width, batch, length in SEQUENCES:
        net = models.encoder(width, 4, 2).eval()
        yield net, torch.randn(batch, length, width)


def compare(rounds: int | None) -> Iterator[Finding]:
    """The share that is told, and how much slower the choice is where it is wrong."""
    right, losses = [], []
    for threads, trains in itertools.product((1, 2), (False, True)):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        for net, x in subjects():
            stays = _stays_float32(net, x, trains)
            full, half = _seconds(net, x, trains, rounds or ROUNDS)
            loss = full / half if stays else half / full
            right.append(loss <= CLOSE)
            losses.append(loss)
        torch.set_num_threads(before)
    share = 100 * statistics.mean(right)
    yield Finding("standing", f"of {len(right)} small models, told rightly", "%", [share])
    yield Finding("standing", "the worst choice / the other", "x", [max(losses)])


def _call(net: nn.Module, x: torch.Tensor, trains: bool) -> None:
    with torch.set_grad_enabled(trains):
        result = net(x)
    if trains:
        result.sum().backward()
        net.zero_grad()


def _stays_float32(net: nn.Module, x: torch.Tensor, trains: bool) -> bool:
    with switched("default", None):
        _call(net, x, trains)
        session = activation.session()
        assert session is not None
        return id(net) in session.regions.standing


def _seconds(net: nn.Module, x: torch.Tensor, trains: bool, rounds: int) -> tuple[float, float]:
    def sample(stays: bool) -> float:
        with switched("default", torch.bfloat16, stays):
            for _ in range(3):
                _call(net, x, trains)
            watch, calls = _bench.stopwatch(), 0
            while not calls or watch() < _bench.sample_seconds / 10:
                _call(net, x, trains)
                calls += 1
            return watch() / calls

    kinds = {"float32": lambda: sample(False), "half": lambda: sample(True)}
    samples = interleave(kinds, rounds)
    full, half = (statistics.median(samples[kind]) for kind in kinds)
    return full, half


SECTIONS = {"standing": compare}
