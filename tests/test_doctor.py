"""Each trouble that `autoamp doctor` can find, made for real in a virtual environment."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from startup.environments import CURRENT, ROOT, START_FILES, Environment

from autoamp import doctor

ON = {"AUTO_MIXED_PRECISION": "1"}
NO_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
ACTIVE = "active through .pth: cpu bfloat16"
NOISE = "no line of ours "
REINSTALL = "pip install --force-reinstall --no-deps autoamp"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """What pip installs; built from a copy, since building leaves things behind."""
    folder = tmp_path_factory.mktemp("wheel")
    not_built = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, folder / "source", ignore=not_built)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder]
    subprocess.run([*command, folder / "source"], check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def make_house(wheel, tmp_path_factory):
    """Make an environment with autoamp's wheel and links to what else is installed here."""

    def make() -> Environment:
        folder = tmp_path_factory.mktemp("house")
        create = [sys.executable, "-m", "venv", "--without-pip", folder]
        subprocess.run(create, check=True, capture_output=True)
        site = folder / "lib" / f"python{CURRENT}" / "site-packages"
        for entry in map(Path, sys.path):
            for found in entry.glob("*") if entry.name.endswith("-packages") else ():
                is_start = found.suffix in (".pth", ".start") or found.stem == "sitecustomize"
                ours = found.name.startswith(("autoamp", "__editable__"))
                if not (is_start or ours or (site / found.name).exists()):
                    (site / found.name).symlink_to(found)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        # The dtype is named, so that no verdict depends on what this machine is good at.
        fixed = {"AUTO_MIXED_PRECISION_DTYPE": "bfloat16", "CUDA_VISIBLE_DEVICES": ""}
        return Environment(folder / "bin" / "python", site, fixed)

    return make


@pytest.fixture(scope="session")
def house(make_house) -> Environment:
    """A healthy environment; not to be changed by a test."""
    return make_house()


@pytest.fixture(scope="session")
def doorless(make_house) -> Environment:
    """The same without start files and entry point; not to be changed by a test."""
    house = make_house()
    for name in START_FILES:
        (house.site / name).unlink()
    return Environment(house.python, house.site, {**house.variables, **NO_AUTOLOAD})


@pytest.fixture
def own(make_house) -> Environment:
    """A healthy environment for a test that breaks it."""
    return make_house()


def replace_torch(house: Environment, code: str) -> None:
    (house.site / "torch").unlink()
    (house.site / "torch.py").write_text(code)


def uninstall(house: Environment, package: str, module: str) -> None:
    """What pip would do."""
    (house.site / module).unlink()
    for path in house.site.glob("*.dist-info"):
        if path.name.lower().startswith(f"{package}-"):
            path.unlink()


def diagnose(house: Environment, *words: str, **variables: str):
    """Run the doctor: its exit code, the verdict, and all lines."""
    result = house.run("-m", "autoamp", "doctor", *words, **variables)
    assert result.stderr == ""
    lines = result.stdout.removeprefix(NOISE).splitlines()
    label, _, verdict = lines[-1].partition(": ")
    assert label == "verdict"
    return result.code, verdict, lines


def row(lines: list[str], label: str) -> list[str]:
    """The entries of one row."""
    first = next(n for n, line in enumerate(lines) if line[:15].strip() == label)
    entries = [lines[first][16:]]
    for line in lines[first + 1 :]:
        if not line.startswith(" " * 16):
            break
        entries.append(line[16:])
    return entries


def test_a_healthy_environment_is_active_through_its_start_file(house):
    code, verdict, lines = diagnose(house, **ON)
    assert (code, verdict) == (0, ACTIVE)
    assert row(lines, "start files") == [
        f"{house.site}/autoamp.pth",
        f"{house.site}/autoamp.start (for Python 3.15 and later)",
    ]
    assert row(lines, "import torch") == ["with AUTO_MIXED_PRECISION=1: active through .pth"]
    policy = house.site / "autoamp" / "policies" / "default.yaml"
    assert row(lines, "policy") == [f"default ({policy})"]
    assert row(lines, "devices") == ["cpu bfloat16 (AUTO_MIXED_PRECISION_DTYPE)"]


def test_an_unset_variable_is_off_and_the_trial_says_what_it_would_be(house):
    code, verdict, lines = diagnose(house)
    assert code == 0
    assert verdict == (
        f"off: the variable AUTO_MIXED_PRECISION is not set; it would become {ACTIVE}"
    )
    assert row(lines, "variables") == [
        "AUTO_MIXED_PRECISION is not set",
        "AUTO_MIXED_PRECISION_DTYPE=bfloat16",
    ]
    assert row(lines, "import torch") == [
        "with AUTO_MIXED_PRECISION=1 for a trial: active through .pth"
    ]


def test_a_variable_that_says_off_is_off(house):
    code, verdict, _ = diagnose(house, AUTO_MIXED_PRECISION="0")
    assert code == 0
    assert verdict == f"off: AUTO_MIXED_PRECISION=0; set to 1 it would become {ACTIVE}"


