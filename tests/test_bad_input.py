"""Whatever is asked for wrongly costs one line that says what to do; the script runs as it is."""

from __future__ import annotations

import importlib.metadata

import pytest

SWITCH = "AUTO_MIXED_PRECISION"
SCRIPT = """
import sys, torch
class Look(torch.nn.Linear):
    def forward(self, x):
        return (super().forward(x).dtype, torch.is_autocast_enabled("cpu"))
print("started", *Look(2, 2)(torch.ones(1, 2)))
sys.exit(7)
"""
OLD_TORCH = '__version__ = "2.1.0"\n'
OLD_SCRIPT = "import sys, torch; print('started', torch.__version__); sys.exit(7)"
MISSING = "raise ModuleNotFoundError(\"No module named '{0}'\", name='{0}')\n"
POLICIES = {
    "broken.yaml": "devices: {cuda: float16\n",
    "key.yaml": "outputs: float32\nlossscale: {init: 128}\n",
    "dtype.yaml": "devices:\n  cpu: bfloat61\n",
}
CASES = {  # the variables, and the middle of the line
    "missing policy file": (
        {SWITCH: "./none.yaml"},
        "{here}/none.yaml: No such file or directory; give the path of a readable policy file",
    ),
    "malformed YAML": ({SWITCH: "./broken.yaml"}, "{here}/broken.yaml:2:1: not valid YAML: {...}"),
    "unknown key": (
        {SWITCH: "./key.yaml"},
        "{here}/key.yaml:2:1: unknown key 'lossscale'. Did you mean 'loss_scale'?",
    ),
    "unknown dtype in the policy": (
        {SWITCH: "1", f"{SWITCH}_POLICY": "./dtype.yaml"},
        "{here}/dtype.yaml:2:8: devices.cpu is 'bfloat61'. Did you mean 'bfloat16'?",
    ),
    "unknown policy": (
        {SWITCH: "1", f"{SWITCH}_POLICY": "defautl"},
        "AUTO_MIXED_PRECISION_POLICY: unknown policy 'defautl'. Did you mean 'default'? "
        "A file is named by its path: ./defautl.yaml",
    ),
    "a typing error in the switch": (
        {SWITCH: "ture"},
        "AUTO_MIXED_PRECISION: unknown policy 'ture'. {...}",
    ),
    "wrong dtype": (
        {SWITCH: "1", f"{SWITCH}_DTYPE": "fp16"},
        "AUTO_MIXED_PRECISION_DTYPE=fp16: use one of: float16, bfloat16",
    ),
    "unknown variable": (
        {SWITCH: "1", f"{SWITCH}_DTYP": "float16"},
        "AUTO_MIXED_PRECISION_DTYP: unknown variable. Did you mean AUTO_MIXED_PRECISION_DTYPE?",
    ),
    "report in a missing directory": (
        {SWITCH: "1", f"{SWITCH}_REPORT": "no/run.json"},
        "AUTO_MIXED_PRECISION_REPORT=no/run.json: there is no directory no; "
        "name a file that can be written",
    ),
    "report is a directory": (
        {SWITCH: "1", f"{SWITCH}_REPORT": "folder.json"},
        "AUTO_MIXED_PRECISION_REPORT=folder.json: it is a directory; "
        "name a file that can be written",
    ),
    "report is neither JSON nor a page": (
        {SWITCH: "1", f"{SWITCH}_REPORT": "run.txt"},
        "AUTO_MIXED_PRECISION_REPORT=run.txt: a report is JSON or a page; "
        "name a file like run.json or run.html",
    ),
    "wrapt is missing": ({SWITCH: "1"}, "wrapt is not installed (pip install wrapt)"),
    "yaml is missing": ({SWITCH: "1"}, "yaml is not installed (pip install pyyaml)"),
    "torch is too old": (
        {SWITCH: "1"},
        "torch 2.1.0 is too old; install torch 2.11 or later, or unset AUTO_MIXED_PRECISION",
    ),
}
STRICT_TOO = ("unknown key", "wrong dtype", "unknown variable", "wrapt is missing")


@pytest.fixture
def start(run_python, tmp_path):
    """`start(case)` runs the script in that case's world."""
    for name, text in POLICIES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder.json").mkdir()

    def run(case: str, **more: str):
        script, world = SCRIPT, tmp_path / "world"
        world.mkdir()
        if case.endswith("is missing"):
            name = case.split()[0]
            (world / f"{name}.py").write_text(MISSING.format(name))
        if case == "torch is too old":
            (world / "torch").mkdir()
            (world / "torch" / "__init__.py").write_text(OLD_TORCH)
            script = OLD_SCRIPT
        dtype = {} if f"{SWITCH}_DTYPE" in CASES[case][0] else {f"{SWITCH}_DTYPE": "bfloat16"}
        return run_python(script, pythonpath=(world,), **{**dtype, **CASES[case][0], **more})

    return run


def check_line(stderr: str, case: str, end: str, here: object) -> None:
    line = stderr.removesuffix("\n")
    assert "\n" not in line, stderr
    reason, dots, _ = CASES[case][1].replace("{here}", str(here)).partition("{...}")
    if dots:
        assert line.startswith(f"autoamp: off in this process: {reason}")
        assert line.endswith(f"; {end}")
    else:
        assert line == f"autoamp: off in this process: {reason}; {end}"


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_costs_one_line_and_the_script_runs_in_float32(start, case, tmp_path):
    result = start(case)
    assert result.returncode == 7
    found = "2.1.0" if case == "torch is too old" else "torch.float32 False"
    assert result.stdout == f"started {found}\n"
    check_line(result.stderr, case, "the program continues in float32", tmp_path)


@pytest.mark.parametrize("case", STRICT_TOO)
def test_where_strictness_is_asked_for_the_script_does_not_start(start, case, tmp_path):
    result = start(case, AUTO_MIXED_PRECISION_STRICT="1")
    assert (result.returncode, result.stdout) == (2, "")
    check_line(result.stderr, case, "stopped (AUTO_MIXED_PRECISION_STRICT=1)", tmp_path)


def test_a_mistake_is_none_while_autoamp_is_off(run_python):
    result = run_python(SCRIPT, **{SWITCH: "0", f"{SWITCH}_DTYPE": "fp16"})
    assert (result.returncode, result.stderr) == (7, "")


def test_without_a_mistake_the_same_script_runs_in_lower_precision(run_python):
    result = run_python(SCRIPT, **{SWITCH: "1", f"{SWITCH}_DTYPE": "bfloat16"})
    assert (result.returncode, result.stdout) == (7, "started torch.bfloat16 True\n")


def test_a_torch_that_has_lost_something_costs_a_line_and_not_the_program(run_python):
    result = run_python(
        """
        import os, torch
        del torch._amp_update_scale_
        os.environ["AUTO_MIXED_PRECISION"] = "1"
        os.environ["AUTO_MIXED_PRECISION_DTYPE"] = "float16"
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    """.replace("\n        ", "\n")
    )
    assert result.returncode == 0, result.stderr
    version = importlib.metadata.version("torch")
    assert result.stderr.startswith(
        f"autoamp: off in this process: torch {version} does not have torch._amp_update_scale_; "
        "install an autoamp that knows this torch, or unset AUTO_MIXED_PRECISION; "
    )
