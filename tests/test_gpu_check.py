"""The check for GPUs ends well where there is none, and says what is wrong where something is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[1] / "scripts" / "gpu_check"


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, CHECK, "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_on_a_cpu_all_is_right_but_for_what_only_cuda_has(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = check("--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(file.read_text())
    outcomes = {found["check"]: found["outcome"] for found in content["checks"]}
    assert {name for name, outcome in outcomes.items() if outcome == "-"} == {"graphs", "memory"}
    assert set(outcomes.values()) == {"-", "right"}
    assert {"date", "card", "torch", "cuda", "python"} == content["machine"].keys()
    assert "13 of 13 right" in done.stdout


def test_a_wrong_result_is_said_and_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a GradScaler that quarters what it should halve: autoamp's scales are others."""
    (tmp_path / "sitecustomize.py").write_text(
        "import torch\n"
        "init = torch.amp.GradScaler.__init__\n"
        "def wrong(self, *args, **kwargs):\n"
        "    init(self, *args, **{**kwargs, 'backoff_factor': 0.25})\n"
        "torch.amp.GradScaler.__init__ = wrong\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = check("--only", "overflow")
    assert done.returncode == 1
    assert "WRONG" in done.stdout
    assert "0 of 1 right; wrong: ['overflow']" in done.stdout