def test_devices_that_gain_nothing_are_no_fault(house):
    code, verdict, lines = diagnose(
        house, AUTO_MIXED_PRECISION="fp16", AUTO_MIXED_PRECISION_DTYPE=""
    )
    assert code == 0
    assert verdict == (
        "active through .pth: cpu off - nothing here gains from it, and training stays in float32"
    )
    assert row(lines, "devices")[0].startswith("cpu off (float16 is slower than float32 on CPUs; ")


def test_a_missing_start_file_is_made_up_for_by_the_entry_point(doorless):
    code, verdict, lines = diagnose(doorless, **ON, TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert (code, verdict) == (0, "active through torch.backends: cpu bfloat16")
    assert row(lines, "start files") == ["none"]


def test_autoload_off_is_shown_and_made_up_for_by_the_start_file(house):
    code, verdict, lines = diagnose(house, **ON, **NO_AUTOLOAD)
    assert (code, verdict) == (0, ACTIVE)
    assert row(lines, "entry point") == [
        "torch.backends: installed, but TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    ]


def test_no_door_at_all_is_broken_and_each_is_named(doorless):
    code, verdict, _ = diagnose(doorless, **ON)
    assert code == 1
    assert verdict == (
        "broken: no door is open: no start file in a site directory, "
        "no sitecustomize of autoamp's on PYTHONPATH, "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 shuts the entry point"
        f" - reinstall it ({REINSTALL}), or start scripts with autoamp run"
    )


def test_a_package_without_metadata_has_no_entry_point(own):
    for path in (own.site / "autoamp.pth", next(own.site.glob("autoamp-*")) / "entry_points.txt"):
        path.unlink()
    code, verdict, lines = diagnose(own, **ON)
    assert code == 1
    assert "the torch.backends entry point is not installed" in verdict
    assert row(lines, "entry point") == ["torch.backends: not installed"]


def test_a_start_file_outside_the_site_directories_is_never_run(doorless, house):
    """So it is after `pip install --target`: the entry point serves there, a .pth does not."""
    (doorless.site / "autoamp").rename(doorless.site / "elsewhere")
    try:
        target = {"PYTHONPATH": str(house.site)}
        code, verdict, lines = diagnose(doorless, **ON, **target, TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    finally:
        (doorless.site / "elsewhere").rename(doorless.site / "autoamp")
    assert (code, verdict) == (0, "active through torch.backends: cpu bfloat16")
    why = "not run: its folder is no site directory of this Python"
    assert row(lines, "start files") == [f"{house.site}/{name} ({why})" for name in START_FILES]


@pytest.fixture
def shim(doorless) -> Path:
    return doorless.site / "autoamp" / "sitecustomize"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A sitecustomize that does not hand over, and prints in every Python."""
    (tmp_path / "sitecustomize.py").write_text(f"print({NOISE!r}, end='')")
    return tmp_path


def test_a_sitecustomize_in_front_of_ours_shadows_it(doorless, shim, theirs):
    path = os.pathsep.join(map(str, (theirs, shim)))
    code, verdict, lines = diagnose(doorless, **ON, PYTHONPATH=path)
    assert code == 1
    assert f"its sitecustomize is shadowed by {theirs}/sitecustomize.py" in verdict
    assert verdict.endswith(
        f" - put {shim} first on PYTHONPATH, or reinstall autoamp ({REINSTALL})"
    )
    assert row(lines, "sitecustomize") == [
        f"{theirs}/sitecustomize.py (Python imports this one)",
        f"{shim}/sitecustomize.py (autoamp's, shadowed, unless the one above hands over)",
    ]


def test_our_sitecustomize_in_front_hands_over(doorless, shim, theirs):
    path = os.pathsep.join(map(str, (shim, theirs)))
    code, verdict, lines = diagnose(doorless, **ON, PYTHONPATH=path)
    assert (code, verdict) == (0, "active through sitecustomize: cpu bfloat16")
    assert row(lines, "sitecustomize") == [
        f"{shim}/sitecustomize.py (autoamp's, Python imports this one)",
        f"{theirs}/sitecustomize.py (autoamp's hands over to it)",
    ]


def test_a_folder_named_sitecustomize_is_not_listed(house, tmp_path):
    (tmp_path / "sitecustomize").mkdir()
    _, _, lines = diagnose(house, **ON, PYTHONPATH=str(tmp_path))
    assert row(lines, "sitecustomize") == ["none"]


def test_a_script_that_the_globs_leave_out_is_off(house):
    only = {"AUTO_MIXED_PRECISION_ONLY": "train*.py"}
    code, verdict, _ = diagnose(house, "tools/eval.py", **ON, **only)
    assert code == 0
    assert verdict == "off: AUTO_MIXED_PRECISION_ONLY=train*.py leaves eval.py out"
    code, verdict, _ = diagnose(house, "tools/train_big.py", **ON, **only)
    assert (code, verdict) == (0, ACTIVE)


def test_globs_without_a_script_are_a_condition(house):
    code, verdict, _ = diagnose(house, **ON, AUTO_MIXED_PRECISION_ONLY="train*.py")
    condition = "in scripts that match AUTO_MIXED_PRECISION_ONLY=train*.py"
    assert (code, verdict) == (0, f"{ACTIVE}, {condition}")


def test_a_missing_torch_is_broken(own):
    uninstall(own, "torch", "torch")
    code, verdict, lines = diagnose(own, **ON)
    assert (code, verdict) == (1, "broken: torch is not installed (pip install torch)")
    assert row(lines, "packages")[0].startswith("torch is not installed, wrapt ")
    assert row(lines, "devices") == ["not known"]


def test_a_torch_that_crashes_is_broken_and_its_last_words_are_shown(own):
    replace_torch(
        own, "import os, sys; print('last words', file=sys.stderr, flush=True); os.abort()"
    )
    code, verdict, lines = diagnose(own, **ON)
    assert code == 1
    assert verdict == (
        "broken: the child that imports torch: it was ended by SIGABRT"
        ' - if AUTO_MIXED_PRECISION=0 python -c "import torch" fails too, reinstall torch'
    )
    assert lines[-3:-1] == ["the child wrote to stderr:", "    last words"]


def test_a_torch_that_ends_python_is_broken(own):
    replace_torch(own, "import os; os._exit(3)")
    code, verdict, _ = diagnose(own, **ON)
    assert code == 1
    assert verdict.startswith("broken: the child that imports torch: it ended with exit code 3 - ")


def test_a_torch_that_cannot_be_imported_is_broken_with_its_traceback(own):
    replace_torch(own, "raise ImportError('libtorch.so: not found')")
    code, verdict, lines = diagnose(own)
    assert code == 1
    assert verdict.startswith(
        "broken: import torch fails: ImportError: libtorch.so: not found - if AUTO_MIXED"
    )
    assert "    ImportError: libtorch.so: not found" in lines


def test_a_torch_that_hangs_is_broken(monkeypatch):
    monkeypatch.setattr(doctor, "TIMEOUT", 0.01)
    findings = doctor.examine()
    assert findings["state"] == "broken"
    assert findings["verdict"].startswith(
        "the child that imports torch: no answer within 0.01 seconds - "
    )


@pytest.mark.parametrize(("package", "module"), [("wrapt", "wrapt"), ("pyyaml", "yaml")])
def test_a_missing_dependency_is_broken(own, package, module):
    uninstall(own, package, module)
    code, verdict, lines = diagnose(own, **ON)
    assert (code, verdict) == (1, f"broken: {module} is not installed (pip install {package})")
    assert f"{package} is not installed" in row(lines, "packages")[0]


def test_a_strict_switch_does_not_end_the_child(own):
    uninstall(own, "wrapt", "wrapt")
    code, verdict, _ = diagnose(own, **ON, AUTO_MIXED_PRECISION_STRICT="1")
    assert (code, verdict) == (1, "broken: wrapt is not installed (pip install wrapt)")


def test_an_unknown_policy_is_broken(house):
    code, verdict, lines = diagnose(house, AUTO_MIXED_PRECISION="bf61")
    complaint = (
        "AUTO_MIXED_PRECISION: unknown policy 'bf61'. Did you mean 'bf16'? "
        "A file is named by its path: ./bf61.yaml"
    )
    assert (code, verdict) == (1, f"broken: {complaint}")
    assert row(lines, "policy") == [complaint]


def test_a_misspelt_variable_is_broken(house):
    code, verdict, lines = diagnose(house, **ON, AUTO_MIXED_PRECISION_POLCY="bf16")
    complaint = (
        "AUTO_MIXED_PRECISION_POLCY: unknown variable. Did you mean AUTO_MIXED_PRECISION_POLICY?"
    )
    assert (code, verdict) == (1, f"broken: {complaint}")
    assert row(lines, "variables")[-1] == f"error: {complaint}"


def test_a_report_that_cannot_be_written_is_broken(house):
    code, verdict, _ = diagnose(house, **ON, AUTO_MIXED_PRECISION_REPORT="/nowhere/r.json")
    assert code == 1
    assert verdict.startswith(
        "broken: AUTO_MIXED_PRECISION_REPORT=/nowhere/r.json: there is no directory /nowhere; "
    )


def test_the_report_of_a_training_run_is_left_alone(house, tmp_path):
    report = tmp_path / "r.json"
    precious = '{"schema": 1, "autoamp": "precious"}'
    report.write_text(precious)
    assert diagnose(house, **ON, AUTO_MIXED_PRECISION_REPORT=str(report))[:2] == (0, ACTIVE)
    assert report.read_text() == precious
    report.write_text("no report")
    code, verdict, _ = diagnose(house, **ON, AUTO_MIXED_PRECISION_REPORT=str(report))
    assert code == 1
    assert f"{report} exists and is no report, and is left as it is" in verdict


def test_programs_can_read_the_findings(house):
    result = house.run("-m", "autoamp", "doctor", "--json", **ON)
    findings = json.loads(result.stdout)
    assert (result.code, findings["schema"]) == (0, 1)
    assert (findings["state"], findings["verdict"]) == ("active", ACTIVE)
    assert findings["python"]["path"] == str(house.python)
    assert findings["child"]["status"]["policy"]["name"] == "default"
    assert findings["child"]["devices"]["cpu"]["dtype"] == "bfloat16"
