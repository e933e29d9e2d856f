"""Unmodified scripts and their hand-written twins, run as a user runs them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parents[1]
SCRIPTS = sorted(path.stem for path in (TESTS / "scripts").glob("*.py"))


@dataclass(frozen=True)
class Outcome:
    """What a training run left behind."""

    stdout: str
    stderr: str
    saved: dict[str, Any]

    @property
    def metric(self) -> float:
        return float(self.stdout.splitlines()[-1].split()[2])


@pytest.fixture
def train(run_script: Any, tmp_path: Path) -> Callable[..., Outcome]:
    """`train("scripts", "digits_cnn", "--steps", 8, AUTO_MIXED_PRECISION="torch")`."""

    def run(folder: str, name: str, *arguments: object, **variables: str) -> Outcome:
        save = tmp_path / f"{folder}-{name}-{uuid.uuid4().hex}.pt"
        words = [str(argument) for argument in arguments]
        result = run_script(TESTS / folder / f"{name}.py", *words, "--save", str(save), **variables)
        assert result.returncode == 0, result.stderr
        saved = torch.load(save, weights_only=False)
        return Outcome(result.stdout, result.stderr, saved)

    return run


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two checkpoints differ, bit for bit; keys that only one side has do not count."""
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) else [where]
    if isinstance(one, dict):
        shared = one.keys() & other.keys()
        return [d for key in shared for d in differences(one[key], other[key], f"{where}/{key}")]
    if isinstance(one, (list, tuple)):
        pairs = enumerate(zip(one, other, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, f"{where}/{i}")]
    return [] if one == other else [where]
