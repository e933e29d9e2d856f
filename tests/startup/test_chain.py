"""There is one sitecustomize a process: ours hands over to the one that it stands in front of."""

from pathlib import Path

import pytest
from environments import Environment, doors, find_python

DDTRACE = """
import os, sys
here = os.path.dirname(os.path.abspath(__file__))
print("ddtrace")
position = sys.path.index(here)
del sys.path[position]
own = sys.modules.pop("sitecustomize")
try: import sitecustomize
except ImportError: sys.modules["sitecustomize"] = own
finally: sys.path.insert(position, here)
"""


@pytest.fixture
def ours(no_start_files) -> Path:
    return no_start_files.site / "autoamp" / "sitecustomize"


@pytest.fixture
def folder(tmp_path: Path):
    """Make a folder that holds this sitecustomize."""

    def make(name: str, code: str) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "sitecustomize.py").write_text(code)
        return tmp_path / name

    return make


def path(*folders: Path | str) -> dict[str, str]:
    return {"PYTHONPATH": ":".join(map(str, folders))}


@pytest.mark.parametrize("value", [None, "0", "1"])
def test_the_users_sitecustomize_runs_after_ours(no_start_files, ours, folder, value):
    user = folder("user", "print('user', __name__)")
    script = "import sys, torch; print(sys.modules['sitecustomize'].__file__)"
    both = path(ours, user)
    report = no_start_files.report(script, AUTO_MIXED_PRECISION=value, **both)
    assert report.printed == ["user sitecustomize", f"{user}/sitecustomize.py"]
    assert doors(report) == (["sitecustomize"] if value == "1" else [])
    assert report.stderr == ""


@pytest.mark.parametrize("order", ["ours first", "ddtrace first"])
def test_a_chain_of_three_runs_each_once(no_start_files, ours, folder, order):
    ddtrace, user = folder("ddtrace", DDTRACE), folder("user", "print('user')")
    first, second = (ours, ddtrace) if order == "ours first" else (ddtrace, ours)
    report = no_start_files.on(**path(first, second, user)).report("import torch")
    assert report.printed == ["ddtrace", "user"]
    assert doors(report) == ["sitecustomize"]


def test_opentelemetry_behind_ours_runs(no_start_files, ours, folder):
    other = folder("otel", "print('otel')")
    report = no_start_files.on(**path(ours, other)).report("import torch")
    assert (report.printed, doors(report)) == (["otel"], ["sitecustomize"])


def test_behind_one_that_hides_us_the_entry_point_serves(no_start_files, ours, folder):
    """OpenTelemetry's sitecustomize does not hand over."""
    other = folder("otel", "print('otel')")
    report = no_start_files.on(**path(other, ours)).report("import torch")
    assert (report.printed, doors(report)) == (["otel"], ["torch.backends"])


def test_an_error_of_the_users_is_reported_by_python_as_theirs(no_start_files, ours, folder):
    user = folder("user", "raise RuntimeError('theirs')")
    alone = no_start_files.on(**path(user)).report("pass")
    behind = no_start_files.on(**path(ours, user)).report("import torch")
    assert behind.stderr == alone.stderr
    assert "RuntimeError: theirs" in behind.stderr
    assert doors(behind) == ["sitecustomize"]


def test_a_system_exit_of_the_users_ends_python_as_without_us(no_start_files, ours, folder):
    user = folder("user", "raise SystemExit(3)")
    alone = no_start_files.on(**path(user)).run("-c", "print('ran')")
    behind = no_start_files.on(**path(ours, user)).run("-c", "print('ran')")
    assert (behind.code, behind.stdout) == (alone.code, alone.stdout)
    assert behind.stderr.splitlines()[0] == alone.stderr.splitlines()[0]
    assert behind.stderr.splitlines()[-1] == alone.stderr.splitlines()[-1]


def test_a_folder_named_sitecustomize_is_no_sitecustomize(no_start_files, ours, folder, tmp_path):
    (tmp_path / "root" / "sitecustomize").mkdir(parents=True)
    user = folder("user", "print('user')")
    look = "import sys; print(sys.modules['sitecustomize'].__file__)"
    report = no_start_files.on(**path(ours, tmp_path / "root")).report(look)
    assert (report.printed, report.stderr) == ([f"{ours}/sitecustomize.py"], "")
    report = no_start_files.on(**path(ours, tmp_path / "root", user)).report("pass")
    assert (report.printed, report.stderr) == (["user"], "")


