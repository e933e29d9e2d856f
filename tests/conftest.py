"""Mixed precision in this process, and fresh interpreters for what only a whole process shows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from variables import NOT_INHERITED, PREFIX

import autoamp
from autoamp.doctor import shim_directory

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`mixed(policy, dtype, LOSS_SCALE="128")`: autoamp is active in this process, until the end.

    `dtype` is forced on every device unless it is None. Returns the session. A second call starts
    afresh.
    """

    def enable(policy: str = "torch", dtype: str | None = "float16", **variables: str) -> Any:
        autoamp.disable()
        for name in [name for name in os.environ if name.startswith(PREFIX)]:
            monkeypatch.delenv(name)
        if dtype is not None:
            monkeypatch.setenv(f"{PREFIX}_DTYPE", dtype)
        for name, value in variables.items():
            monkeypatch.setenv(f"{PREFIX}_{name}", value)
        autoamp.enable(policy)
        status = autoamp.status()
        assert status["active"], status["reason"]
        from autoamp import activation

        return activation.session()

    yield enable
    autoamp.disable()


@pytest.fixture(scope="session")
def python_in() -> Callable[[Path], Run]:
    """`python_in(folder)` is what `run_python` is, for fixtures that live longer than one test."""

    def make(folder: Path) -> Run:
        def run(
            script: str | Path,
            *arguments: str,
            pythonpath: tuple[str | Path, ...] = (),
            **variables: str,
        ) -> subprocess.CompletedProcess[str]:
            if isinstance(script, str):
                path = folder / "script.py"
                path.write_text(script)
            else:
                path = script
            kept = {k: v for k, v in os.environ.items() if not k.startswith(NOT_INHERITED)}
            ours = (shim_directory(), Path(autoamp.__file__).parents[1])
            search = os.pathsep.join(map(str, (*pythonpath, *ours)))
            return subprocess.run(
                [sys.executable, path, *arguments],
                env={**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": search, **variables},
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )

        return run

    return make


@pytest.fixture
def run_python(python_in: Callable[[Path], Run], tmp_path: Path) -> Run:
    """`run_python(script, *arguments, AUTO_MIXED_PRECISION="1")`: a script in a new interpreter.

    `script` is its text (it becomes script.py) or the path of a file; it runs in `tmp_path`, on one
    thread, with the autoamp under test within reach and, of autoamp's variables, those given here
    and no others. `pythonpath` names folders that come before everything else.
    """
    return python_in(tmp_path)
