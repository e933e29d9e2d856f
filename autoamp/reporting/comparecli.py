"""The command `autoamp compare`: plays the runs, shows how far they are, and what they tell."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import report
from ..settings import SWITCH
from . import compare
from .playing import OBSERVER, Run, play

EXIT = {"agrees": 0, "unknown": 0, "failed": 1, "broken": 1, "disagrees": 3}
"""The exit code by verdict; the worst counts."""
_SWITCHES = (SWITCH, f"{SWITCH}_POLICY", f"{SWITCH}_REPORT", f"{SWITCH}_TENSORBOARD")


def run(arguments: argparse.Namespace, command: list[str], path: list[str]) -> int:
    """Play the runs of `command`, with these folders on the path of Python; the exit code."""
    try:
        steps_from = re.compile(arguments.steps_from) if arguments.steps_from else None
        if problem := _obstacle(arguments.output):
            raise ValueError(problem)
    except (re.error, ValueError) as error:
        _say(f"{error}")
        return 2
    policies = [word.strip() for word in arguments.policy.split(",") if word.strip()]
    variants = [compare.FLOAT32, *(policies or ["default"])]
    # The command's own way with Ctrl-C is to end; here it is to say what there is.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runs: list[Run] = []
    with (
        tempfile.TemporaryDirectory(prefix="autoamp-compare-") as folder,
        _display(arguments.verbose, len(variants) * arguments.repeat) as display,
    ):
        for one, environ in _plan(variants, arguments, path):
            runs.append(one)
            place = Path(folder, str(len(runs)))
            try:
                with display(one) as listen:
                    play(one, command, environ, place, listen, steps_from)
            except OSError as error:
                _say(f"{command[0]}: {error.strerror}")
                return 127
            except KeyboardInterrupt:
                break
            if one.variant == variants[-1] and all(played.failed for played in runs):
                break
    content = compare.told(runs, variants, shlex.join(command), arguments.repeat)
    print("\n".join(compare.lines(content, _size)))
    if arguments.output and (problem := _save(arguments.output, content)):
        _say(problem)
        return 1
    return max(EXIT[verdict["word"]] for verdict in content["verdicts"])


def _plan(
    variants: Sequence[str], arguments: argparse.Namespace, path: list[str]
) -> Iterator[tuple[Run, dict[str, str]]]:
    """The runs, alternating, every other round in the opposite order after the first."""
    kept = {name: value for name, value in os.environ.items() if name not in _SWITCHES}
    search = [str(OBSERVER), *path, *filter(None, (os.environ.get("PYTHONPATH"),))]
    kept["PYTHONPATH"] = os.pathsep.join(search)
    if arguments.dtype is not None:
        kept[f"{SWITCH}_DTYPE"] = arguments.dtype
    for repeat in range(arguments.repeat):
        for name in variants if repeat % 2 == 0 else reversed(variants):
            own = {SWITCH: "0"}
            if name != compare.FLOAT32:
                own = {SWITCH: "1", f"{SWITCH}_POLICY": name}
            yield Run(name, repeat), {**kept, **own}


Display = Callable[[Run], "contextlib.AbstractContextManager[Callable[[str, bool], None]]"]


@contextlib.contextmanager
def _display(verbose: bool, total: int) -> Iterator[Display]:
    """How far it is: a bar on a terminal that has `rich`, otherwise a line for each run."""
    progress = None
    if sys.stderr.isatty() and not verbose:
        with contextlib.suppress(ImportError):
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[last]}", markup=False),
            )
            progress = Progress(*columns, console=Console(stderr=True), transient=True)
    number = iter(range(1, total + 1))

    @contextlib.contextmanager
    def show(one: Run) -> Iterator[Callable[[str, bool], None]]:
        index = next(number)
        word = f"run {index} of {total}: {one.variant}"
        started = time.perf_counter()
        task = None
        if progress is not None:
            task = progress.add_task(word, total=None, last="")
        else:
            _say(word)

        def listen(line: str, is_error: bool) -> None:
            if verbose:
                print(line, file=sys.stderr if is_error else sys.stdout, flush=True)
            if progress is not None and task is not None:
                progress.update(task, last=line.strip()[:60])

        try:
            yield listen
        finally:
            seconds = time.perf_counter() - started
            ended = "" if not one.failed else f", failed with exit code {one.code}"
            done = f"{word}: {seconds:.1f} s, {one.steps:,} steps{ended}"
            if progress is not None and task is not None:
                progress.update(task, total=1, completed=1, last=done.partition(": ")[2])
            else:
                _say(done)

    with progress if progress is not None else contextlib.nullcontext():
        yield show


def _obstacle(path: str | None) -> str:
    if path is None:
        return ""
    if Path(path).suffix not in (".html", ".json"):
        return f"-o {path}: name a file like compare.html or compare.json"
    if Path(path).suffix == ".html":
        try:
            importlib.import_module("autoamp.reporting.page")
        except ImportError as error:
            return f"{error.name} is not installed (pip install 'autoamp[report]')"
    return report.stranger(Path(path))


def _save(path: str, content: dict[str, Any]) -> str:
    """Write the page or the data; what is wrong, empty if nothing is."""
    try:
        if Path(path).suffix == ".html":
            from . import page

            text = page.comparison(content)
        else:
            text = json.dumps({"schema": 1, "autoamp": "compare", **content}, indent=1) + "\n"
        report.write_text(path, text)
    except OSError as error:
        return f"{path}: {error.strerror}; nothing written"
    return ""


def _size(number: float) -> str:
    return f"{number / 2**20:,.0f} MiB"


def _say(text: str) -> None:
    print(f"autoamp compare: {text}", file=sys.stderr, flush=True)