def test_our_folder_in_several_spellings_does_not_chain_to_itself(
    no_start_files, ours, folder, tmp_path
):
    (tmp_path / "link").symlink_to(ours)
    relative = Path("..") / ours.relative_to(no_start_files.python.parents[1])
    user = folder("user", "print('user')")
    spellings = (ours, ours, f"{ours}/", relative, tmp_path / "link", user)
    report = no_start_files.on(**path(*spellings)).report("import torch")
    assert (report.printed, doors(report), report.stderr) == (["user"], ["sitecustomize"], "")


def test_python_path_and_sys_path_are_as_without_us(no_start_files, ours, folder):
    user = folder("user", "")
    look = "import os, sys, torch; print(os.environ['PYTHONPATH']); print(sys.path)"
    with_us = no_start_files.on(**path(ours, user)).report(look)
    neutral = folder("neutral", "")
    without = no_start_files.report(look, **path(neutral, user))
    expected = [line.replace(str(neutral), str(ours)) for line in without.printed]
    assert with_us.printed == expected


def test_the_systems_sitecustomize_still_runs(no_start_files, ours):
    """Debian and Homebrew keep one beside the standard library, behind PYTHONPATH."""
    late = no_start_files.site / "sitecustomize.py"
    late.write_text("print('system')")
    try:
        report = no_start_files.on(**path(ours)).report("import torch")
    finally:
        late.unlink()
    assert (report.printed, doors(report)) == (["system"], ["sitecustomize"])


def test_debians_own_sitecustomize_still_runs(ours, tmp_path):
    python = Path("/usr/bin/python3")
    found = list(Path("/usr/lib").glob("python3*/sitecustomize.py"))
    if not python.exists() or not found:
        pytest.skip("only Debian and its kin ship a sitecustomize, and here is none to be kept")
    script = "import sys; print(sys.modules['sitecustomize'].__file__ in sys.argv)"
    debian = Environment(python, tmp_path).on(**path(ours))
    result = debian.run("-c", script, *found)
    assert (result.code, result.stdout, result.stderr) == (0, "True\n", "")


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.7", "3.8", "3.9"])
def test_an_old_python_that_inherits_the_path_runs_as_if_we_were_not_there(
    ours, folder, tmp_path, version
):
    old = Environment(find_python(version), tmp_path)
    user = folder("user", "import sys; sys.stdout.write('user ')")
    (tmp_path / "root" / "sitecustomize").mkdir(parents=True)
    script = "import sys; sys.stdout.write(str('autoamp' in sys.modules))"
    for folders in (ours, tmp_path / "root"), (ours, user):
        result = old.on(**path(*folders)).run("-c", script)
        assert (result.code, result.stderr) == (0, "")
        handed_over = user in folders and version != "2.7"
        assert result.stdout == ("user False" if handed_over else "False")


def test_another_environment_that_inherits_the_path_stays_inert(ours, make_environment):
    """Children may be run by a Python in which autoamp is not installed."""
    other = make_environment("3.12", autoamp=False)
    report = other.on(**path(ours)).report("import torch")
    assert (report.phase, report.stderr) == (None, "")


def test_the_repository_on_the_path_is_not_taken_for_a_package(no_start_files, source, folder):
    """`sitecustomize/` holds no `__init__.py`: as a namespace, any real module wins over it."""
    user = folder("user", "print('user')")
    report = no_start_files.report("pass", **path(source, user))
    assert report.printed == ["user"]


def test_a_broken_package_behind_the_shim_costs_one_line(own):
    shim = own.site / "autoamp" / "sitecustomize"
    for name in ("autoamp.pth", "autoamp.start"):
        (own.site / name).unlink()
    (own.site / "autoamp" / "bootstrap.py").write_text("def broken(:\n")
    result = own.on(**path(shim)).run("-c", "print('ran')")
    assert (result.code, result.stdout) == (0, "ran\n")
    assert result.stderr.startswith("autoamp: off in this process: SyntaxError: invalid syntax")
    assert result.stderr.endswith("; the program continues in float32\n")
    assert len(result.stderr.splitlines()) == 1
    off = own.run("-c", "print('ran')", **path(shim))
    assert (off.code, off.stdout, off.stderr) == (0, "ran\n", "")
