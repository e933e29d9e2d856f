"""Runs a script for `autoamp compare` and listens: output, steps, memory, and its report."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from .scalars import Curve, Scalars, event_files, events

OBSERVER = Path(__file__).parent / "observer"
PATIENCE = 3.0
"""Seconds that an interrupted script has to end by itself."""
_WINDOWS = 8
"""Of one run, in each of which the speed is measured."""
_WARM_UP = 0.2
"""The share of a run's steps before them."""

Listener = Callable[[str, bool], None]
"""Is given each line of output, and whether it came from stderr."""


@dataclass(slots=True)
class Run:
    """One run of the script, and what was seen of it."""

    variant: str
    repeat: int
    code: int | None = None
    seconds: float = 0.0
    peak: int | None = None
    was_interrupted: bool = False
    scalars: Scalars = field(default_factory=Scalars)
    steps: int = 0
    times: list[list[float]] = field(default_factory=list)
    devices: dict[str, int] = field(default_factory=dict)
    tf32: list[str] = field(default_factory=list)
    report: dict[str, Any] | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=20))

    @property
    def failed(self) -> bool:
        """Whether the script itself ended with an error."""
        return self.code not in (0, None) and not self.was_interrupted

    def curves(self) -> dict[str, Curve]:
        """What was shown more than once."""
        return self.scalars.repeated()

    def speeds(self) -> list[float]:
        """Steps per second in a few stretches, the first steps left out."""
        times = self.times[int(len(self.times) * _WARM_UP) :]
        count = min(_WINDOWS, len(times) - 1)
        if count < 1:
            return []
        ends = [times[index * (len(times) - 1) // count] for index in range(count + 1)]
        return [(b[0] - a[0]) / (b[1] - a[1]) for a, b in pairwise(ends) if b[1] > a[1]]


def play(
    run: Run,
    command: Sequence[str],
    environ: Mapping[str, str],
    folder: Path,
    listen: Listener,
    steps_from: re.Pattern[str] | None = None,
) -> Run:
    """Run `command`; `folder` is for what it leaves for us.

    Raises:
        OSError: it cannot be started.
        KeyboardInterrupt: by the user; `run` has what there is.
    """
    folder.mkdir()
    report = folder / "report.json"
    environ = {
        **environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": environ.get("PYTHONHASHSEED", str(run.repeat)),
        "AUTOAMP_OBSERVER_FOLDER": str(folder),
        "AUTOAMP_OBSERVER_SEED": str(run.repeat),
        "AUTO_MIXED_PRECISION_REPORT": str(report),
    }
    lock = threading.Lock()
    counted: list[list[float]] = []

    def hear(line: str, is_error: bool) -> None:
        with lock:
            run.scalars.read(line)
            if is_error and line.strip():
                run.tail.append(line)
            found = steps_from.search(line) if steps_from is not None else None
            if found is not None:
                counted.append([_step(found, len(counted) + 1), time.perf_counter()])
            listen(line, is_error)

    started = time.time(), time.perf_counter()
    process = subprocess.Popen(  # noqa: S603 - what the user asked for
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    readers = [
        threading.Thread(target=_read, args=(stream, hear, is_error), daemon=True)
        for stream, is_error in ((process.stdout, False), (process.stderr, True))
    ]
    for reader in readers:
        reader.start()
    try:
        _wait(run, process)
    except KeyboardInterrupt:
        run.was_interrupted = True
        _end(run, process)
        raise
    finally:
        run.seconds = time.perf_counter() - started[1]
        for reader in readers:
            reader.join(PATIENCE)
        with lock:
            _collect(run, folder, report, started[0])
            if steps_from is not None:
                run.times, run.steps = counted, int(counted[-1][0]) if counted else 0
    return run


def _step(found: re.Match[str], count: int) -> float:
    """What the first group says, or how often there was such a line."""
    with contextlib.suppress(ValueError, IndexError):
        return float(found[1])
    return float(count)


def _read(stream: IO[bytes], hear: Listener, is_error: bool) -> None:
    """Lines as they come; a progress bar, drawn again and again, is lines too."""
    rest = b""
    while chunk := os.read(stream.fileno(), 65536):
        *lines, rest = re.split(rb"[\r\n]", rest + chunk)
        for line in lines:
            if line:
                hear(line.decode("utf-8", "replace"), is_error)
    if rest:
        hear(rest.decode("utf-8", "replace"), is_error)


def _wait(run: Run, process: subprocess.Popen[bytes]) -> None:
    """Until it ends; only `wait4` tells how much memory one process used at most."""
    if not hasattr(os, "wait4"):  # Windows
        run.code = process.wait()
        return
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = run.code = os.waitstatus_to_exitcode(status)
    run.peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _end(run: Run, process: subprocess.Popen[bytes]) -> None:
    """The terminal has told it too; it may take its time, but not for ever."""
    for end in (None, process.terminate, process.kill):
        if end is not None:
            end()
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            run.code = process.wait(PATIENCE)
            return


def _collect(run: Run, folder: Path, report: Path, since: float) -> None:
    seen = [json.loads(path.read_text()) for path in folder.glob("[0-9]*.json")]
    for one in seen:
        run.tf32 = sorted({*run.tf32, *one["tf32"]})
        for name, peak in one["devices"].items():
            run.devices[name] = max(run.devices.get(name, 0), peak)
    if seen:
        busiest = max(seen, key=lambda one: one["count"])
        run.steps, run.times = busiest["count"], busiest["times"]
    if report.exists():
        run.report = json.loads(report.read_text())
    for path in event_files(Path.cwd(), since):
        for tag, step, value in _quietly(events(path)):
            run.scalars.curves.setdefault(tag.lower(), []).append([float(step), value])


def _quietly(found: Iterator[tuple[str, int, float]]) -> Iterator[tuple[str, int, float]]:
    """What a file has up to where it is broken."""
    try:
        yield from found
    except (IndexError, OSError, ValueError):
        return
