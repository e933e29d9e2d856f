"""What is said at the start and at the end of a run, and the report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import autoamp
from autoamp import report, reportcli
from autoamp.patches import PATCHES, halves_gradients, holds_schedulers, lays_out

ON = {"AUTO_MIXED_PRECISION": "1"}
FP16 = {**ON, "AUTO_MIXED_PRECISION_DTYPE": "float16"}
BF16 = {**ON, "AUTO_MIXED_PRECISION_DTYPE": "bfloat16"}
FILE = {"AUTO_MIXED_PRECISION_REPORT": "run.json"}
KEYS = [
    "schema",
    "autoamp",
    "torch",
    "active",
    "reason",
    "door",
    "script",
    "finished",
    "policy",
    "devices",
    "regions",
    "loss_scale",
    "steps",
    "time",
    "memory",
    "audit",
    "demotions",
    "stood_down",
    "patches",
    "replaced_since",
    "kernels",
]
# Four regions: one evaluation, and three steps of which the second overflows.
TRAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model(torch.ones(1, 4))
for factor in (0.25, float("inf"), 0.25):
    optimizer.zero_grad()
    (model(torch.ones(2, 4)).mean() * factor).backward()
    optimizer.step()
"""
# Two regions and no optimizer, which would import much more of torch.
EVALUATE = """
import torch
model = torch.nn.Linear(4, 4)
model(model(torch.ones(1, 4)))
"""
SUMMARY = "autoamp: 2 regions, 0 steps taken, 0 skipped, final loss scale 65536"


def look(process: subprocess.CompletedProcess[str], folder: Path) -> SimpleNamespace:
    path = folder / "run.json"
    return SimpleNamespace(
        code=process.returncode,
        stdout=process.stdout,
        stderr=process.stderr.splitlines(),
        report=json.loads(path.read_text()) if path.exists() else None,
        left=sorted(entry.name for entry in folder.iterdir()),
    )


@pytest.fixture
def run(run_script, tmp_path):
    """Run a script: its `code`, `stdout`, lines of `stderr`, and the `report` it left, if any."""
    return lambda script, **variables: look(run_script(script, **variables), tmp_path)


@pytest.fixture
def start(run_python, tmp_path):
    """The same in a new interpreter, for how that starts and ends."""
    return lambda script, **variables: look(run_python(script, **variables), tmp_path)


def start_line(found: SimpleNamespace, what: str) -> str:
    return f'autoamp 0.1.0 on: {what}, policy "default", through {found.report["door"]}'


# --- a whole run ---------------------------------------------------------------------------------


def test_a_run_in_float16_is_told_in_two_lines_and_one_report(run, tmp_path):
    found = run("import os; os.umask(0o027)\n" + TRAIN, **FP16, **FILE)
    assert (found.code, found.stdout) == (0, "")
    content = found.report
    assert list(content) == KEYS
    assert content["schema"] == 1
    assert (content["autoamp"], content["torch"]) == (autoamp.__version__, torch.__version__)
    assert (content["active"], content["reason"]) == (True, "")
    assert content["door"] in (".pth", ".start", "sitecustomize")
    assert content["policy"]["name"] == "default"
    assert os.path.basename(content["policy"]["source"]) == "default.yaml"
    assert content["devices"] == {"cpu": {"dtype": "float16", "why": "AUTO_MIXED_PRECISION_DTYPE"}}
    assert content["regions"] == 4
    assert content["steps"] == {"taken": 2, "skipped": 1}
    assert content["loss_scale"] == {
        "mode": "dynamic",
        "initial": 65536.0,
        "final": 32768.0,
        "history": [[0, 65536.0], [2, 32768.0]],
        "skips": [2],
        "owner": "autoamp",
    }
    assert [row["target"] for row in content["patches"]] == [patch.target for patch in PATCHES]
    others = (halves_gradients, holds_schedulers, lays_out)
    unasked = {patch.target for patch in PATCHES if patch.when in others}
    outcomes = {row["outcome"] for row in content["patches"] if row["target"] not in unasked}
    assert outcomes <= {"applied", "absent"}
    assert content["replaced_since"] == []
    assert all(sorted(row) == ["device", "list", "op", "why"] for row in content["kernels"])
    assert found.stderr == [
        start_line(found, "cpu float16, dynamic loss scale 65536"),
        "autoamp: 4 regions, 2 steps taken, 1 skipped, final loss scale 32768",
    ]
    assert found.left == ["run.json", "script.py"]
    assert (tmp_path / "run.json").stat().st_mode & 0o777 == 0o640


