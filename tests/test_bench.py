"""`scripts/bench` runs and writes what its docstring says; how fast anything is, is not tested."""

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1] / "scripts" / "bench"


def test_bench_writes_the_documented_keys(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    command = [sys.executable, BENCH, "--quick", "--busy", "--rows", "mlp", "--json", file]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert not run.stderr
    content = json.loads(file.read_text())
    assert content.keys() == {"schema", "machine", "findings"}
    assert content["machine"].keys() == {"autoamp", "torch", "python", "cpu", "threads", "clock"}
    for finding in content["findings"]:
        low, median, high = (
            finding.pop(key) for key in ("lower_quartile", "median", "upper_quartile")
        )
        assert low <= median <= high
        assert finding.keys() == {"row", "what", "unit", "target", "values"}
        assert len(finding["values"]) == 2
        assert f"{finding['row']:<22}{finding['what']}" in run.stdout
    rows = {finding["row"] for finding in content["findings"]}
    assert rows == {"mlp bfloat16", "mlp float16"}
