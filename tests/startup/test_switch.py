"""The variable and the doors: who starts autoamp, when, how often, and at what price."""

import shutil
import zipapp
from pathlib import Path

import pytest
from environments import STUBS, Environment, doors, modules_of_autoamp

from autoamp.bootstrap import switch

QUIET = ""
COSTLY = {"wrapt", "yaml", "logging", "dataclasses", "typing", "threading", "importlib.metadata"}


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        (None, None),
        ("", None),
        ("  ", None),
        ("0", "off"),
        ("False", "off"),
        ("OFF", "off"),
        (" no ", "off"),
        ("1", "default"),
        ("True", "default"),
        ("on", "default"),
        (" YES", "default"),
        (" bf16 ", "bf16"),
        ("Policies/Mine.yaml", "Policies/Mine.yaml"),
    ],
)
def test_switch_reads_off_on_and_the_policy_as_written(value, meaning):
    environ = {} if value is None else {"AUTO_MIXED_PRECISION": value}
    assert switch(environ) == meaning


@pytest.mark.parametrize("value", [None, "", "0", "false", "OFF", " no "])
def test_without_the_variable_no_door_imports_anything(installed, value):
    report = installed.report("pass", AUTO_MIXED_PRECISION=value)
    assert modules_of_autoamp(report) == []
    assert "WhenImported" not in report.finders
    assert report.stderr == QUIET


@pytest.mark.parametrize("value", [None, "0"])
def test_without_the_variable_the_shim_imports_nothing_either(shim, value):
    report = shim.report("pass", AUTO_MIXED_PRECISION=value)
    assert modules_of_autoamp(report) == []
    assert report.stderr == QUIET


@pytest.mark.parametrize("value", ["1", "true", "on", "bf16"])
def test_with_the_variable_a_process_waits_for_torch(installed, value):
    report = installed.report("pass", AUTO_MIXED_PRECISION=value)
    assert (report.phase, report.door) == ("armed", ".pth")
    assert report.finders[0] == "WhenImported"
    assert report.stderr == QUIET


def test_a_process_that_never_imports_torch_loads_nothing_costly(installed):
    bare = installed.report("pass")
    armed = installed.on().report("pass")
    added = set(armed.modules) - set(bare.modules)
    assert added == {"autoamp", "autoamp.bootstrap", "__future__"}
    assert not added & COSTLY


