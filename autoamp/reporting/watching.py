"""While a run lasts: when steps ended, and a report in case it is killed.

A signal handler of ours could be seen, and trainers act on what they see. So the JSON report is
written now and then instead, as if the run ended there: whatever kills it, one is left.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from .. import policytext
from ..inspection import is_plain
from .audit import Audit
from .curves import KEPT

if TYPE_CHECKING:
    from ..session import Session

FIRST_WAIT = 2.0
"""Seconds between two writings of an unfinished report, at least."""
SHARE = 1000
"""That many times as long as the last one took is waited too: a thousandth of the time at most."""


class Watch:
    """Hears of every step that ends, of any optimizer, where a report is asked for."""

    def __init__(self, session: Session, write: Callable[[bool], None]) -> None:
        self.session = session
        self.audit = session.audit = Audit(session)
        self.started = time.time()
        self.script = os.path.basename(getattr(sys, "argv", [""])[0])
        self.curve: list[list[float]] = []
        """``[step, seconds since the start]``, of every step at first, of ever fewer later."""
        self.steps = 0
        self._write = write
        self._start = self._last = self._first = time.perf_counter()
        self._stride = self._next_point = 1
        self._next_write = 0.0
        self._lock = threading.Lock()

    def step_ended(self, optimizer: Any) -> None:
        """A step was taken or skipped."""
        self._last = now = time.perf_counter()
        self.steps = steps = self.steps + 1
        if steps >= self._next_point:
            self._note(steps, now)
        audit = self.session.audit
        if audit is not None:
            audit.step_ended(optimizer)
        if now >= self._next_write:
            self._write_now_and_then()

    def times(self) -> dict[str, Any]:
        """When it began, how long it has run, and how fast it stepped."""
        stepping = self._last - self._first
        return {
            "started": datetime.fromtimestamp(self.started, timezone.utc).isoformat("T", "seconds"),
            "seconds": round(time.perf_counter() - self._start, 3),
            "steps_per_second": (self.steps - 1) / stepping if stepping > 0 else None,
            "curve": self.curve,
        }

    @functools.cached_property
    def policy_text(self) -> str:
        """The policy in force as YAML, with where each rule stands."""
        return policytext.document(self.session.policy)

    def _note(self, steps: int, now: float) -> None:
        if steps == 1:
            self._first = now
        self.curve.append([steps, round(now - self._start, 4)])
        if len(self.curve) >= KEPT:
            self.curve = self.curve[1::2]
            self._stride *= 2
        self._next_point = steps + self._stride

    def _write_now_and_then(self) -> None:
        if os.getpid() != self.session.pid or not self._lock.acquire(blocking=False):
            return
        try:
            before = time.perf_counter()
            self._write(is_plain())
            took = time.perf_counter() - before
            self._next_write = before + max(FIRST_WAIT, SHARE * took)
        finally:
            self._lock.release()
