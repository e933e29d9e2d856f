"""Switches of torch that a policy's ``performance`` throws for what runs on CUDA, and throws back.

A script that says something else later is not contradicted: only what is still as we left it is put
back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .policy import PerformanceRule


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch: the policy's key and the word that throws it, and what it reads then."""

    key: str
    word: str
    read: Callable[[], Any]
    throw: Callable[[Any], None]
    thrown: Any


def _set_benchmark(value: bool) -> None:
    torch.backends.cudnn.benchmark = value


SWITCHES = (
    Switch(
        "float32_matmul",
        "tf32",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "high",
    ),
    Switch(
        "cudnn_benchmark",
        "on",
        lambda: torch.backends.cudnn.benchmark,
        _set_benchmark,
        True,
    ),
)


def throw(rule: PerformanceRule) -> list[Callable[[], None]]:
    """Throw the switches that `rule` asks for; what puts each back."""
    undo = []
    for switch in SWITCHES:
        # A script that uses torch's newer names for TF32 cannot be asked by the older ones.
        with contextlib.suppress(RuntimeError):
            before = switch.read()
            if getattr(rule, switch.key) == switch.word and before != switch.thrown:
                switch.throw(switch.thrown)
                undo.append(_back(switch, before))
    return undo


def _back(switch: Switch, before: Any) -> Callable[[], None]:
    def put_back() -> None:
        with contextlib.suppress(RuntimeError):
            if switch.read() == switch.thrown:
                switch.throw(before)

    return put_back
