"""Many scripts from one start of Python: importing a neighbour takes longer than its cases."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHILDREN = """
import json, os, sys, traceback, warnings
warnings.simplefilter("ignore")
import {imports}

for folder in json.load(open("folders.json")):
    child = os.fork()
    if not child:
        os.chdir(folder)
        for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), stream.fileno())
        code = 1
        try:
            exec(compile(open("script.py").read(), "script.py", "exec"), {{"__name__": "__main__"}})
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(os.path.join(folder, "code"), "w") as file:
        file.write(str(code))
"""


@dataclass(frozen=True)
class Outcome:
    """How a script ended, what it and autoamp said, and what it left in result.pt."""

    code: int
    stdout: str
    stderr: str
    result: Any = field(repr=False)

    @property
    def said(self) -> list[str]:
        """What autoamp said, without the summary."""
        return [line for line in self.stderr.splitlines() if line.startswith("autoamp")]


Children = Callable[..., dict[str, Outcome]]


@pytest.fixture(scope="session")
def in_children(python_in: Any, tmp_path_factory: Any) -> Children:
    """`in_children({name: script}, imports="lightning", AUTO_MIXED_PRECISION="1")`: what became
    of each.

    A new interpreter imports what they share (optimizers import Dynamo, which takes a second), and
    each runs in a child of it, in its own folder.
    """

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def run(
        scripts: dict[str, str], imports: str = "torch._dynamo", **variables: str
    ) -> dict[str, Outcome]:
        import torch

        asked = json.dumps([scripts, imports, variables]).encode()
        folder: Path = shared / f"children-{hashlib.sha256(asked).hexdigest()[:16]}"
        folders = {name: folder / str(number) for number, name in enumerate(scripts)}
        with open(f"{folder}.lock", "w") as lock:  # the workers of pytest-xdist run them once
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                for name, path in folders.items():
                    path.mkdir(parents=True)
                    (path / "script.py").write_text(scripts[name])
                order = json.dumps([str(path) for path in folders.values()])
                (folder / "folders.json").write_text(order)
                result = python_in(folder)(CHILDREN.format(imports=imports), **variables)
                assert result.returncode == 0, result.stderr

        def outcome(path: Path) -> Outcome:
            saved = path / "result.pt"
            return Outcome(
                int((path / "code").read_text()),
                (path / "stdout").read_text(),
                (path / "stderr").read_text(),
                torch.load(saved, weights_only=False) if saved.exists() else None,
            )

        return {name: outcome(path) for name, path in folders.items()}

    return run
