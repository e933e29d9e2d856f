"""Real interpreters in real virtual environments, with a stub in the place of torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from environments import CURRENT, ROOT, START_FILES, STUBS, SUPPORTED, Environment, find_python


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a release is made of: building leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("autoamp", "policies", "sitecustomize"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="session")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built once."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="session")
def make_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory):
    """Make a virtual environment with the wheel in it.

    Torch and autoamp.activation are stubs there; or else `packages` names the directory of a torch.
    """

    def make(
        version: str,
        start_files: bool = True,
        autoamp: bool = True,
        packages: Path | None = None,
    ) -> Environment:
        folder = tmp_path_factory.mktemp(f"python{version}-")
        create = [find_python(version), "-m", "venv", "--without-pip", folder]
        subprocess.run(create, check=True, capture_output=True)
        site = folder / "lib" / f"python{version}" / "site-packages"
        shutil.copy(STUBS / "probe.py", site)
        if autoamp:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        if packages is not None:
            (site / "packages.pth").write_text(f"{packages}\n")
        else:
            shutil.copytree(STUBS / "torch", site / "torch")
            if autoamp:
                shutil.copy(STUBS / "activation.py", site / "autoamp")
        if not start_files:
            for name in START_FILES:
                (site / name).unlink(missing_ok=True)
        return Environment(folder / "bin" / "python", site)

    return make


@pytest.fixture(scope="session")
def toolbox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pip and what builds packages, of the environment that runs the tests, and nothing else."""
    folder = tmp_path_factory.mktemp("toolbox")
    names = (
        "pip",
        "build",
        "pyproject_hooks",
        "packaging",
        "setuptools",
        "wheel",
        "_distutils_hack",
    )
    for entry in map(Path, sys.path):
        for found in entry.glob("*") if entry.name == "site-packages" else ():
            if found.name.partition("-")[0].partition(".")[0] in names:
                (folder / found.name).symlink_to(found)
    return folder


@pytest.fixture(scope="session", params=SUPPORTED)
def installed(request: pytest.FixtureRequest, make_environment) -> Environment:
    """Autoamp as pip installs it, in each Python that it supports; not to be changed by a test."""
    return make_environment(request.param)


@pytest.fixture(scope="session", params=SUPPORTED)
def no_start_files(request: pytest.FixtureRequest, make_environment) -> Environment:
    """The same without the start files; not to be changed by a test."""
    return make_environment(request.param, start_files=False)


@pytest.fixture(scope="session")
def shim(no_start_files: Environment) -> Environment:
    """The same, with autoamp's sitecustomize on PYTHONPATH instead."""
    folder = no_start_files.site / "autoamp" / "sitecustomize"
    return Environment(no_start_files.python, no_start_files.site, {"PYTHONPATH": str(folder)})


@pytest.fixture(scope="session")
def current(make_environment) -> Environment:
    """`installed` in the running Python's version alone, for what no version can change."""
    return make_environment(CURRENT)


@pytest.fixture
def own(make_environment) -> Environment:
    """A fresh environment of the running Python's version, for a test that changes it."""
    return make_environment(CURRENT)
