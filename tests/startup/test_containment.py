"""Whatever goes wrong in autoamp, the program runs as without it and one line says so."""

import re
import subprocess
import zipfile
from pathlib import Path

import pytest
from environments import START_FILES

STRICT = {"AUTO_MIXED_PRECISION_STRICT": "1"}
PROGRAM = "import sys, torch; torch.optim.SGD(); print('trained'); sys.exit(7)"
DOORS = {
    ".pth": {"AUTO_MIXED_PRECISION": "1"},
    "torch.backends": {"SET": "before"},
    "Optimizer.__init__": {"SET": "after"},
}
SCRIPT = """
import os, sys
if os.environ.get("SET") == "before": os.environ["AUTO_MIXED_PRECISION"] = "1"
import torch
if os.environ.get("SET") == "after": os.environ["AUTO_MIXED_PRECISION"] = "1"
torch.optim.SGD()
print("trained")
sys.exit(7)
"""
ERRORS = {
    "raise ImportError('no kernel image')": "ImportError: no kernel image",
    "raise RuntimeError('two\\n  lines.')": "RuntimeError: two lines",
    "raise SystemExit(3)": "SystemExit: 3",
    "exec('def broken(:')": "SyntaxError: invalid syntax (<string>, line 1)",
    "from autoamp.errors import PolicyError as e; raise e('a.yaml:1:2: what.')": "a.yaml:1:2: what",
    "import wrapt": "wrapt is not installed (pip install wrapt)",
    "import yaml": "yaml is not installed (pip install pyyaml)",
    "import absent": "ModuleNotFoundError: No module named 'absent'",
}


def line(message: str) -> str:
    return f"autoamp: off in this process: {message}; the program continues in float32\n"


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_costs_one_line_and_the_program_ends_its_own_way(current, error, door):
    result = current.run("-c", SCRIPT, STUB_ACTIVATE=error, **DOORS[door])
    assert (result.code, result.stdout) == (7, "trained\n")
    assert result.stderr == line(ERRORS[error])


@pytest.mark.parametrize("door", DOORS)
def test_where_strictness_is_asked_for_an_error_stops_the_program_with_one_line(installed, door):
    variables = {**DOORS[door], **STRICT, "STUB_ACTIVATE": "raise RuntimeError('broken')"}
    result = installed.run("-c", SCRIPT, **variables)
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr == (
        "autoamp: off in this process: RuntimeError: broken; "
        "stopped (AUTO_MIXED_PRECISION_STRICT=1)\n"
    )


def test_strictness_stops_a_process_that_is_still_starting(shim):
    """There a SystemExit would be answered with a crash report of Python's."""
    early = shim.site / "early.pth"
    early.write_text("import torch\n")
    variables = {"STUB_ACTIVATE": "raise RuntimeError('broken')", "AUTO_MIXED_PRECISION": "1"}
    try:
        result = shim.run("-c", SCRIPT, **STRICT, **variables)
        lenient = shim.run("-c", SCRIPT, **variables)
    finally:
        early.unlink()
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.endswith("stopped (AUTO_MIXED_PRECISION_STRICT=1)\n")
    assert len(result.stderr.splitlines()) == 1
    assert (lenient.code, lenient.stderr) == (7, line("RuntimeError: broken"))


@pytest.mark.parametrize("door", DOORS)
def test_ctrl_c_passes_through(installed, door):
    result = installed.run("-c", SCRIPT, STUB_ACTIVATE="raise KeyboardInterrupt", **DOORS[door])
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert "autoamp: off" not in result.stderr


def test_a_failure_is_not_tried_again_at_the_next_door(current):
    script = (
        "import torch, autoamp.bootstrap as b; b.start(); b.start_in_torch(); torch.optim.SGD()"
    )
    report = current.on(STUB_ACTIVATE="raise RuntimeError('broken')").report(script)
    assert len(report.calls) == 1
    assert (report.phase, report.reason) == ("failed", "RuntimeError: broken")
    assert report.stderr == line("RuntimeError: broken")


