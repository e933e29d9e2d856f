"""What pip puts where: the start files at the root of site-packages, in every kind of install."""

import email
import json
import os
import pkgutil
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from environments import CURRENT, ROOT, START_FILES, STUBS, Environment, doors

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


def build(source: Path, out: Path, **how: int) -> str:
    """What `python -m build`, as of one moment, says that has put an sdist and a wheel into `out`.

    CONTRIBUTING.md has the command.
    """
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source]
    environ = {**os.environ, "PYTHONWARNINGS": "always", "SOURCE_DATE_EPOCH": "1700000000"}
    built = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, **how)
    assert built.returncode == 0, built.stderr
    return built.stdout + built.stderr


@pytest.fixture(scope="module")
def release(source: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """An sdist, the wheel that is made from it, and what was said meanwhile."""
    out = tmp_path_factory.mktemp("release")
    said = build(source, out)
    sdist, made = next(out.glob("*.tar.gz")), next(out.glob("*.whl"))
    return SimpleNamespace(sdist=sdist, wheel=made, said=said)


def test_a_wheel_made_from_the_sdist_is_the_same_and_nothing_in_it_is_deprecated(release, wheel):
    assert listing(release.wheel) == listing(wheel)
    with tarfile.open(release.sdist) as archive:
        assert any(name.endswith("/policies/default.yaml") for name in archive.getnames())
    for complaint in ("Deprecat", "deprecat", "absent from the `packages`"):
        assert complaint not in release.said


def test_another_build_is_the_same_to_the_byte(release, source, tmp_path):
    """Of files that are older, by somebody with another umask."""
    copy, out = tmp_path / "copy", tmp_path / "out"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    for path in copy.rglob("*"):
        os.utime(path, (1_600_000_000, 1_600_000_000))
    build(copy, out, umask=0o077)
    for built in (release.sdist, release.wheel):
        assert (out / built.name).read_bytes() == built.read_bytes()


def test_twine_finds_nothing_wrong(release):
    command = [sys.executable, "-m", "twine", "check", "--strict", release.sdist, release.wheel]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_wheel_is_for_every_python_and_machine(wheel):
    assert wheel.name == f"autoamp-{autoamp.__version__}-py3-none-any.whl"
    kinds = {Path(name).suffix for name in listing(wheel)}
    assert not kinds & {".so", ".pyd", ".dylib", ".dll", ".c", ".cpp", ".cu", ".pyx"}


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


def find_uv() -> str:
    beside = os.path.dirname(sys.executable)
    uv = shutil.which("uv", path=os.pathsep.join([beside, os.environ["PATH"]]))
    if uv is None:
        pytest.skip("uv is neither beside this Python nor on PATH: pip install '.[test]' brings it")
    return uv


def install(how: str, environment: Environment, folder: Path, *what: str | Path) -> None:
    """Have pip or uv install something, or uninstall autoamp; neither finds a compiler, or a net.

    `how` is "pip" or "uv"; without `what` autoamp is uninstalled.
    """
    python = ["--python", environment.python]
    program = [find_uv(), "pip"] if how == "uv" else [sys.executable, "-m", "pip", *python]
    words = ["uninstall", "autoamp"]
    if what:
        words = ["install", "--no-deps", "--no-index", "--no-build-isolation", *what]
    words += python if how == "uv" else ["--yes"] * (not what)
    environ = {"PATH": str(folder / "empty"), "HOME": str(folder), **environment.variables}
    subprocess.run([*program, *words], check=True, capture_output=True, env=environ)


def files(site: Path) -> dict[str, bytes]:
    """What is in site-packages, but for the compiled forms of files that lie there themselves."""
    return {
        str(path.relative_to(site)): path.read_bytes()
        for path in site.rglob("*")
        if path.is_file() and path.parent != site / "__pycache__"
    }


@pytest.mark.parametrize(
    ("how", "what"), [("pip", "wheel"), ("pip", "sdist"), ("pip", "source"), ("uv", "wheel")]
)
def test_an_install_that_was_used_and_removed_leaves_nothing(
    pip_environment, release, source, tmp_path, how, what
):
    site, before = pip_environment.site, files(pip_environment.site)
    install(how, pip_environment, tmp_path, {**vars(release), "source": source}[what])
    assert {*START_FILES} <= {path.name for path in site.iterdir()}
    used = Environment(pip_environment.python, site).on()
    assert used.report("import torch").door == ".pth"
    assert used.run(used.python.with_name("autoamp"), "--version").stdout.startswith("autoamp ")
    install(how, pip_environment, tmp_path)
    assert files(site) == before
    assert not (used.python.with_name("autoamp")).exists()


def older(wheel: Path, folder: Path) -> Path:
    """The wheel as if it were version 0.0.1, and had a module that later ones do not have."""
    made = folder / "autoamp-0.0.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(made, "w") as target:
        for name in archive.namelist():
            data = archive.read(name)
            if "dist-info" in name:
                data = data.replace(autoamp.__version__.encode(), b"0.0.1")
            if name.endswith("RECORD"):
                data += b"autoamp/stale.py,,\nautoamp/gone/stale.py,,\n"
            target.writestr(name.replace(autoamp.__version__, "0.0.1"), data)
        target.writestr("autoamp/stale.py", "")
        target.writestr("autoamp/gone/stale.py", "")
    return made


def test_an_upgrade_leaves_nothing_of_the_version_before(pip_environment, wheel, tmp_path):
    site, before = pip_environment.site, files(pip_environment.site).keys()
    install("pip", pip_environment, tmp_path, older(wheel, tmp_path))
    assert (site / "autoamp" / "gone" / "stale.py").exists()
    Environment(pip_environment.python, site).on().report("import torch")
    install("pip", pip_environment, tmp_path, "--upgrade", wheel)
    found = {name for name in files(site).keys() - before if not name.endswith(".pyc")}
    pips = {"INSTALLER", "REQUESTED", "direct_url.json"}
    info = f"autoamp-{autoamp.__version__}.dist-info"
    assert found == listing(wheel) | {f"{info}/{name}" for name in pips}
    assert not [path for path in site.rglob("*") if "stale" in path.name or path.name == "gone"]
    install("pip", pip_environment, tmp_path)


def test_a_target_folder_is_reached_through_torch(pip_environment, wheel, tmp_path):
    """Python reads no start files in the folders of PYTHONPATH; torch finds entry points there."""
    target = tmp_path / "target"
    install("pip", pip_environment, tmp_path, "--target", target, wheel)
    environment = Environment(pip_environment.python, pip_environment.site).on()
    report = environment.report("import torch", PYTHONPATH=str(target))
    assert report.door == "torch.backends"


def test_a_user_install_is_found_by_the_python_of_the_system(wheel, toolbox, tmp_path):
    base, home = Path(sys._base_executable), str(tmp_path / "user")
    pip = [base, "-m", "pip", "install", "--user", "--no-deps", "--no-index", wheel]
    environ = {"PYTHONUSERBASE": home, "PYTHONPATH": str(toolbox), "PIP_BREAK_SYSTEM_PACKAGES": "1"}
    subprocess.run(pip, check=True, capture_output=True, env={"PATH": os.defpath, **environ})
    user = Environment(base, tmp_path, {"PYTHONUSERBASE": home, "PYTHONPATH": str(STUBS)}).on()
    assert user.report("import torch").door == ".pth"


def test_an_environment_of_its_own_runs_its_own_and_says_whom_it_cannot_reach(
    pip_environment, wheel, tmp_path
):
    """As pipx has it: the command is on PATH, and Python of another environment."""
    install("pip", pip_environment, tmp_path, wheel)
    try:
        apart = Environment(pip_environment.python, pip_environment.site)
        command = apart.python.with_name("autoamp")
        (tmp_path / "train.py").write_text("import torch, probe; probe.report()")
        own = apart.run(command, "run", tmp_path / "train.py")
        words = ("run", "--", sys._base_executable, tmp_path / "train.py")
        other = apart.run(command, *words, PYTHONPATH=str(STUBS))
        said = apart.run(command, "doctor")
    finally:
        install("pip", pip_environment, tmp_path)
    assert json.loads(own.stdout.splitlines()[-1])["door"] == ".pth"
    assert json.loads(other.stdout.splitlines()[-1])["door"] is None
    assert other.stderr == (
        f"autoamp run: autoamp is not installed for {sys._base_executable}; running in float32\n"
    )
    assert said.stdout.startswith(f"autoamp         {autoamp.__version__} ({apart.site}/autoamp)")
    assert said.stderr == ""


def test_uv_installs_editable_with_the_start_files(pip_environment, source, tmp_path):
    uv, checkout = find_uv(), tmp_path / "checkout"
    shutil.copytree(source, checkout)
    how = ["--no-build-isolation", "--no-deps", "--offline", "--python", pip_environment.python]
    environ = {"PATH": os.defpath, "HOME": str(tmp_path), **pip_environment.variables}
    subprocess.run([uv, "pip", "install", *how, "-e", checkout], check=True, env=environ)
    found = {path.name for path in pip_environment.site.iterdir()}
    subprocess.run([uv, "pip", "uninstall", *how[3:], "autoamp"], check=True, env=environ)
    assert found >= set(START_FILES)
