"""Two ranks: what autoamp costs beside hand-written DDP, and what half gradients save on a link.

`scripts/bench --ranks 2` starts this file once for each rank, over gloo. All ranks train the same
variants in the same order, with a barrier before each sample, and rank 0's times count. For the
link, each rank is in a network namespace of its own (root, `ip` and `tc` are needed); the pair of
interfaces between them is throttled by a token bucket, and their counters tell the bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import _bench
import _bench_training as training
import torch
import torch.distributed as dist
from _bench import Finding, Samples, interleave, ratios
from _bench_tasks import Fit, Task, Workload, mlp
from _bench_ways import AGAIN, HAND, TORCH, VARIANTS, Way
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import autoamp

FIRST = 16
"""Steps in which ranks agree each time (`autoamp.agreement.FIRST`): they are for warming up."""
RATE = 1e9
"""Bits a second of the throttled link."""
LINK_STEPS = 3
NAMES = ("autoamp-bench-0", "autoamp-bench-1")


def wide(way: Way) -> Task:
    """Four layers of 1,024 on a batch of 16: some milliseconds of arithmetic."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    target, x = torch.randn(2, 16, 1024).unbind()
    return Fit(way, nn.Sequential(*layers), F.mse_loss, target, x)


def heavy() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A table of 8,192 rows of 2,048: 67 MB of float32 gradients, and next to no arithmetic."""
    model = nn.Sequential(nn.Embedding(8192, 2048), nn.Linear(2048, 1))
    return model, torch.arange(4), torch.randn(4, 1)


TARGET = {(TORCH, HAND): 1.02}
COSTS = {
    "mlp": Workload(mlp, 20, TARGET),
    "wide": Workload(wide, 20, TARGET),
}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def compare(world: int, rounds: int | None) -> Iterator[Finding]:
    """All findings of several ranks."""
    for name, workload in COSTS.items():
        for word in DTYPES:
            kind = "cost, busy" if _bench.clock is _bench.cpu_seconds else "cost"
            samples = _start(world, [kind, name, word, str(rounds or workload.rounds)])
            for what, above, target in (
                ("autoamp / hand-written", TORCH, workload.targets[TORCH, HAND]),
                ("hand-written / itself: the noise", AGAIN, None),
            ):
                values = ratios(samples, above, HAND)
                yield Finding(f"{name} {word} x{world}", what, "x", values, target)
    for word in DTYPES:
        samples = _start(world, ["loss", "teacher", word, str(rounds or 10)])
        for kind in ("keep", "half"):
            yield Finding(
                f"loss {word} x{world}", f"at the end, gradients: {kind}", "", samples[kind]
            )
        values = ratios(samples, "half", "keep")
        yield Finding(f"loss {word} x{world}", "at the end, half / keep", "x", values)
    if world != 2 or os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        return
    for word in DTYPES:
        with _link():
            samples = _start(world, ["link", "heavy", word, str(rounds or 5)], NAMES)
        row = f"1 Gbit/s {word}"
        for what, unit in (("seconds", "s"), ("bytes", "MB")):
            for kind in ("keep", "half"):
                yield Finding(
                    row, f"{what} a step, gradients: {kind}", unit, samples[f"{kind} {what}"]
                )
            values = ratios(samples, f"half {what}", f"keep {what}")
            yield Finding(
                row, f"{what}, half / keep", "x", values, 0.51 if what == "bytes" else None
            )


def _start(world: int, words: list[str], namespaces: tuple[str, ...] = ()) -> Samples:
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world):
            inside = ["ip", "netns", "exec", namespaces[rank]] if namespaces else []
            network = {"GLOO_SOCKET_IFNAME": f"veth{rank}"} if namespaces else {}
            command = [*inside, sys.executable, __file__, str(rank), str(world), folder, *words]
            ranks.append(
                subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", **network})
            )
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        return json.loads(Path(folder, "samples.json").read_text())


@contextlib.contextmanager
def _link() -> Iterator[None]:
    """Two namespaces, and a pair of interfaces between them that is slow in both directions."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            "veth0",
            "netns",
            NAMES[0],
            "type",
            "veth",
            "peer",
            "veth1",
            "netns",
            NAMES[1],
        )
        for rank, name in enumerate(NAMES):
            ip("-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", f"veth{rank}")
            ip("-n", name, "link", "set", f"veth{rank}", "up")
            ip("-n", name, "link", "set", "lo", "up")
            limit = ["rate", str(int(RATE)), "burst", "256kb", "latency", "100ms"]
            tc = ["tc", "qdisc", "add", "dev", f"veth{rank}", "root", "tbf", *limit]
            subprocess.run(["ip", "netns", "exec", name, *tc], check=True)
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False)


