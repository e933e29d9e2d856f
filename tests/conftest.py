"""Mixed precision in this process, and fresh interpreters for what only a whole process shows."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401 - every optimizer loads it
from variables import NOT_INHERITED, PREFIX

import autoamp
from autoamp.doctor import shim_directory

Run = Callable[..., "subprocess.CompletedProcess[str]"]

gc.freeze()
"""Activation looks through all objects, for optimizers, hooks and modules: torch brings none."""
LONGEST = ("test_metrics", "test_cases", "test_ranks", "test_trainers", "test_every_op")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, or one worker plays it in the end while others have done."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)


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
            return subprocess.run(
                [sys.executable, _path(script, folder), *arguments],
                env=_environment(*pythonpath, **variables),
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


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """`warm(script, *arguments, cwd=folder, env=variables)`: in a child of a process with torch."""
    folder = tmp_path_factory.mktemp("warm")
    said = [folder / name for name in ("stdout", "stderr")]
    command = [sys.executable, Path(__file__).with_name("warm.py"), *said]
    off = _environment(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=off, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asks, answers = process.stdin, process.stdout

        def run(*command: str, **where: Any) -> subprocess.CompletedProcess[str]:
            print(json.dumps({"command": command, **where}), file=asks, flush=True)
            code = int(answers.readline())
            return subprocess.CompletedProcess(command, code, *(path.read_text() for path in said))

        yield run
        process.kill()


@pytest.fixture
def run_script(warm: Run, run_python: Run, tmp_path: Path) -> Run:
    """What `run_python` is without the start of an interpreter, where no claim is about that.

    The script finds torch imported. With a `pythonpath` it is `run_python`.
    """

    def run(
        script: str | Path, *arguments: str, **variables: Any
    ) -> subprocess.CompletedProcess[str]:
        if "pythonpath" in variables:
            return run_python(script, *arguments, **variables)
        command = map(str, (_path(script, tmp_path), *arguments))
        return warm(*command, cwd=str(tmp_path), env=_environment(**variables))

    return run


def _path(script: str | Path, folder: Path) -> Path:
    if isinstance(script, str):
        path = folder / "script.py"
        path.write_text(script)
        return path
    return script


def _environment(*pythonpath: str | Path, **variables: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(NOT_INHERITED)}
    ours = (shim_directory(), Path(autoamp.__file__).parents[1])
    search = os.pathsep.join(map(str, (*pythonpath, *ours)))
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": search, **variables}
