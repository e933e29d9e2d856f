"""What a run has taught becomes a policy, with which the same run has nothing more to learn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoamp import learned, policyfile, report
from autoamp.cli import main

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)

class Head(nn.Module):  # its own code: an eps
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(Wide(), nn.Linear(4, 4))

    def forward(self, x):
        return self.inner(x) / (x.abs() + 1e-8)

class Wide(nn.Module):  # its product leaves float16 once it has grown
    def __init__(self):
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), 1.0

    def forward(self, x):
        return self.linear(x * self.factor) / self.factor

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), Head()

    def forward(self, x):
        return self.head(self.body(x))

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
for step in range(12):
    if step == 3:
        net.head.inner[0].factor = 1e6
    optimizer.zero_grad()
    loss = net(torch.rand(8, 4) + 1).pow(2).mean()
    loss.backward()
    optimizer.step()
print(f"{loss.item():.2f}")
"""


def test_with_what_it_learned_a_second_run_demotes_and_skips_nothing(
    run_script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(policy: str, name: str) -> tuple[str, dict[str, Any]]:
        result = run_script(
            SCRIPT,
            AUTO_MIXED_PRECISION="1",
            AUTO_MIXED_PRECISION_POLICY=policy,
            AUTO_MIXED_PRECISION_DTYPE="float16",
            AUTO_MIXED_PRECISION_REPORT=name,
        )
        assert result.returncode == 0, result.stderr
        assert "match" not in result.stderr  # no rule is for nothing
        return result.stdout, json.loads((tmp_path / name).read_text())

    plain = run_script(SCRIPT).stdout
    _, first = run("default", "first.json")
    assert {d["module"]: d["below"] for d in first["demotions"]} == {
        "head": False,
        "head.inner.0.linear": True,
    }
    assert first["steps"]["skipped"] > 0
    out = tmp_path / "learned.yaml"
    assert main(["report", str(tmp_path / "first.json"), "--policy", str(out)]) == 0
    assert f"AUTO_MIXED_PRECISION_POLICY={out}" in capsys.readouterr().out
    said, second = run(str(out), "second.json")
    assert second["demotions"] == []
    assert second["steps"] == {"taken": 12, "skipped": 0}
    assert float(said) == pytest.approx(float(plain), rel=2e-2)


def described(**changes: Any) -> dict[str, Any]:
    content = report.describe_inactive("", ".pth")
    source = str(policyfile.shipped()["default"])
    content |= {"active": True, "policy": {"name": "default", "source": source}}
    return content | changes


def demotion(module: str, below: bool, step: int = 0) -> dict[str, Any]:
    return {
        "module": module,
        "type": "Head",
        "below": below,
        "cause": "add: float16 cannot hold the constant 1e-08",
        "where": "train.py:3",
        "step": step,
    }


def rules(*demotions: dict[str, Any]) -> list[dict[str, str]]:
    text = learned.policy(described(demotions=list(demotions)), "run.json")
    import yaml

    return yaml.safe_load(text).get("modules", [])


@pytest.mark.parametrize(
    ("demotions", "expected"),
    [
        ([], []),
        ([demotion("a", True)], [{"name": "a", "precision": "float32"}]),
        (
            [demotion("a", False)],
            [{"name": "a", "precision": "float32"}, {"name": "a.*", "precision": "lower"}],
        ),
        (
            [demotion("", False), demotion("a.b", True), demotion("a", False), demotion("a", True)],
            [
                {"regex": r"a\.b(\..*)?", "precision": "float32"},
                {"regex": r"a(\..*)?", "precision": "float32"},
                {"name": "", "precision": "float32"},
                {"name": "*", "precision": "lower"},
            ],
        ),
        ([demotion("a[0]", True)], [{"regex": r"a\[0\]", "precision": "float32"}]),
    ],
)
def test_rules_are_for_what_was_demoted_inner_modules_first(
    demotions: list[dict[str, Any]], expected: list[dict[str, str]]
) -> None:
    assert rules(*demotions) == expected


def test_the_first_scale_is_the_one_that_held_after_the_last_demotion(tmp_path: Path) -> None:
    content = described(
        demotions=[demotion("a", True, step=5)],
        steps={"taken": 10, "skipped": 4},
        loss_scale={
            "mode": "dynamic",
            "initial": 65536.0,
            "final": 16384.0,
            "history": [[0, 65536.0], [3, 1.0], [6, 8192.0], [9, 16384.0]],
            "owner": "autoamp",
        },
    )
    path = tmp_path / "learned.yaml"
    path.write_text(learned.policy(content, "run.json"))
    assert policyfile.load(str(path), "test").loss_scale.init == 8192.0


MISTAKES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no such file": (lambda path: None, "No such file"),
    "no JSON": (lambda path: path.write_text("hello"), "this is no JSON"),
    "no report": (lambda path: path.write_text("[]"), "this is no report of version"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_no_report_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, says = MISTAKES[name]
    make(tmp_path / "r.json")
    assert main(["report", str(tmp_path / "r.json")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert says in said


def test_a_file_that_exists_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.json").write_text(json.dumps(described()))
    out = tmp_path / "mine.yaml"
    out.write_text("mine")
    assert main(["report", str(tmp_path / "r.json"), "--policy", str(out)]) == 1
    assert out.read_text() == "mine"
    assert "exists" in capsys.readouterr().err


def test_a_report_is_told_in_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = described(
        demotions=[demotion("a", False), demotion("", True)],
        devices={"cpu": {"dtype": "float16", "why": ""}},
    )
    (tmp_path / "r.json").write_text(json.dumps(content))
    assert main(["report", str(tmp_path / "r.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == 'policy "default"'
    assert lines[-2].startswith("a without the modules that it calls (Head) runs in float32")
    assert lines[-1].startswith("the whole model (Head) runs in float32")
