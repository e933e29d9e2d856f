"""How `scripts/cases` plays a case: in a forked child of a process that has torch already."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy  # noqa: F401 - what many cases load is loaded once, before they fork
import torch
import torch._dynamo  # every optimizer loads it

with torch.random.fork_rng():
    torch.nn.Linear(1, 1)(torch.ones(1, 1))  # a first region: the kernels are made once


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one case: `error` is empty if it passed, `output` is all that it printed."""

    path: Path
    error: str
    output: str


class Outer(torch.nn.Module):
    """The rest of a bigger model: owns a parameter, and a whole case runs as its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, play: Callable[[], None]) -> None:
        play()


def outcomes(
    paths: Sequence[Path], is_inside: bool, at_once: int, seconds: int
) -> Iterator[Outcome]:
    """Play the cases, up to `at_once` at a time, and tell what became of each, in their order."""
    waiting = list(paths)
    running: dict[int, tuple[Path, IO[str]]] = {}
    done: dict[Path, Outcome] = {}
    for asked in paths:
        while asked not in done:
            while waiting and len(running) < at_once:
                path, output = waiting.pop(0), output_file()
                running[start(path, is_inside, output, seconds)] = path, output
            child, status = os.wait()
            path, output = running.pop(child)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # what it has started and left behind
            with output:
                output.seek(0)
                code = os.waitstatus_to_exitcode(status)
                done[path] = outcome(path, code, output.read(), seconds)
        yield done[asked]


def output_file() -> IO[str]:
    """Where a child's output goes; whoever waits for the child closes it."""
    return tempfile.TemporaryFile("w+", errors="replace")


def start(path: Path, is_inside: bool, output: IO[str], seconds: int) -> int:
    """Fork a child that plays the case and then leaves; torch is loaded once for all of them."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
        signal.alarm(seconds)  # ends the process, whatever it is doing
        code = play(path, is_inside)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def play(path: Path, is_inside: bool) -> int:
    """Run a file as Python does with a script: its exit code, and the last line says why."""
    script = types.ModuleType("__main__")
    script.__file__ = str(path)
    sys.modules["__main__"] = script  # what pickle, spawned processes and TorchScript look at
    sys.argv, sys.path[0] = [str(path)], str(path.parent)
    program = compile(path.read_text(), path, "exec")

    def run() -> None:
        exec(program, vars(script))

    try:
        if is_inside:
            Outer()(run)
        else:
            run()
    except SystemExit as left:
        if left.code not in (None, 0):
            print(f"left with {left.code!r}", file=sys.stderr)
            return 1
    except BaseException as error:  # noqa: BLE001 - whatever ends it, this says so
        traceback.print_exc()
        said = str(error).strip().partition("\n")[0]
        print(f"line {line_of(error, path)}: {type(error).__name__}: {said}", file=sys.stderr)
        return 1
    return 0


def line_of(error: BaseException, path: Path) -> int:
    """The last line of the case on the way to the error."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno or 0 for frame in reversed(frames) if frame.filename == str(path)), 0)


def outcome(path: Path, code: int, output: str, seconds: int) -> Outcome:
    """What a child's exit code says: minus a signal's number, or what `play` returned."""
    if code == -signal.SIGALRM:
        return Outcome(path, f"took more than {seconds} s", output)
    if code < 0:
        return Outcome(path, f"ended by {signal.Signals(-code).name}", output)
    lines = output.strip().splitlines()
    return Outcome(path, (lines[-1] if lines else f"exit code {code}") if code else "", output)