def test_a_run_in_bfloat16_has_no_loss_scale(run):
    found = run(TRAIN, **BF16, **FILE)
    assert (found.code, found.stdout) == (0, "")
    assert found.report["steps"] == {"taken": 3, "skipped": 0}
    assert found.report["regions"] == 4
    assert found.report["loss_scale"]["mode"] == "off"
    assert found.report["devices"]["cpu"]["dtype"] == "bfloat16"
    assert {row["outcome"] for row in found.report["patches"]} >= {"applied", "not needed"}
    assert found.stderr == [
        start_line(found, "cpu bfloat16"),
        "autoamp: 4 regions, 3 steps taken",
    ]


def test_where_the_device_gains_nothing_it_stands_aside_and_says_so_once(run):
    found = run(EVALUATE, AUTO_MIXED_PRECISION="fp16", **FILE)
    why = "float16 is slower than float32 on CPUs; force it with AUTO_MIXED_PRECISION_DTYPE=float16"
    assert found.stderr[0] == f"autoamp 0.1.0 stands aside on cpu: {why}"
    assert len(found.stderr) <= 2
    assert (found.code, found.stdout) == (0, "")
    assert found.report["devices"] == {"cpu": {"dtype": "off", "why": why}}
    assert found.report["regions"] == 0
    assert found.report["loss_scale"]["mode"] == "off"


def test_quiet_is_quiet_and_still_leaves_the_report(run):
    found = run(EVALUATE, AUTO_MIXED_PRECISION_LOG="quiet", **FP16, **FILE)
    assert (found.code, found.stdout, found.stderr) == (0, "", [])
    assert found.report["regions"] == 2


def test_debug_lists_every_patch_before_the_first_line(run):
    found = run(EVALUATE, AUTO_MIXED_PRECISION_LOG="debug", **FP16, **FILE)
    said = [line for line in found.stderr if line.startswith("autoamp: torch")]
    assert said == [
        f"autoamp: {row['target']}: {row['outcome']} ({row['why']})"
        for row in found.report["patches"]
    ]
    assert found.stderr[: len(said)] == said
    assert found.stdout == ""


def test_a_static_scale_is_named_and_stays(run):
    found = run(TRAIN, AUTO_MIXED_PRECISION_LOSS_SCALE="128", **FP16, **FILE)
    assert found.stderr == [
        start_line(found, "cpu float16, static loss scale 128"),
        "autoamp: 4 regions, 2 steps taken, 1 skipped, final loss scale 128",
    ]
    assert found.report["loss_scale"]["mode"] == "static"
    assert found.report["loss_scale"]["history"] == [[0, 128.0]]


def test_a_process_that_runs_no_model_says_nothing_and_reports_that(run):
    found = run("import torch; print(torch.ones(2) @ torch.ones(2))", **FP16, **FILE)
    assert (found.code, found.stdout, found.stderr) == (0, "tensor(2.)\n", [])
    assert (found.report["regions"], found.report["devices"]) == (0, {})
    assert found.report["active"] is True


def test_a_process_that_never_imports_torch_leaves_nothing(start):
    found = start("print('done')", **FP16, **FILE)
    assert (found.code, found.stdout, found.stderr) == (0, "done\n", [])
    assert found.left == ["script.py"]


def test_an_unset_variable_leaves_no_report(run):
    found = run(EVALUATE, **FILE)
    assert (found.code, found.stdout, found.stderr, found.report) == (0, "", [], None)


@pytest.mark.parametrize(
    ("end", "code", "last"),
    [
        ("raise ValueError('the script fails')", 1, "ValueError: the script fails"),
        ("import sys; sys.exit(3)", 3, None),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
    ],
    ids=["exception", "exit code", "Ctrl-C"],
)
def test_the_report_is_written_however_the_script_ends(start, end, code, last):
    # For the lists of `default` in FP16 on a CPU torch loads Dynamo, which imports modules at exit;
    # and that makes Python forget, with or without autoamp, that it was Ctrl-C.
    found = start(EVALUATE + end, **{**FP16, "AUTO_MIXED_PRECISION": "torch"}, **FILE)
    assert found.code == code
    assert (found.report["active"], found.report["regions"]) == (True, 2)
    *said, summary = found.stderr
    assert summary == SUMMARY
    assert said[-1] == last or (last is None and len(said) == 1)


