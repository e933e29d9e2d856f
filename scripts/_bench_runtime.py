"""What the runtime itself costs, call by call: for information, to see where the time goes.

A sample is the time of many calls, on one thread, less that of as many plain ones in the same
round; the tensors are so small that torch's own work is dispatch.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import _bench
import torch
from _bench import Finding, differences, interleave, ratios
from _bench_ways import switched
from torch import nn
from torch.nn import functional as F

from autoamp import activation, backward

CALLS = 500
MODULES = 1000
SINGLE, X, WEIGHT = torch.ones(1), torch.ones(1, 16), nn.Parameter(torch.ones(16, 16))
HALF = torch.ones(16, dtype=torch.bfloat16)
POLICIES: Mapping[str, str] = {
    "torch": "extends: torch",
    "kept": "extends: torch\noutputs: keep",
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


class Holds(Same):
    """Gives back a half tensor of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return HALF


class Exponentials(Same):
    """Calls one op many times, inside a region."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(CALLS):
            torch.exp(x)
        return x


same, holds, exponentials = Same(), Holds(), Exponentials()
layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(MODULES)))
calls = nn.Sequential(*(Same() for _ in range(MODULES)))
weight = nn.Parameter(torch.ones(1))
idle = torch.optim.SGD(same.parameters(), lr=0.1)  # no gradients: nothing to do
busy = torch.optim.SGD([weight], lr=0.0)


def call_module() -> None:
    for _ in range(CALLS):
        same(SINGLE)


def call_module_by_hand() -> None:
    for _ in range(CALLS):
        with torch.autocast("cpu", torch.bfloat16):
            same(SINGLE)


def call_holding() -> None:
    for _ in range(CALLS):
        holds(SINGLE)


def cast() -> None:
    for _ in range(CALLS):
        HALF.float()


def call_functional() -> None:
    for _ in range(CALLS):
        F.linear(X, WEIGHT)


def call_functional_by_hand() -> None:
    for _ in range(CALLS):
        with torch.autocast("cpu", torch.bfloat16):
            F.linear(X, WEIGHT)


def call_functional_in_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        call_functional()


def run_backward() -> None:
    for _ in range(CALLS):
        weight.grad = None
        (weight * 2).backward()


def run_backward_and_step() -> None:
    for _ in range(CALLS):
        busy.zero_grad()
        (weight * 2).backward()
        busy.step()


def run_backward_and_step_by_hand() -> None:
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(CALLS):
        busy.zero_grad()
        scaler.scale(weight * 2).backward()
        scaler.step(busy)
        scaler.update()


def step_optimizer() -> None:
    for _ in range(CALLS):
        idle.step()


def call_exponentials() -> None:
    exponentials(HALF)


def call_many() -> None:
    calls(SINGLE)


def call_many_by_hand() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        calls(SINGLE)


def train_many() -> None:
    layers(X).sum().backward()


Run = tuple[Callable[[], None], str | None]
"""A function, and the policy that it runs under, None without autoamp."""


@dataclass(frozen=True, slots=True)
class Cost:
    """`with_it` takes so much longer than `without` a call, which is the plain one."""

    what: str
    with_it: Run
    without: Run
    count: int = CALLS
    dtype: torch.dtype = torch.bfloat16
    target: float | None = None


COSTS = (
    Cost("outermost module call: a region", (call_module, "torch"), (call_module, None)),
    Cost("the same by hand", (call_module_by_hand, None), (call_module, None)),
    Cost("output cast, with its look", (call_holding, "torch"), (call_holding, "kept")),
    Cost("the same by hand: `float()`", (cast, None), (int, None)),
    Cost("nested module call", (call_many, "torch"), (call_many_by_hand, None), MODULES),
    Cost("the same, each with a rule", (call_many, "rules"), (call_many_by_hand, None), MODULES),
    Cost(
        "functional call inside a region",
        (call_functional_in_autocast, "torch"),
        (call_functional_in_autocast, None),
    ),
    Cost(
        "functional call outside any module",
        (call_functional, "torch"),
        (call_functional, None),
    ),
    Cost("the same by hand", (call_functional_by_hand, None), (call_functional, None)),
    Cost(
        "one op that the policy moves",
        (call_exponentials, "override"),
        (call_exponentials, "torch"),
        target=12_000,
    ),
    Cost("backward of a graph of one op", (run_backward, "torch"), (run_backward, None)),
    Cost("gate of an optimizer step, idle", (step_optimizer, "torch"), (step_optimizer, None)),
    Cost(
        "backward of one op, and step: scaled, gated",
        (run_backward_and_step, "torch"),
        (run_backward_and_step, None),
        dtype=torch.float16,
    ),
    Cost(
        "the same by hand: a `GradScaler`",
        (run_backward_and_step_by_hand, None),
        (run_backward_and_step, None),
        dtype=torch.float16,
    ),
)


def runtime(rounds: int | None) -> Iterator[Finding]:
    """Each of the `COSTS`, in nanoseconds, beside what the plain call takes; and the walk through a
    graph.
    """
    rounds, threads = rounds or 40, torch.get_num_threads()
    torch.set_num_threads(1)
    for cost in COSTS:
        subjects = {
            name: _timed(*run, cost.dtype)
            for name, run in (("with", cost.with_it), ("without", cost.without))
        }
        samples = interleave(subjects, rounds)
        row = "runtime {}".format(str(cost.dtype).removeprefix("torch."))
        added = differences(samples, "with", "without", 1e9 / cost.count)
        yield Finding(row, cost.what, "ns", added, cost.target)
        plain = [seconds * 1e9 / cost.count for seconds in samples["without"]]
        yield Finding(row, f"{cost.what}, plain", "ns", plain)
    yield from _graph_walk(rounds)
    yield _module_rules(rounds)
    torch.set_num_threads(threads)


def _timed(
    function: Callable[[], None], policy: str | None, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], float]:
    def sample() -> float:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "policy.yaml")
            path.write_text(POLICIES[policy or "torch"])
            with switched(str(path), dtype, stays=policy is not None):
                same(SINGLE)  # the first region decides whether losses are scaled
                function()
                return _seconds(function)

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
    with switched("torch", torch.bfloat16):
        session = activation.session()
        assert session is not None
        loss = model(x).sum()
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