# In each rank


def main(rank: int, world: int, folder: str, kind: str, name: str, word: str, rounds: int) -> None:
    """One rank: sample, and leave what rank 0 has found in the folder."""
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=world)
    os.environ["AUTO_MIXED_PRECISION_DTYPE"] = word
    if kind.startswith("cost"):
        _bench.clock = _bench.cpu_seconds if "busy" in kind else _bench.clock
        samples = cost(name, DTYPES[word], rounds)
    else:
        samples = link(rank, rounds) if kind == "link" else loss(rank, rounds)
    if rank == 0:
        Path(folder, "samples.json").write_text(json.dumps(samples))
    dist.barrier()
    dist.destroy_process_group()


class Shared(training.Training):
    """A training whose model is shared; each sample begins when all are there."""

    def sample(self) -> float:
        """Seconds a step."""
        dist.barrier()
        return super().sample()


def shared(make: Callable[[str, torch.dtype], Way]) -> Callable[[str, torch.dtype], Way]:
    """Ways whose models are DDP's."""

    def way(device: str, dtype: torch.dtype) -> Way:
        made = make(device, dtype)
        setup = made.setup

        def setup_shared(model: nn.Module, optimizer: object = None) -> tuple[object, object]:
            model, optimizer = setup(model, optimizer)
            return DistributedDataParallel(model), optimizer

        made.setup = setup_shared
        return made

    return way


def cost(name: str, dtype: torch.dtype, rounds: int) -> Samples:
    """Seconds a step of hand-written code, twice, and of autoamp."""
    trainings = {}
    for key in (HAND, TORCH, AGAIN):
        variant = dataclasses.replace(VARIANTS[key], way=shared(VARIANTS[key].way))
        trainings[key] = Shared(COSTS[name], variant, dtype)
    training.check({key: one.first_losses() for key, one in trainings.items()}, 0.05)
    seconds = torch.tensor(trainings[HAND].sample())
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    for one in trainings.values():
        one.steps = max(FIRST, math.ceil(_bench.sample_seconds / seconds.item()))
    return interleave({key: one.sample for key, one in trainings.items()}, rounds)


def link(rank: int, rounds: int) -> Samples:
    """Seconds and megabytes (sent by this rank) a step, with gradients kept and in half."""
    found: Samples = {
        f"{kind} {what}": [] for kind in ("keep", "half") for what in ("seconds", "bytes")
    }
    counter = Path(f"/sys/class/net/veth{rank}/statistics/tx_bytes")

    def sample(kind: str) -> float:
        with _gradients(kind):
            torch.manual_seed(0)
            model, x, target = heavy()
            model = DistributedDataParallel(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for step in range(2 + LINK_STEPS):
                if step == 2:  # buckets are made anew after the first
                    dist.barrier()
                    sent, started = int(counter.read_text()), _bench.clock()
                optimizer.zero_grad()
                F.mse_loss(model(x), target).backward()
                optimizer.step()
            found[f"{kind} seconds"].append((_bench.clock() - started) / LINK_STEPS)
            found[f"{kind} bytes"].append((int(counter.read_text()) - sent) / LINK_STEPS / 1e6)
        return 0.0

    interleave({"keep": lambda: sample("keep"), "half": lambda: sample("half")}, rounds)
    return found


def loss(rank: int, rounds: int) -> Samples:
    """What a small classifier of noisy data has come to after 400 steps, by seed."""
    found: Samples = {"keep": [], "half": []}
    for seed in range(rounds):
        for kind in found:
            with _gradients(kind):
                found[kind].append(_final_loss(rank, seed))
    return found


def _final_loss(rank: int, seed: int, steps: int = 400) -> float:
    torch.manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10))
    model = nn.Sequential(
        nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    torch.manual_seed(1000 * seed + rank)
    last = torch.zeros(())
    for step in range(steps):
        x = torch.randn(64, 32)
        with torch.no_grad(), autoamp.off():
            target = (3 * teacher(x)).softmax(1).multinomial(1).squeeze(1)
        optimizer.zero_grad()
        error = F.cross_entropy(model(x), target)
        error.backward()
        optimizer.step()
        if step >= steps - 50:
            last += error.detach() / 50
    dist.all_reduce(last)
    return last.item() / dist.get_world_size()


@contextlib.contextmanager
def _gradients(kind: str) -> Iterator[None]:
    """autoamp, with gradients that are exchanged as they are (keep) or in half."""
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder, "policy.yaml")
        policy.write_text(f"distributed: {{gradients: {kind}}}\n")
        autoamp.enable(str(policy))
        try:
            yield
        finally:
            autoamp.disable()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:7], int(sys.argv[7]))