def test_a_run_that_could_not_start_reports_why(run):
    found = run(EVALUATE, **{**FP16, "AUTO_MIXED_PRECISION": "fp61"}, **FILE)
    assert found.code == 0
    assert list(found.report) == KEYS
    assert found.report["active"] is False
    assert found.report["reason"].startswith("AUTO_MIXED_PRECISION: unknown policy 'fp61'.")
    assert found.report["patches"] == []


def test_a_script_that_changes_directory_finds_its_report_where_it_started(run):
    script = f"import os; os.mkdir('elsewhere')\n{EVALUATE}os.chdir('elsewhere')"
    found = run(script, **FP16, **FILE)
    assert found.left == ["elsewhere", "run.json", "script.py"]
    assert found.report["regions"] == 2


# --- more than one process -----------------------------------------------------------------------


def test_forked_children_and_workers_write_no_report(run):
    script = EVALUATE + (
        "import os, sys\n"
        "from torch.utils.data import DataLoader\n"
        "def in_worker(batch):\n"
        "    return model(torch.stack(batch)).detach()\n"
        "rows = DataLoader(torch.ones(4, 4), 2, num_workers=1, collate_fn=in_worker,\n"
        "                  multiprocessing_context='fork')\n"
        "print(len(list(rows)), os.path.exists('run.json'), flush=True)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    model(torch.ones(1, 4))\n"
        "    sys.exit(5)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.path.exists('run.json'))\n"
    )
    found = run(script, **FP16, **FILE)
    assert found.stdout == "2 False\n5 False\n"
    assert found.report["regions"] == 2
    assert len(found.stderr) == 2, found.stderr


def test_a_launcher_that_runs_no_model_keeps_its_childs_report(run, tmp_path):
    (tmp_path / "train.py").write_text(EVALUATE)
    found = run(
        "import subprocess, sys, torch; subprocess.run([sys.executable, 'train.py'], check=True)",
        **FP16,
        **FILE,
    )
    assert found.report["regions"] == 2
    assert len(found.stderr) == 2, found.stderr


def test_rank_1_says_and_writes_nothing(run):
    found = run(EVALUATE, RANK="1", WORLD_SIZE="2", **FP16, **FILE)
    assert (found.code, found.stdout, found.stderr, found.report) == (0, "", [], None)


def test_two_processes_that_write_one_file_leave_one_whole_report(tmp_path):
    """Each writes hundreds of times; a reader meets a whole report at all times."""
    path = tmp_path / "run.json"
    writer = (
        "import sys\n"
        "from autoamp import report\n"
        "for number in range(300):\n"
        "    report.write(sys.argv[1], {'schema': 1, 'autoamp': sys.argv[2] * 50_000})\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", writer, str(path), letter]) for letter in "ab"
    ]
    seen = set()
    while any(process.poll() is None for process in writers):
        if path.exists():
            seen.add(json.loads(path.read_text())["autoamp"])
    assert [process.returncode for process in writers] == [0, 0]
    assert seen | {json.loads(path.read_text())["autoamp"]} == {"a" * 50_000, "b" * 50_000}
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


# --- runs that are killed, and files that are not ours -------------------------------------------


def test_a_run_that_is_killed_leaves_its_report(run):
    """As of some seconds before: no signal handler is there that the script, or a trainer, sees."""
    script = TRAIN + (
        "import json, os, signal, sys\n"
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
        "while json.load(open('run.json'))['steps']['taken'] < 6:\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.ones(2, 4)).mean().backward()\n"
        "    optimizer.step()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    found = run(script, **{**FP16, "AUTO_MIXED_PRECISION": "torch"}, **FILE)
    assert found.code == -signal.SIGTERM
    content = found.report
    assert content["finished"] is False
    assert content["steps"]["taken"] >= 6
    assert content["steps"]["skipped"] >= 1
    assert content["audit"]["step"] == 4
    assert found.left == ["run.json", "script.py"]
    assert "killed or still runs" in "\n".join(reportcli.lines(content))


def test_a_file_that_is_no_report_is_left_as_it_is(run, tmp_path):
    (tmp_path / "run.json").write_text('{"weights": [1, 2]}')
    found = run(EVALUATE, **FP16, **FILE)
    assert (found.code, found.stdout) == (0, "")
    assert found.stderr == [
        "autoamp: off in this process: AUTO_MIXED_PRECISION_REPORT=run.json: run.json exists and "
        "is no report, and is left as it is; name a file that can be written; the program "
        "continues in float32"
    ]
    assert found.report == {"weights": [1, 2]}


@pytest.mark.parametrize(
    ("name", "text", "is_ours"),
    [
        ("a.json", "", True),
        ("a.json", '{\n "schema": 1,\n "autoamp": "0.1.0",', True),
        ("a.json", '{"schema": 1}', False),
        ("a.json", '[{"schema": 1, "autoamp": 2}]', False),
        ("a.html", f"<!DOCTYPE html><html><head>{report.PAGE_MARK}", True),
        ("a.html", "<!DOCTYPE html><html><head><title>My page of autoamp</title>", False),
        ("a.html", "\0\1\2", False),
    ],
)
def test_only_reports_are_overwritten(tmp_path, name, text, is_ours):
    path = tmp_path / name
    path.write_text(text)
    assert (report.stranger(path) == "") is is_ours
    assert report.stranger(tmp_path / "none.json") == ""


def test_a_file_that_came_meanwhile_is_left_as_it_is(mixed, tmp_path, capsys):
    path = tmp_path / "run.json"
    mixed("torch", REPORT=str(path))
    torch.nn.Linear(2, 2)(torch.ones(1, 2))
    path.write_text("mine")
    capsys.readouterr()
    autoamp.disable()
    assert path.read_text() == "mine"
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"autoamp: AUTO_MIXED_PRECISION_REPORT={path}: {path} exists and is no report, and is left "
        "as it is"
    )


