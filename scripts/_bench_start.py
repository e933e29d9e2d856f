"""What autoamp adds to the start of a Python process, and to `import torch` when it is wanted."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import _bench
from _bench import Finding, differences, interleave

import autoamp
from autoamp.doctor import shim_directory

PREFIX = ("AUTO_MIXED_PRECISION", "PYTHON")
ACTIVATION = """
import sys
import time
import torch
clock = getattr(time, sys.argv[1])
started = clock()
import autoamp
autoamp.enable()
print(clock() - started)
if not autoamp.status()["active"]:
    raise SystemExit(autoamp.status()["reason"])
"""


def start(rounds: int | None) -> list[Finding]:
    """`python -c pass` in a new virtual environment that holds autoamp and nothing else, against
    one that holds nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        pythons = {name: _environment(Path(folder, name)) for name in ("empty", "again", "ours")}
        _install(Path(folder, "ours"))
        subjects = {
            "empty": functools.partial(_seconds, pythons["empty"]),
            "unset": functools.partial(_seconds, pythons["ours"]),
            "again": functools.partial(_seconds, pythons["again"]),
            "armed": functools.partial(_seconds, pythons["ours"], AUTO_MIXED_PRECISION="1"),
        }
        interleave(subjects, 1)  # the first run compiles
        samples = interleave(subjects, rounds or 200)
    return [
        Finding("start", what, "ms", differences(samples, subject, "empty", 1e3), target)
        for what, subject, target in (
            ("added to `python -c pass`, variable unset", "unset", 1.0),
            ("added by another empty environment: the noise", "again", None),
            ("added to `python -c pass`, variable set", "armed", None),
        )
    ]


def activation(rounds: int | None) -> list[Finding]:
    """`autoamp.enable()` in fresh processes, from the end of torch's import on.

    Measured inside them: the import of torch itself varies by more than what is looked for. What
    the doors do before that is in the row ``start``, variable set.
    """
    _enable_seconds()  # the first run compiles
    values = [_enable_seconds() * 1e3 for _ in range(rounds or 20)]
    what = "end of `import torch` to end of enable(), inside"
    return [Finding("activation", what, "ms", values, 60.0)]


def _environment(folder: Path) -> Path:
    venv.create(folder, symlinks=True)
    return folder / "bin" / "python"


def _install(folder: Path) -> None:
    (site_packages,) = folder.glob("lib/python*/site-packages")
    shutil.copytree(Path(autoamp.__file__).parent, site_packages / "autoamp")
    for name in ("autoamp.pth", "autoamp.start"):
        shutil.copy(Path(shim_directory(), name), site_packages)


def _seconds(python: Path, **variables: str) -> float:
    environment = _without_ours() | variables
    started = _bench.clock()
    subprocess.run([python, "-c", "pass"], env=environment, check=True)
    return _bench.clock() - started


def _enable_seconds() -> float:
    clock = "process_time" if _bench.clock is _bench.cpu_seconds else "perf_counter"
    command = [sys.executable, "-c", ACTIVATION, clock]
    environment = _without_ours() | {"AUTO_MIXED_PRECISION_LOG": "quiet"}
    return float(subprocess.run(command, env=environment, check=True, stdout=-1, text=True).stdout)


def _without_ours() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}


SECTIONS = {"start": start, "activation": activation}