def test_the_entry_point_adds_no_import_but_bootstrap_when_nothing_is_wanted(installed):
    with_it = installed.report("import torch")
    without = installed.report("import torch", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    added = {name for name in set(with_it.modules) - set(without.modules) if "autoamp" in name}
    assert added == {"autoamp", "autoamp.bootstrap"}
    assert with_it.calls == []
    assert with_it.stderr == QUIET


def test_a_start_file_that_runs_twice_activates_once(installed):
    """Every venv before Python 3.15 runs each .pth twice."""
    count = "import sys; sys.ran = getattr(sys, 'ran', 0) + 1\n"
    twice = installed.site / "counts.pth"
    twice.write_text(count)
    try:
        report = installed.on().report("import sys, torch; print(sys.ran)")
    finally:
        twice.unlink()
    assert report.printed == ["2"]
    assert doors(report) == [".pth"]


def test_the_first_of_several_doors_counts(installed):
    shim = installed.site / "autoamp" / "sitecustomize"
    report = installed.on(PYTHONPATH=str(shim)).report("import torch")
    assert doors(report) == [".pth"]
    assert (report.phase, report.door) == ("active", ".pth")


def test_the_shim_is_a_door(shim):
    report = shim.on().report("import torch")
    assert doors(report) == ["sitecustomize"]
    assert report.phase == "active"


def test_the_entry_point_is_a_door_where_there_is_no_start_file(no_start_files):
    report = no_start_files.on().report("import torch")
    assert doors(report) == ["torch.backends"]


def test_a_variable_set_by_the_script_before_torch_counts(installed):
    script = "import os; os.environ['AUTO_MIXED_PRECISION'] = '1'; import torch"
    report = installed.report(script)
    assert doors(report) == ["torch.backends"]


@pytest.mark.parametrize("how", ["os.environ['AUTO_MIXED_PRECISION'] = '0'", "os.environ.clear()"])
def test_a_variable_taken_back_by_the_script_before_torch_counts(installed, how):
    report = installed.on().report(f"import os; {how}; import torch")
    assert report.calls == []
    assert (report.phase, report.door) == ("idle", None)
    assert "WhenImported" not in report.finders


def test_the_watcher_works_where_torch_autoload_is_off(installed):
    report = installed.on(TORCH_DEVICE_BACKEND_AUTOLOAD="0").report("import torch")
    assert doors(report) == [".pth"]


def test_activation_waits_for_the_last_line_of_torch(installed):
    """Under the watcher the entry point stands back, although it is called earlier."""
    report = installed.on().report("import torch")
    assert report.calls == [{"door": ".pth", "policy": None, "complete": True}]


@pytest.mark.parametrize("flag", ["-E", "-I", "-s", "-P", "-B", "-O"])
def test_interpreter_flags_leave_it_on(installed, flag):
    if flag == "-P" and "3.10" in str(installed.site):
        flag = "-b"  # -P came with 3.11
    report = installed.on().report("import torch", flag)
    assert doors(report) == [".pth"]
    assert report.stderr == QUIET


def test_without_site_it_is_off_and_quiet(installed):
    result = installed.on().run("-S", "-c", "import sys; print('autoamp' in sys.modules)")
    assert (result.code, result.stdout, result.stderr) == (0, "False\n", QUIET)


def test_a_directory_of_packages_on_pythonpath_is_served_by_the_entry_point(
    installed, make_environment
):
    """`pip install --target`: start files are read in site directories only."""
    version = installed.site.parent.name.removeprefix("python")
    empty = make_environment(version, autoamp=False)
    report = empty.on(PYTHONPATH=str(installed.site)).report("import torch")
    assert doors(report) == ["torch.backends"]


def test_a_zipapp_is_served(installed, tmp_path: Path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("import torch, probe; probe.report()")
    zipapp.create_archive(tmp_path / "app", tmp_path / "app.pyz")
    result = installed.on().run(tmp_path / "app.pyz")
    assert '"door": ".pth"' in result.stdout
    assert '"phase": "active"' in result.stdout


def test_torch_loaded_before_the_door_opens_is_served_at_once(shim):
    """Another start file may import torch before ours runs."""
    folder = shim.site / "early.pth"
    folder.write_text("import torch\n")
    try:
        report = shim.on(TORCH_DEVICE_BACKEND_AUTOLOAD="0").report("pass")
    finally:
        folder.unlink()
    assert doors(report) == ["sitecustomize"]
    assert "WhenImported" not in report.finders


def test_a_door_that_opens_inside_the_import_of_torch_waits_for_its_end(no_start_files):
    """A module in `sys.modules` may be half executed; the entry point comes when it is not."""
    during = "from autoamp.bootstrap import start; start('test')"
    needs_torch = "import torch; torch.nn; torch.optim"
    halfway = no_start_files.on(STUB_TORCH=during, STUB_ACTIVATE=needs_torch)
    report = halfway.report("import torch")
    assert doors(report) == ["test"]
    assert report.phase == "active"


def test_calling_every_door_again_changes_nothing(installed):
    again = "import torch; from autoamp.bootstrap import start, start_in_torch\n"
    report = installed.on().report(again + "start(); start(); start_in_torch(); start_in_torch()")
    assert doors(report) == [".pth"]


@pytest.mark.parametrize("version", ["3.7", "3.8", "3.9"])
def test_older_pythons_import_bootstrap_and_stay_inert(version, make_environment):
    old = make_environment(version)
    code = (
        "import sys\n"
        "from autoamp.bootstrap import start, start_in_torch\n"
        "start(); import torch; start(); start_in_torch()\n"
        "torch.optim.SGD()\n"
    )
    report = old.on(TORCH_DEVICE_BACKEND_AUTOLOAD="0").report(code)
    assert (report.phase, report.calls, report.stderr) == ("idle", [], QUIET)
    assert "WhenImported" not in report.finders


def test_a_checkout_works_without_installation(make_environment, source, tmp_path):
    """`PYTHONPATH=<checkout>/sitecustomize` is all that a clone needs."""
    bare = make_environment("3.11", autoamp=False)
    for name in ("autoamp", "sitecustomize"):
        shutil.copytree(source / name, tmp_path / name)
    shutil.copy(STUBS / "activation.py", tmp_path / "autoamp")
    checkout = Environment(bare.python, bare.site, {"PYTHONPATH": str(tmp_path / "sitecustomize")})
    report = checkout.on().report("import sys, torch; print(sys.path[-1])")
    assert doors(report) == ["sitecustomize"]
    assert report.printed == [str(tmp_path)]
    off = checkout.report("import sys, torch; print(sys.path[-1])")
    assert off.printed == [str(bare.site)]