# --- in this process -----------------------------------------------------------------------------


def test_status_is_the_report_of_now(mixed):
    mixed("fp16")
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2))
    status = autoamp.status()
    assert list(status) == ["phase", *KEYS]
    assert (status["phase"], status["regions"], status["policy"]["name"]) == ("active", 1, "fp16")
    assert json.loads(json.dumps(status)) == status
    autoamp.disable()
    assert list(autoamp.status()) == ["phase", *KEYS]
    assert autoamp.status()["reason"] == "autoamp.disable() was called"


def test_disable_writes_the_report_and_says_the_summary(mixed, tmp_path, capsys):
    path = tmp_path / "run.json"
    mixed(REPORT=str(path))
    torch.nn.Linear(2, 2)(torch.ones(1, 2))
    capsys.readouterr()
    autoamp.disable()
    assert json.loads(path.read_text())["regions"] == 1
    assert capsys.readouterr() == (
        "",
        "autoamp: 1 region, 0 steps taken, 0 skipped, final loss scale 65536\n",
    )


def content(
    regions: int, taken: int, mode: str = "dynamic", demotions: int = 0, stood_down: int = 0
) -> dict:
    return {
        "regions": regions,
        "steps": {"taken": taken, "skipped": 7},
        "loss_scale": {"mode": mode, "final": 2.0**24},
        "demotions": [{"module": "a"}] * demotions,
        "stood_down": [{"type": "A"}] * stood_down,
    }


@pytest.mark.parametrize(
    ("numbers", "line"),
    [
        (
            (1, 1),
            "autoamp: 1 region, 1 step taken, 7 skipped, final loss scale 16777216",
        ),
        ((1234567, 0, "off"), "autoamp: 1,234,567 regions, 0 steps taken"),
        (  # twice the same one
            (2, 1, "off", 2),
            "autoamp: 2 regions, 1 step taken, 1 module demoted to float32",
        ),
        ((1, 9, "off", 0, 2), "autoamp: 1 region, 9 steps taken, 2 models left in float32"),
    ],
)
def test_the_summary_reads_as_english(numbers, line):
    assert report.summary(content(*numbers)) == line


def test_a_report_replaces_the_one_before_in_one_piece(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("old")
    kept = path.open()
    report.write(str(path), {"new": 1})
    assert json.loads(path.read_text()) == {"new": 1}
    with kept:
        assert kept.read() == "old"


def test_a_report_that_cannot_be_written_leaves_the_one_before_and_nothing_else(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        report.write(str(path), {"new": object()})
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_a_directory_that_has_gone_costs_one_line(mixed, tmp_path, capsys):
    folder = tmp_path / "gone"
    folder.mkdir()
    mixed(REPORT=f"{folder}/run.json")
    folder.rmdir()
    capsys.readouterr()
    autoamp.disable()
    assert capsys.readouterr().err == (
        f"autoamp: AUTO_MIXED_PRECISION_REPORT={folder}/run.json: "
        "No such file or directory; no report written\n"
    )


def test_a_closed_stderr_is_no_error(mixed, monkeypatch, tmp_path):
    mixed(REPORT=str(tmp_path / "run.json"))
    monkeypatch.setattr(sys, "stderr", None)
    torch.nn.Linear(2, 2)(torch.ones(1, 2))
    autoamp.disable()
    assert (tmp_path / "run.json").exists()
