"""What pip puts where: the start files at the root of site-packages, in every kind of install."""

import email
import os
import pkgutil
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from environments import CURRENT, ROOT, START_FILES, Environment, doors

import autoamp
from autoamp.bootstrap import OFF

PTH = ROOT / "sitecustomize" / "autoamp.pth"
START = ROOT / "sitecustomize" / "autoamp.start"


def listing(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_the_start_files_at_its_root_and_in_its_record(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        record = archive.read(f"autoamp-{autoamp.__version__}.dist-info/RECORD").decode()
    for name in START_FILES:
        assert name in names
        assert f"\n{name},sha256=" in f"\n{record}"


def test_the_wheel_has_no_sitecustomize_where_python_would_import_it(wheel):
    """There is one such slot, and Debian's own would shadow it."""
    assert {name.partition("/")[0] for name in listing(wheel)} == {
        "autoamp",
        f"autoamp-{autoamp.__version__}.dist-info",
        *START_FILES,
    }


def test_the_wheel_holds_the_whole_package_the_policies_and_the_shim(wheel):
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "autoamp").rglob("*.py")}
    policies = {f"autoamp/{path.relative_to(ROOT)}" for path in ROOT.glob("policies/*.yaml")}
    shim = {"autoamp/sitecustomize/sitecustomize.py"}
    assert len(policies) > 2
    assert modules | policies | shim <= listing(wheel)


def test_a_wheel_made_from_the_sdist_is_the_same_and_nothing_in_it_is_deprecated(
    source, wheel, tmp_path
):
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, source]
    environ = {**os.environ, "PYTHONWARNINGS": "always"}
    built = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert built.returncode == 0, built.stderr
    assert listing(next(tmp_path.glob("*.whl"))) == listing(wheel)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        assert any(name.endswith("/policies/default.yaml") for name in archive.getnames())
    for complaint in ("Deprecat", "deprecat", "absent from the `packages`"):
        assert complaint not in built.stdout + built.stderr


def test_the_metadata_says_what_is_needed_and_how_to_come_in(wheel):
    with zipfile.ZipFile(wheel) as archive:
        info = f"autoamp-{autoamp.__version__}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "MIT"
    needs = {need for need in metadata.get_all("Requires-Dist") if "extra" not in need}
    assert needs == {"torch>=2.11", "wrapt!=2.2.0,>=1.14", "pyyaml>=5.4"}
    assert "[torch.backends]\nautoamp = autoamp.bootstrap:start_in_torch" in entry_points
    assert "[console_scripts]\nautoamp = autoamp.cli:main" in entry_points


def test_the_pth_is_one_plain_line_that_a_reader_and_a_scanner_can_trust():
    text = PTH.read_bytes().decode("ascii")
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert text.startswith("import ")
    for word in ("exec", "eval", "base64", "subprocess", "compile"):
        assert word not in text


def test_the_words_for_off_are_the_same_in_each_start_file():
    """They are written out there, so that nothing of ours is imported to learn them."""
    words = ", ".join(f'"{word}"' for word in ("", *OFF))
    assert f"({words})" in PTH.read_text()
    assert f"({words})" in (ROOT / "sitecustomize" / "sitecustomize.py").read_text()


def test_the_start_file_names_a_callable_without_arguments(installed):
    """Python 3.15 calls it; until then this stands in."""
    name = START.read_text().strip()
    assert name == "autoamp.bootstrap:start"
    assert callable(pkgutil.resolve_name(name))
    script = f"import pkgutil; start = pkgutil.resolve_name({name!r}); start(); start()\n"
    report = installed.on().report(script + "import torch", "-S", PYTHONPATH=str(installed.site))
    assert doors(report) == [".start"]


def test_the_pth_sorts_after_the_finder_of_an_editable_install():
    assert sorted(["autoamp.pth", "__editable__.autoamp-0.1.0.pth"])[-1] == "autoamp.pth"


def test_the_shim_is_short_and_in_a_folder_that_is_no_package():
    shim = ROOT / "sitecustomize" / "sitecustomize.py"
    assert len(shim.read_text().splitlines()) <= 45
    assert not (shim.parent / "__init__.py").exists()


@pytest.fixture(scope="module")
def pip_environment(make_environment, toolbox) -> Environment:
    """An environment for pip to install into, with the tests' own setuptools."""
    environment = make_environment(CURRENT, autoamp=False)
    return Environment(environment.python, environment.site, {"PYTHONPATH": str(toolbox)})


@pytest.mark.parametrize("mode", ["lenient", "strict", "compat"])
def test_an_editable_install_has_the_start_files_and_takes_them_with_it(
    pip_environment, source, tmp_path, mode
):
    checkout = tmp_path / "checkout"
    shutil.copytree(source, checkout, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    shutil.copy(Path(__file__).with_name("stubs") / "activation.py", checkout / "autoamp")
    pip = [sys.executable, "-m", "pip", "--python", pip_environment.python]
    how = ["--no-build-isolation", "--no-deps", "--config-settings", f"editable_mode={mode}"]
    environ = {"PATH": os.defpath, **pip_environment.variables}
    pycache, before = {"__pycache__"}, {path.name for path in pip_environment.site.iterdir()}
    subprocess.run(
        [*pip, "install", *how, "-e", checkout], check=True, capture_output=True, env=environ
    )
    report = (
        Environment(pip_environment.python, pip_environment.site)
        .on()
        .report("import torch, autoamp; print(autoamp.__file__)")
    )
    for name in START_FILES:
        assert (pip_environment.site / name).read_text() == (PTH.parent / name).read_text()
    subprocess.run(
        [*pip, "uninstall", "-y", "autoamp"], check=True, capture_output=True, env=environ
    )
    assert doors(report) == [".pth"]
    assert str(checkout) in report.printed[0]
    after = {path.name for path in pip_environment.site.iterdir()}
    assert after - pycache == before - pycache


def test_uv_installs_editable_with_the_start_files(pip_environment, source, tmp_path):
    beside = os.path.dirname(sys.executable)
    uv = shutil.which("uv", path=os.pathsep.join([beside, os.environ["PATH"]]))
    if uv is None:
        pytest.skip("uv is neither beside this Python nor on PATH: pip install '.[test]' brings it")
    checkout = tmp_path / "checkout"
    shutil.copytree(source, checkout)
    how = ["--no-build-isolation", "--no-deps", "--offline", "--python", pip_environment.python]
    environ = {"PATH": os.defpath, "HOME": str(tmp_path), **pip_environment.variables}
    subprocess.run([uv, "pip", "install", *how, "-e", checkout], check=True, env=environ)
    found = {path.name for path in pip_environment.site.iterdir()}
    subprocess.run([uv, "pip", "uninstall", *how[3:], "autoamp"], check=True, env=environ)
    assert found >= set(START_FILES)
