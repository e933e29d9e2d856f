"""One of several processes that play patterns together: ``ranked.py RANK WORLD FOLDER NAME…``.

Plain, by hand where there is a twin, and under autoamp in each mode. What each found is saved in
the folder: by mode, and in the end autoamp's own status.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autoamp

from .playing import MODES, PATTERNS, by_hand, mixed_by, plain

SECTIONS = {
    "r_half": "distributed: {gradients: half}\n",
    "r_agree": "fallback: {on_error: float32, inspect: true}\n",
    "r_alone": "fallback: {on_error: float32, inspect: true}\n",
}
"""What the policy of a pattern says besides."""


def play(name: str, folder: Path) -> Iterator[tuple[str, Any]]:
    yield "plain", plain(name)
    for word, mode in MODES.items():
        if (PATTERNS / f"{name}_amp.py").exists():
            yield f"{word} by hand", by_hand(name, mode)

        def enable(policy: str, dtype: str) -> None:
            os.environ["AUTO_MIXED_PRECISION_DTYPE"] = dtype
            autoamp.disable()
            autoamp.enable(policy)

        yield word, mixed_by(enable, folder, name, mode, SECTIONS.get(name, ""))
        yield f"{word} status", autoamp.status()


def main(rank: int, world: int, folder: Path, names: list[str]) -> None:
    dist.init_process_group("gloo", f"file://{folder / 'meeting'}", rank=rank, world_size=world)
    for name in names:
        own = folder / name / str(rank)
        own.mkdir(parents=True)
        torch.save(dict(play(name, own)), folder / f"{name}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
