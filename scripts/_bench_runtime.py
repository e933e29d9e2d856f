"""What the runtime itself costs, call by call: for information, to see where the time goes."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import _bench
import torch
from _bench import Finding, differences, interleave, ratios
from torch import nn
from torch.nn import functional as F

import autoamp
from autoamp import activation, backward

CALLS = 500
SINGLE, X, WEIGHT = torch.ones(1), torch.ones(1, 16), torch.ones(16, 16)


HALF = torch.ones(16, dtype=torch.bfloat16)
MODULES = 1000
POLICIES: Mapping[str, str] = {
    "torch": "extends: torch",
    "override": "ops: {float32: {add: [exp]}}",
    "rules": "modules:\n"
    + "".join(f'- {{name: "{index}", precision: lower}}\n' for index in range(MODULES)),
}
"""What autoamp is on with; the rules are one for each module."""


class Same(nn.Module):
    """Gives back what it gets; with a parameter, so that it can be a root."""

    def __init__(self) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Exponentials(Same):
    """Calls one op many times, inside a region."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(CALLS):
            torch.exp(x)
        return x


same, exponentials = Same(), Exponentials()
layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(MODULES)))
calls = nn.Sequential(*(Same() for _ in range(MODULES)))
optimizer = torch.optim.SGD(same.parameters(), lr=0.1)  # no gradients: nothing to do


def call_module() -> None:
    for _ in range(CALLS):
        same(SINGLE)


def call_module_in_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        call_module()


def call_functional_in_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(CALLS):
            F.linear(X, WEIGHT)


def step_optimizer() -> None:
    for _ in range(CALLS):
        optimizer.step()


def call_exponentials() -> None:
    exponentials(HALF)


def call_many() -> None:
    calls(SINGLE)


def train_many() -> None:
    layers(X).sum().backward()


def enter_autocast() -> None:
    for _ in range(CALLS):
        with torch.autocast("cpu", torch.bfloat16):
            same(SINGLE)


@dataclass(frozen=True, slots=True)
class Cost:
    """`with_it` takes so much longer than `without` a call; both under a policy, or without."""

    what: str
    with_it: tuple[Callable[[], None], str | None]
    without: tuple[Callable[[], None], str | None]
    target: float | None = None


COSTS = (
    Cost(
        "nested module call",
        (call_module_in_autocast, "torch"),
        (call_module_in_autocast, None),
    ),
    Cost(
        "functional call inside a region",
        (call_functional_in_autocast, "torch"),
        (call_functional_in_autocast, None),
    ),
    Cost("region, entry and exit", (call_module, "torch"), (call_module, None)),
    Cost("for comparison: `with torch.autocast`", (enter_autocast, None), (call_module, None)),
    Cost(
        "one op that the policy moves",
        (call_exponentials, "override"),
        (call_exponentials, "torch"),
        12.0,
    ),
    Cost(
        "gate of an optimizer step, no scaling", (step_optimizer, "torch"), (step_optimizer, None)
    ),
)


def runtime(rounds: int | None) -> list[Finding]:
    """Each of the `COSTS`, in microseconds, and the walk through a graph."""
    rounds, findings, threads = rounds or 40, [], torch.get_num_threads()
    torch.set_num_threads(1)
    for cost in COSTS:
        subjects = {"with": _timed(*cost.with_it), "without": _timed(*cost.without)}
        values = differences(interleave(subjects, rounds), "with", "without", 1e6 / CALLS)
        findings.append(Finding("runtime", cost.what, "us", values, cost.target))
    findings += [*_graph_walk(rounds), _module_rules(rounds)]
    torch.set_num_threads(threads)
    return findings


def _timed(function: Callable[[], None], policy: str | None) -> Callable[[], float]:
    def sample() -> float:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "policy.yaml")
            path.write_text(POLICIES[policy or "torch"])
            autoamp.enable(str(path))
        if policy is None:
            autoamp.disable()
        try:
            function()
            return _seconds(function)
        finally:
            autoamp.disable()

    return sample


def _module_rules(rounds: int) -> Finding:
    """What looking up a rule for each module costs, of a step of forward and backward.

    The cost is taken from modules that do nothing: in the step's own time it would be lost.
    """
    subjects = {
        "rules": _timed(call_many, "rules"),
        "none": _timed(call_many, "torch"),
        "step": _timed(train_many, "torch"),
    }
    samples = interleave(subjects, rounds)
    costs = differences(samples, "rules", "none", 100)
    shares = [cost / step for cost, step in zip(costs, samples["step"], strict=True)]
    return Finding("runtime", "1,000 rules for 1,000 modules, of a step", "%", shares, 1.0)


def _graph_walk(rounds: int) -> list[Finding]:
    """How long it takes to find the 160 leaves of 80 linear layers, as FP16 does each backward."""
    model, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(80))), torch.randn(8, 16)
    autoamp.enable("torch")
    session = activation.session()
    assert session is not None
    loss = model(x).sum()
    autoamp.disable()
    found = len(backward._leaves(session, (loss,), ()))
    assert found == 160, found

    def train() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        output.float().sum().backward()

    def walk() -> None:
        backward._leaves(session, (loss,), ())

    samples = interleave({"walk": lambda: _seconds(walk), "train": lambda: _seconds(train)}, rounds)
    microseconds = [seconds * 1e6 for seconds in samples["walk"]]
    shares = [100 * ratio for ratio in ratios(samples, "walk", "train")]
    return [
        Finding("runtime", "graph walk to 160 parameters", "us", microseconds),
        Finding("runtime", "the same, of forward and backward", "%", shares),
    ]


def _seconds(function: Callable[[], None]) -> float:
    gc.collect()
    gc.disable()
    try:
        started = _bench.clock()
        function()
        return _bench.clock() - started
    finally:
        gc.enable()


SECTIONS = {"runtime": runtime}