def test_an_activation_that_cannot_be_imported_costs_one_line(own):
    (own.site / "autoamp" / "activation.py").write_text("def broken(:\n")
    result = own.on().run("-c", PROGRAM)
    assert (result.code, result.stdout) == (7, "trained\n")
    assert result.stderr == line("SyntaxError: invalid syntax (activation.py, line 1)")


@pytest.mark.parametrize("variables", [{}, STRICT])
def test_a_closed_stderr_disturbs_nothing(installed, variables):
    environ = {"AUTO_MIXED_PRECISION": "1", "STUB_ACTIVATE": "raise RuntimeError", **variables}
    result = subprocess.run(
        ["/bin/sh", "-c", 'exec "$0" "$@" 2>&-', installed.python, "-c", PROGRAM],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    expected = (2, "") if variables else (7, "trained\n")
    assert (result.returncode, result.stdout) == expected


@pytest.mark.parametrize("stderr", ["None", "open(os.devnull)", "io.StringIO()"])
def test_a_stderr_that_takes_no_text_disturbs_nothing(current, stderr):
    script = f"import io, os, sys; sys.stderr = {stderr}; sys.stderr and sys.stderr.close()\n"
    result = current.on(STUB_ACTIVATE="raise RuntimeError").run("-c", script + PROGRAM)
    assert (result.code, result.stdout) == (7, "trained\n")


def test_start_files_without_the_package_are_silent_while_the_variable_is_unset(own):
    (own.site / "autoamp").rename(own.site / "deleted")
    result = own.run("-c", "print('ran')")
    assert (result.code, result.stdout, result.stderr) == (0, "ran\n", "")


def test_start_files_without_the_package_do_not_stop_a_program_that_wants_it(own):
    """Python itself reports the start file, by name."""
    (own.site / "autoamp").rename(own.site / "deleted")
    result = own.on(TORCH_DEVICE_BACKEND_AUTOLOAD="0").run("-c", PROGRAM)
    assert (result.code, result.stdout) == (7, "trained\n")
    assert f"Error processing line 1 of {own.site / START_FILES[0]}" in result.stderr
    assert "No module named 'autoamp'" in result.stderr


def make_wheel(folder: Path) -> Path:
    """The smallest wheel that pip installs."""
    with zipfile.ZipFile(folder / "small-1-py3-none-any.whl", "w") as archive:
        info = "small-1.dist-info"
        archive.writestr("small.py", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"small.py,,\n{info}/METADATA,,\n{info}/RECORD,,\n")
    return folder / "small-1-py3-none-any.whl"


def tool_commands(folder: Path) -> dict[str, list[str]]:
    project = folder / "project"
    project.mkdir()
    (project / "setup.cfg").write_text("[metadata]\nname = mine\nversion = 1\n")
    (project / "pyproject.toml").write_text("")
    build = ["build", "--wheel", "--no-isolation", "--skip-dependency-check", "--outdir"]
    install = ["pip", "install", "--no-index", "--upgrade", "--target"]
    return {
        "pip version": ["pip", "--version"],
        "pip install": [*install, str(folder / "target"), str(make_wheel(folder))],
        "venv": ["venv", "--without-pip", str(folder / "venv")],
        "build": [*build, str(folder / "dist"), str(project)],
    }


@pytest.mark.parametrize("tool", ["pip version", "pip install", "venv", "build"])
def test_python_tools_say_the_same_in_an_armed_and_in_a_broken_environment(
    own, toolbox, tool, tmp_path
):
    command = ["-m", *tool_commands(tmp_path)[tool]]
    tools = {"PYTHONPATH": str(toolbox), "TMPDIR": str(tmp_path)}
    own.run(*command, **tools)  # the second run of each says the same as the third
    plain = own.run(*command, **tools)
    armed = own.on(**tools).run(*command)
    bootstrap = own.site / "autoamp" / "bootstrap.py"
    code = bootstrap.read_text()
    bootstrap.write_text("raise RuntimeError('broken')")
    try:
        broken = own.on(**tools).run(*command)
    finally:
        bootstrap.write_text(code)
    assert plain.code == armed.code == broken.code == 0, plain.stdout + plain.stderr
    said = [re.sub(r"\.tmp-\w+", ".tmp", run.stdout) for run in (plain, armed, broken)]
    assert said[0] == said[1] == said[2]
