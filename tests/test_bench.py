"""`scripts/bench` runs and writes what its docstring says; how fast anything is, is not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
BENCH = SCRIPTS / "bench"
sys.path.insert(0, str(SCRIPTS))

import _bench  # noqa: E402 - scripts are no package
import _bench_growth  # noqa: E402
import _bench_tasks  # noqa: E402
import _bench_training  # noqa: E402
import _bench_ways  # noqa: E402


def test_bench_writes_the_documented_keys(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    page = tmp_path / "bench.md"
    command = [sys.executable, BENCH, "--small", "--quick", "--busy", "--rows", "machinery"]
    command += ["--json", file, "--markdown", page]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert not run.stderr
    content = json.loads(file.read_text())
    assert content.keys() == {"schema", "machine", "findings", "left_out"}
    assert content["machine"].keys() == {
        *("autoamp", "torch", "python", "cpu", "threads", "clock", "device", "sizes")
    }
    for finding in content["findings"]:
        low, median, high = (
            finding.pop(key) for key in ("lower_quartile", "median", "upper_quartile")
        )
        assert low <= median <= high
        assert finding.keys() == {"row", "what", "unit", "target", "values"}
        assert len(finding["values"]) == 2
        assert f"{finding['row']:<22}{finding['what']}" in run.stdout
    rows = {finding["row"] for finding in content["findings"]}
    assert rows == {"machinery float16"}
    assert "| machinery, FP16 |" in page.read_text()


@pytest.fixture(autouse=True)
def one_small_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of one step, and no more variants than it takes to compare."""
    monkeypatch.setattr(_bench, "is_small", True)
    monkeypatch.setattr(_bench, "sample_seconds", 0.0)
    monkeypatch.setattr(_bench, "left_out", [])
    monkeypatch.setenv(_bench_ways.VARIABLE, "bfloat16")  # put back as it was
    few = ("hand-written", "autoamp torch", "autoamp default", "autoamp default, forced", "float32")
    few_variants = {name: _bench_ways.VARIANTS[name] for name in few}
    monkeypatch.setattr(_bench_ways, "VARIANTS", few_variants)


@pytest.mark.parametrize("row", _bench_tasks.WORKLOADS)
def test_each_row_computes_the_same_by_hand_and_by_autoamp(row: str) -> None:
    findings = _bench_training.compare(row, 1)
    assert {finding.row.rpartition(" ")[0] for finding in findings} == {row}
    measured = {finding.what.split(": ")[-1] for finding in findings}
    if not _bench.left_out:
        names = ("torch", "default, forced")
        assert {f"autoamp {name} / hand-written" for name in names} <= measured
    assert all(value > 0 for finding in findings for value in finding.values)


def test_what_a_machine_cannot_run_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_autocast(device: str, dtype: object) -> _bench_ways.Way:
        raise RuntimeError("no such arithmetic\nand much more")

    variants = _bench_ways.VARIANTS | {"hand-written": _bench_ways.Variant(no_autocast)}
    monkeypatch.setattr(_bench_ways, "VARIANTS", variants)
    findings = _bench_training.compare("lstm", 1)
    assert {finding.what for finding in findings} == {
        "autoamp default / float32",
        "autoamp default / the faster of float32 and forced",
        "speed-up of autoamp default over float32",
    }
    assert "lstm bfloat16: hand-written: no such arithmetic\n" in capsys.readouterr().out


def test_targets_are_of_comparisons_that_are_made() -> None:
    made = {(one.above, one.below) for one in _bench_training.COMPARISONS}
    for workload in _bench_tasks.WORKLOADS.values():
        assert workload.targets.keys() <= made


def test_every_row_checks_that_the_faster_precision_is_chosen() -> None:
    for workload in _bench_tasks.WORKLOADS.values():
        if torch.bfloat16 in workload.dtypes:
            assert _bench_tasks.RIGHT.items() <= workload.targets.items()


def test_different_losses_end_the_bench() -> None:
    losses = {"hand-written": [1.0, 0.5], "autoamp torch": [1.0, 0.5001], "float32": [1.0, 0.4]}
    with pytest.raises(SystemExit, match="autoamp torch computes"):
        _bench_training.check(losses, 0.1)
    del losses["autoamp torch"]
    with pytest.raises(SystemExit, match=r"float32 computes .* far from hand-written"):
        _bench_training.check(losses, 0.1)


def test_a_target_between_the_quartiles_is_open() -> None:
    verdicts = {
        target: _bench.Finding("row", "what", "x", [1.0, 2.0, 3.0], target).verdict
        for target in (None, 0.5, 1.9, 2.1, 4.0)
    }
    assert verdicts == {None: "", 0.5: "missed", 1.9: "missed?", 2.1: "held?", 4.0: "held"}


def test_growth_is_told_by_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bench_growth, "COUNTS", (10, 100))
    findings = list(_bench_growth.growth(1))
    assert [finding.row for finding in findings] == [
        f"growth {word}" for word in ("bfloat16", "float16") for _ in range(8)
    ]
