"""Peak memory of training: each variant in a process of its own, against float32.

On the CPU it is what a process has held at most, less what it held after another, tiny, training
had loaded all that is loaded late. Not `ru_maxrss`: a child inherits that of the process that
started it (Linux keeps it across exec). On CUDA it is `torch.cuda.max_memory_allocated`.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import _bench
import torch
from _bench import Finding, ratios
from _bench_tasks import WORKLOADS
from _bench_training import Training
from _bench_ways import FLOAT32, VARIANTS, variants

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
WORD = "bfloat16"


def compare(name: str, rounds: int | None) -> Iterator[Finding]:
    """The peak of each variant over float32's, and float32's own in MB."""
    kinds = variants(getattr(torch, WORD))
    samples = {kind: [_peak(name, kind) for _ in range(rounds or 1)] for kind in kinds}
    row = f"memory {name} {WORD}"
    yield Finding(row, FLOAT32, "MB", [bytes_ / 1e6 for bytes_ in samples[FLOAT32]])
    for kind in kinds:
        if kind != FLOAT32:
            yield Finding(row, f"{kind} / {FLOAT32}", "x", ratios(samples, kind, FLOAT32))


def memory(rounds: int | None) -> Iterator[Finding]:
    """Those rows whose tensors are large enough."""
    if _bench.device == "cpu" and not STATUS.exists():
        _bench.leave_out("memory", "all", f"there is no {STATUS}")
        return
    for name, workload in WORKLOADS.items():
        if workload.weighed:
            yield from compare(name, rounds)


def _peak(name: str, kind: str) -> float:
    words = [name, kind, _bench.device, json.dumps(_bench.is_small), str(torch.get_num_threads())]
    command = [sys.executable, __file__, *words]
    return float(subprocess.run(command, check=True, stdout=-1, text=True).stdout)


# In each process


def main(name: str, kind: str, device: str, is_small: str, threads: str) -> None:
    """Train for two steps and print how many bytes that took."""
    _bench.device, _bench.is_small = device, json.loads(is_small)
    torch.set_num_threads(int(threads))
    variant, dtype = VARIANTS[kind], getattr(torch, WORD)
    Training(WORKLOADS["mlp"], variant, dtype).first_losses()
    gc.collect()
    if device == "cpu":
        RESET.write_text("5")  # the peak is what is held now (man 5 proc)
    else:
        torch.cuda.reset_peak_memory_stats()
    before = _peak_of_process()
    workload = WORKLOADS[name]
    if _bench.is_small:
        workload = dataclasses.replace(workload, small=workload.weighed)
    Training(workload, variant, dtype).first_losses()
    print(_peak_of_process() - before)


def _peak_of_process() -> int:
    if _bench.device == "cuda":
        return torch.cuda.max_memory_allocated()
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


SECTIONS = {"memory": memory}

if __name__ == "__main__":
    main(*sys.argv[1:])
