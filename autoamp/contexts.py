"""The script's own `torch.autocast` contexts: a script with mixed precision of its own keeps to it.

A context always wins where it is, enabled or not, since torch counts it. What this room adds: who
lowers precision and evaluates in float32 outside of that gets float32 there too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from .kernels import nesting
from .session import Session

DECORATOR = "decorate_autocast"
"""The function of torch that enters the context of a script's ``@torch.autocast(...)``."""
TRAINERS = ("accelerate", "lightning", "lightning_fabric")
"""Packages that wrap the forward of the models they are given: where they are asked for mixed
precision, it is inside our region that they open it.
"""


def context_entered(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`torch.autocast.__enter__`: at the script's first, all is left to the script.

    Not at one inside a region (models have such for a few lines), nor at one that torch opens. Who
    calls `autoamp.enable()` in code has both in hand: there contexts only win where they are.
    """
    watches = session.door != "autoamp.enable"
    said: set[str] = set()

    def enter(self: Any) -> Any:
        if watches and session.active and not session.stands_aside:
            frame, is_outermost = sys._getframe(1), _is_outermost()
            trainer = "" if is_outermost or not self._enabled else _trainer(frame)
            if trainer:
                session.stand_aside(f"{trainer} has its own mixed precision")
            elif is_outermost and _is_of_the_script(frame):
                if self._enabled:
                    session.stand_aside("the script has its own torch.autocast")
                elif not said:
                    said.add("disabled")
                    session.speech.notice(
                        "autoamp: what the script runs in its torch.autocast(enabled=False) stays "
                        "float32"
                    )
        return original(self)

    return enter


def _is_outermost() -> bool:
    return nesting() == 0 and torch._C._current_graph_task_id() == -1


def _trainer(frame: FrameType) -> str:
    """The trainer that enters a context in this frame, or calls what it has decorated."""
    caller = frame.f_back if frame.f_code.co_name == DECORATOR else frame
    package = _package(caller) if caller is not None else ""
    return package if package in TRAINERS else ""


def _is_of_the_script(frame: FrameType | None) -> bool:
    """Whether a frame that enters a context is not torch's or ours, seen through torch's spellings
    of one (a subclass, a decorator).
    """
    while frame is not None and _package(frame) in ("torch", "autoamp"):
        if frame.f_code.co_name != "__enter__":
            return frame.f_code.co_name == DECORATOR
        frame = frame.f_back
    return True


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).split(".", 1)[0]
