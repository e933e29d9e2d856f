"""An interpreter and its environment, and what a program that ran there says of autoamp."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUBS = Path(__file__).with_name("stubs")
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
CURRENT = f"{sys.version_info.major}.{sys.version_info.minor}"
START_FILES = ("autoamp.pth", "autoamp.start")


def find_python(version: str) -> Path:
    """The interpreter of this version that the machine has; skips the test where it has none."""
    if version == CURRENT:
        return Path(sys._base_executable)
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    if found:
        return found[-1]
    on_path = shutil.which(f"python{version}")
    if on_path is None:
        pytest.skip(
            f"no Python {version} in ~/.pyenv or on PATH: pyenv install {version} brings it"
        )
    return Path(on_path)


@dataclass(frozen=True)
class Environment:
    """One interpreter and the environment variables that every run of it gets."""

    python: Path
    site: Path
    variables: dict[str, str] = field(default_factory=dict)

    def run(self, *arguments: str | Path, **variables: str | None) -> SimpleNamespace:
        """Run it; `code`, `stdout` and `stderr` of the process, as they are."""
        clean = {"PATH": os.defpath, "HOME": str(self.python.parent), "LANG": "C.UTF-8"}
        wanted = {**clean, **self.variables, **variables}
        process = subprocess.run(
            [self.python, *arguments],
            env={name: value for name, value in wanted.items() if value is not None},
            cwd=self.python.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        return SimpleNamespace(
            code=process.returncode, stdout=process.stdout, stderr=process.stderr
        )

    def report(self, code: str, *flags: str, **variables: str | None) -> SimpleNamespace:
        """What autoamp did while this code ran; plus `printed` and `stderr`."""
        program = f"{code}\nimport probe; probe.report()\n"
        result = self.run(*flags, "-c", program, **variables)
        assert result.code == 0, result.stderr
        *printed, found = result.stdout.splitlines()
        return SimpleNamespace(**json.loads(found), printed=printed, stderr=result.stderr)

    def on(self, **variables: str) -> Environment:
        """The same with AUTO_MIXED_PRECISION=1 and these variables."""
        both = {**self.variables, "AUTO_MIXED_PRECISION": "1", **variables}
        return Environment(self.python, self.site, both)


def doors(report: SimpleNamespace) -> list[str]:
    """The doors that led to an activation."""
    return [call["door"] for call in report.calls]


def modules_of_autoamp(report: SimpleNamespace) -> list[str]:
    return [name for name in report.modules if name.partition(".")[0] == "autoamp"]
