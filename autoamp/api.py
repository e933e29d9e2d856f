"""What code may say to autoamp beyond on and off: exempt a block, and ask what is going on."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from . import bootstrap


class off(contextlib.ContextDecorator):  # noqa: N801 - reads as a word: `with autoamp.off():`
    """Exempt a block, or a function, from mixed precision: models called in it run in float32.

    >>> with autoamp.off():
    ...     reference = model(x)

    Does nothing where autoamp is not active. Re-entrant; one object may be used many times.
    """

    def __init__(self) -> None:
        self._open: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        stack = contextlib.ExitStack()
        if bootstrap.phase == "active":
            from .region import exempted

            stack.enter_context(exempted())
        self._open.append(stack)

    def __exit__(self, *exception: object) -> None:
        self._open.pop().close()

    def _recreate_cm(self) -> off:
        return off()  # as a decorator: each call its own, so that threads do not share one


def status() -> dict[str, Any]:
    """What autoamp does in this process, as plain data: the keys of the report, and `phase`.

    `phase` is one of ``idle`` (not asked for), ``armed`` (waits for torch), ``active``, ``failed``,
    ``off``.
    """
    from . import report

    if bootstrap.phase == "active":
        from . import activation

        session = activation.session()
        if session is not None:
            return {"phase": bootstrap.phase, **report.describe(session)}
    inactive = report.describe_inactive(bootstrap.reason or _why_idle(), bootstrap.door)
    return {"phase": bootstrap.phase, **inactive}


def _why_idle() -> str:
    if bootstrap.phase == "armed":
        return "waiting for torch to be imported"
    switch = bootstrap.switch()
    if switch == "off":
        return "AUTO_MIXED_PRECISION is off"
    if switch is None:
        return "AUTO_MIXED_PRECISION is not set"
    if bootstrap.has_rights_of_another():
        return (
            "the process has rights that its user lacks (setuid or setgid): "
            "the variables are not read"
        )
    if "torch" in sys.modules:
        return (
            "AUTO_MIXED_PRECISION was set after torch was imported; "
            "it acts from the first optimizer on, or call autoamp.enable()"
        )
    return "torch is not imported yet"
