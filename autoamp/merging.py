"""One report of many ranks: each puts its part beside the report, and who comes last merges them.

Nobody waits for anybody: a rank that was killed is missing from the report, and no more. Parts lie
beside the report until all are there; where ranks see other disks, they stay where they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

OF_EACH = "{rank}"
"""In the path of a report: each rank writes its own."""
_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_SLACK = 60.0
"""Seconds by which ranks of one job start one after the other, or clocks of machines differ."""


def add(
    path: str,
    place: tuple[int, int],
    content: Mapping[str, Any],
    started: float,
    write: Callable[[str, dict[str, Any]], None],
) -> bool:
    """Put in the part of one rank (`place`: rank, number of ranks) and write what there is so far.

    `started`: seconds since the epoch; parts of older runs do not count. Returns whether all parts
    are there.
    """
    rank, world = place
    job = [world, *(os.environ.get(name, "") for name in _JOB)]
    with _alone(path):
        write(_part(path, rank), {"job": job, "host": socket.gethostname(), **content})
        parts = {r: part for r in range(world) if (part := _read(_part(path, r), started, job))}
        if 0 in parts:
            write(path, merged(parts))
        if len(parts) == world:
            for r in parts:
                os.unlink(_part(path, r))
        return len(parts) == world


def merged(parts: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The report of rank 0, with what it lacks of the others."""
    content = {key: value for key, value in parts[0].items() if key not in ("job", "host")}
    known = {_what(demotion) for demotion in content["demotions"]}
    demotions = list(content["demotions"])
    for part in parts.values():
        for demotion in part["demotions"]:
            if _what(demotion) not in known:
                known.add(_what(demotion))
                demotions.append(demotion)
    rows = [
        {
            "rank": rank,
            "host": part["host"],
            "regions": part["regions"],
            "steps": part["steps"],
            "final_loss_scale": part["loss_scale"]["final"],
            "demotions": len(part["demotions"]),
        }
        for rank, part in sorted(parts.items())
    ]
    return {**content, "demotions": demotions, "ranks": {"world": parts[0]["job"][0], "told": rows}}


def _what(demotion: Mapping[str, Any]) -> tuple[Any, ...]:
    return demotion["module"], demotion["type"], demotion["below"]


def _part(path: str, rank: int) -> str:
    return f"{path}.rank{rank}"


def _read(path: str, started: float, job: list[Any]) -> dict[str, Any] | None:
    try:
        if os.stat(path).st_mtime < started - _SLACK:
            return None
        content: dict[str, Any] = json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return None
    return content if content.get("job") == job else None


@contextlib.contextmanager
def _alone(path: str) -> Iterator[None]:
    """One rank at a time, where the system can do that."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    folder = os.open(Path(path).parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
