"""What the environment of a process may have autoamp do: docs/security.md, claim by claim."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import autoamp
from autoamp import policyfile
from autoamp.errors import PolicyError

SWITCH = "AUTO_MIXED_PRECISION"
TRAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(2, 2))
model(torch.ones(1, 2))
"""


@pytest.mark.parametrize(
    "text",
    [
        "modules: [{type: !!python/name:os.system , precision: float32}]",
        "!!python/object/apply:os.system ['echo got in > {mark}']",
        "extends: !!python/object/new:os.system ['echo got in > {mark}']",
        "outputs: !include {mark}",
    ],
)
def test_a_policy_makes_no_objects(tmp_path: Path, text: str) -> None:
    mark, file = tmp_path / "mark", tmp_path / "mine.yaml"
    file.write_text(text.replace("{mark}", str(mark)))
    with pytest.raises(PolicyError, match=r"mine\.yaml:1:\d+"):
        policyfile.load(str(file), "a test")
    assert not mark.exists()


def test_a_policy_imports_nothing_that_it_names(run_python, tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text("open('mark', 'w'); raise SystemExit(9)\n")
    (tmp_path / "mine.yaml").write_text("modules: [{type: trap.Layer, precision: float32}]\n")
    result = run_python(
        TRAIN, AUTO_MIXED_PRECISION="./mine.yaml", AUTO_MIXED_PRECISION_DTYPE="float16"
    )
    assert result.returncode == 0, result.stderr
    assert "on: cpu float16" in result.stderr
    assert not (tmp_path / "mark").exists()


def test_a_name_with_escapes_stays_one_printable_line(run_python) -> None:
    """Module names may come from a configuration that somebody else has written."""
    script = """
import torch
class Part(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1e-8
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("evil\\nautoamp: all is well \\x1b[2J", Part(2, 2))
    def forward(self, x):
        return next(self.children())(x)
Part.__module__ = "somewhere\\nautoamp: off"
Net()(torch.ones(1, 2))
"""
    result = run_python(script, AUTO_MIXED_PRECISION="1", AUTO_MIXED_PRECISION_DTYPE="float16")
    assert result.returncode == 0, result.stderr
    _, demoted, summary = result.stderr.splitlines()
    assert r"evil\nautoamp: all is well \x1b[2J" in demoted
    assert "\x1b" not in result.stderr
    assert summary.endswith("1 module demoted to float32")


@pytest.mark.skipif(
    not hasattr(os, "setreuid") or os.geteuid() != 0,
    reason="only root can start a process with rights that its user lacks: run it as root",
)
def test_borrowed_rights_leave_the_variables_unread(tmp_path: Path) -> None:
    """As in a setuid program: neither a policy is read nor a report written with them."""
    secret, report = tmp_path / "secret", tmp_path / "run.json"
    secret.write_text("root: $6$hash\n")
    script = tmp_path / "script.py"
    script.write_text(TRAIN + "import autoamp\nprint(autoamp.status()['reason'])\n")
    places = [Path(autoamp.__file__).parents[1], *map(Path, sys.path)]
    done = subprocess.run(
        [sys.executable, script],
        env={
            SWITCH: str(secret),
            f"{SWITCH}_REPORT": str(report),
            "PYTHONPATH": os.pathsep.join(map(str, places)),
            "PATH": os.defpath,
        },
        preexec_fn=lambda: os.setreuid(65534, 0),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "hash" not in done.stderr
    assert "autoamp" not in done.stderr
    assert not report.exists()
    assert done.stdout == (
        "the process has rights that its user lacks (setuid or setgid): "
        "the variables are not read\n"
    )


def test_isolated_python_still_heeds_the_variable(run_python, tmp_path: Path) -> None:
    """`-I` and `-E` are about Python's own variables; what an image sets for its users holds."""
    script = tmp_path / "script.py"
    script.write_text(TRAIN)
    for flags in (["-I"], ["-E"]):
        done = subprocess.run(
            [sys.executable, *flags, "-c", f"import runpy; runpy.run_path({str(script)!r})"],
            env={SWITCH: "1", f"{SWITCH}_DTYPE": "bfloat16", "PATH": os.defpath},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith("autoamp"), (flags, done.stderr)
