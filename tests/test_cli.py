"""The command `autoamp`, as a user types it: what real processes print and end with."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import autoamp
from autoamp.doctor import has_start_file, shim_directory

ROOT = Path(__file__).resolve().parents[1]
SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ), sys.executable]))\n"
TRAIN = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
print("trained")
"""


def clean(**variables: str) -> dict[str, str]:
    ours = ("AUTO_MIXED_PRECISION", "PYTHON", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return {**inherited, **variables}


@pytest.fixture
def cli(tmp_path: Path):
    """Run autoamp in an empty folder that holds `show.py` and `train.py`."""
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "train.py").write_text(TRAIN)

    def run(*arguments: str | Path, python: str | Path = sys.executable, **variables: str):
        return subprocess.run(
            [python, "-m", "autoamp", *arguments],
            env=clean(**variables),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture
def shown(cli):
    """Run `show.py`, or the command given, and take apart what it saw."""

    def run(*arguments: str | Path, **how: str) -> SimpleNamespace:
        result = cli("run", *(arguments or ("show.py",)), **how)
        assert result.returncode == 0, result.stderr
        words, environ, python = json.loads(result.stdout)
        switches = {k[21:]: v for k, v in environ.items() if k.startswith("AUTO_MIXED_PRECISION_")}
        return SimpleNamespace(
            words=words,
            switch=environ.get("AUTO_MIXED_PRECISION"),
            settings=switches,
            path=environ.get("PYTHONPATH"),
            python=python,
            stderr=result.stderr,
        )

    return run


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """A Python in which nothing is installed."""
    folder = tmp_path / "bare"
    command = [sys.executable, "-m", "venv", "--without-pip", folder]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "bin" / "python"


def test_without_a_command_it_prints_its_help_and_fails(cli):
    result = cli()
    assert (result.returncode, result.stdout) == (2, "")
    assert "usage: autoamp" in result.stderr
    for said in ("run a command in mixed precision", "list, show, check and explain policies"):
        assert said in result.stderr


def test_it_knows_its_version(cli):
    result = cli("--version")
    assert (result.returncode, result.stdout) == (0, f"autoamp {autoamp.__version__}\n")


def test_it_imports_neither_torch_nor_what_is_slow():
    code = "import sys, autoamp.cli; print(sorted({'torch', 'wrapt', 'yaml'} & {*sys.modules}))"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=clean(), capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_the_installed_command_is_the_same_one():
    command = Path(sys.executable).with_name("autoamp")
    result = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"autoamp {autoamp.__version__}\n"


def test_run_switches_autoamp_on_and_says_nothing(shown):
    seen = shown()
    assert (seen.switch, seen.settings, seen.stderr) == ("1", {}, "")


@pytest.mark.parametrize("value", ["", "  "])
def test_run_takes_an_empty_variable_for_unset(shown, value):
    assert shown(AUTO_MIXED_PRECISION=value).switch == "1"


def test_run_keeps_a_policy_that_the_variable_names(shown):
    assert shown(AUTO_MIXED_PRECISION="bf16").switch == "bf16"


@pytest.mark.parametrize("value", ["0", "off"])
def test_run_leaves_the_last_word_to_whoever_switched_autoamp_off(shown, value):
    seen = shown(AUTO_MIXED_PRECISION=value)
    assert seen.switch == value
    assert seen.stderr == (
        f"autoamp run: AUTO_MIXED_PRECISION={value} outranks this command; running in float32\n"
    )


def test_run_passes_its_options_on_as_variables(shown):
    options = ("--policy", "safe.yaml", "--dtype", "bfloat16", "--report", "r.json")
    expected = {"POLICY": "safe.yaml", "DTYPE": "bfloat16", "REPORT": "r.json"}
    assert shown(*options, "show.py").settings == expected


def test_run_overrides_a_setting_that_is_exported(shown):
    seen = shown("--dtype", "bfloat16", "show.py", AUTO_MIXED_PRECISION_DTYPE="float16")
    assert seen.settings == {"DTYPE": "bfloat16"}


@pytest.mark.parametrize("before", [(), ("--",), ("--policy", "fp16"), ("--policy", "fp16", "--")])
def test_run_leaves_the_words_of_the_command_alone(shown, before):
    words = ["--policy", "theirs", "-m", "--", "--dtype=x", "-h"]
    assert shown(*before, "show.py", *words).words == words


def test_run_hands_a_script_to_its_own_python(shown):
    assert shown("show.py").python == sys.executable
    assert shown("./show.py").python == sys.executable


def test_run_takes_a_module_as_python_does(shown):
    seen = shown("-m", "show", "--lr", "3")
    assert (seen.words, seen.python) == (["--lr", "3"], sys.executable)


def test_run_executes_a_py_file_that_is_a_program_on_path(cli, tmp_path):
    program = tmp_path / "bin" / "tool.py"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho a shell script\n")
    program.chmod(0o755)
    result = cli("run", "tool.py", PATH=f"{program.parent}{os.pathsep}{os.defpath}")
    assert (result.returncode, result.stdout) == (0, "a shell script\n")


def test_run_adds_nothing_to_the_path_where_a_start_file_is_installed(shown):
    assert has_start_file()
    assert shown().path is None
    assert shown(PYTHONPATH="/theirs").path == "/theirs"
    assert shown(sys.executable, "show.py").path is None


def test_run_puts_the_shim_on_the_path_where_no_start_file_is_installed(shown, bare_python):
    assert shown(python=bare_python, PYTHONPATH=str(ROOT)).path == os.pathsep.join(
        [str(ROOT / "sitecustomize"), str(ROOT)]
    )


def test_run_puts_the_shim_on_the_path_of_another_python(shown, bare_python):
    """And leaves no empty entry, which would be the current directory."""
    assert shown(bare_python, "show.py").path == str(shim_directory())
    assert shown(bare_python, "show.py", PYTHONPATH="").path == str(shim_directory())
    assert shown("env", sys.executable, "show.py").path == str(shim_directory())


def test_run_becomes_the_command(tmp_path):
    """Signals and exit codes need no passing on."""
    command = [sys.executable, "-m", "autoamp", "run", "-m", "pid"]
    (tmp_path / "pid.py").write_text("import os, sys; print(os.getpid()); sys.exit(5)")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    output, _ = process.communicate()
    assert (int(output), process.returncode) == (process.pid, 5)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGPIPE")
def test_run_hands_over_the_signals_that_python_ignores(tmp_path):
    """Else programs in a pipeline would not end with it."""
    command = [sys.executable, "-m", "autoamp", "run", "sh", "-c", "kill -PIPE $$; echo alive"]
    result = subprocess.run(command, env=clean(), cwd=tmp_path, capture_output=True, check=False)
    assert (result.returncode, result.stdout) == (-signal.SIGPIPE, b"")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to ignore")
def test_run_leaves_ctrl_c_ignored_where_it_is(tmp_path):
    """As a shell has it for what runs in the background."""
    inner = f"{sys.executable} -m autoamp run sh -c 'kill -INT $$; echo alive'"
    command = ["sh", "-c", f"trap '' INT; {inner}"]
    result = subprocess.run(command, env=clean(), cwd=tmp_path, capture_output=True, check=False)
    assert (result.returncode, result.stdout) == (0, b"alive\n")


def test_run_says_in_one_line_that_there_is_no_such_command(cli):
    result = cli("run", "trian", "--lr", "3")
    assert (result.returncode, result.stdout) == (127, "")
    assert result.stderr == (
        "autoamp run: trian: not found; give a program on PATH, a .py file or -m MODULE\n"
    )


def test_run_says_in_one_line_that_a_file_is_no_program(cli, tmp_path):
    (tmp_path / "notes.txt").write_text("not a program")
    result = cli("run", "./notes.txt")
    assert (result.returncode, len(result.stderr.splitlines())) == (126, 1)
    assert result.stderr.startswith("autoamp run: ./notes.txt: Permission denied; ")


def test_run_without_a_command_says_what_is_missing(cli):
    result = cli("run", "--policy", "bf16")
    assert result.returncode == 2
    assert result.stderr.endswith("error: name what to run: autoamp run train.py\n")


def test_run_refuses_a_dtype_that_does_not_exist(cli):
    result = cli("run", "--dtype", "float8", "show.py")
    assert (result.returncode, result.stdout) == (2, "")
    assert "invalid choice: 'float8' (choose from" in result.stderr


def test_run_trains_a_real_script_in_mixed_precision_and_leaves_a_report(cli, tmp_path):
    result = cli("run", "--dtype", "bfloat16", "--report", "r.json", "train.py")
    assert (result.returncode, result.stdout) == (0, "trained\n")
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["active"], report["door"]) == (True, ".pth")
    assert report["devices"]["cpu"]["dtype"] == "bfloat16"
    assert (report["regions"], report["steps"]) == (3, {"taken": 3, "skipped": 0})
