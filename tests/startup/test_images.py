"""Autoamp in images: what the files in scripts/container make, on a read-only system."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from environments import CURRENT, ROOT, Environment

from autoamp import policyfile

torch = pytest.importorskip("torch")
TRAIN = """
import os, torch
try:
    open("mark", "w")
except OSError as error:
    print("read-only:", error.errno == 30, "user:", os.getuid(), "home:", os.environ.get("HOME"))
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
SWITCH = {"AUTO_MIXED_PRECISION": "1", "AUTO_MIXED_PRECISION_DTYPE": "bfloat16"}
# A mount namespace with everything read-only but one folder, a user without a name, and of root's
# rights only the one to walk through folders: Python itself may lie in root's home.
BOX = """
mkdir "$1/root" && mount --rbind / "$1/root" && mount -o remount,ro,bind "$1/root" || exit 77
mount --bind "$2" "$1/root$2" || exit 77
cd "$1/root" && exec chroot . setpriv --reuid 65534 --regid 65534 --clear-groups \
    --inh-caps=-all,+dac_read_search --ambient-caps=-all,+dac_read_search "${@:3}"
"""


@pytest.fixture(scope="session")
def packages(tmp_path_factory) -> Path:
    """What the tests run with, but for autoamp."""
    folder = tmp_path_factory.mktemp("packages")
    for found in Path(torch.__file__).parents[1].iterdir():
        if "autoamp" not in found.name:
            (folder / found.name).symlink_to(found)
    return folder


@pytest.fixture(scope="session")
def by_pip(make_environment, packages) -> Environment:
    return make_environment(CURRENT, packages=packages)


@pytest.fixture(scope="session")
def by_folder(wheel: Path, make_environment, packages, tmp_path_factory) -> Environment:
    """Nothing in site-packages, the content of the wheel in a folder that PYTHONPATH names."""
    made = make_environment(CURRENT, autoamp=False, packages=packages)
    folder = tmp_path_factory.mktemp("opt")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    search = os.pathsep.join(map(str, (folder / "autoamp" / "sitecustomize", folder)))
    return Environment(made.python, made.site, {"PYTHONPATH": search})


@pytest.fixture
def output() -> Iterator[Path]:
    """The one folder that can be written; pytest's own are closed to other users."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def boxed(output: Path, tmp_path: Path):
    """`boxed(environment, *arguments, **variables)` runs Python on the read-only system."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv", "chroot"))):
        pytest.skip("only root can mount read-only: run it as root, with util-linux installed")
    output.chmod(0o777)

    def run(environment: Environment, *arguments: str, **variables: str) -> SimpleNamespace:
        box = ["unshare", "--mount", "bash", "-c", BOX, "box", tmp_path, output]
        done = subprocess.run(
            [*box, environment.python, *arguments],
            env={
                "PATH": os.environ["PATH"],
                "TMPDIR": str(output),  # torch does not come up without one
                **environment.variables,
                **variables,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 77:
            pytest.skip(
                f"nobody may mount here ({done.stderr.strip()}): a container needs SYS_ADMIN for it"
            )
        (tmp_path / "root").rmdir()
        return SimpleNamespace(code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    return run


@pytest.mark.parametrize("how", ["by_pip", "by_folder"])
def test_it_trains_where_nothing_can_be_written(boxed, how, request, output):
    report = output / "run.json"
    result = boxed(
        request.getfixturevalue(how),
        "-c",
        TRAIN,
        **SWITCH,
        AUTO_MIXED_PRECISION_REPORT=str(report),
    )
    assert result.code == 0, result.stderr
    assert result.stdout == "read-only: True user: 65534 home: None\n"
    first, last = result.stderr.splitlines()
    assert first.startswith("autoamp 0.1.0 on: cpu bfloat16")
    assert last == "autoamp: 2 regions, 2 steps taken"
    assert report.stat().st_uid == 65534


SITE = "import sys; sys.path[1:1] = {}\n"


@pytest.mark.parametrize(
    ("how", "flag", "is_on"),
    [
        ("by_pip", "-E", True),
        ("by_pip", "-I", True),
        ("by_pip", "-S", True),
        ("by_folder", "-E", False),
        ("by_folder", "-I", False),
        ("by_folder", "-S", True),
    ],
)
def test_flags_of_python_do_what_the_page_says(request, packages, how, flag, is_on):
    environment = request.getfixturevalue(how)
    folders = [str(packages), str(environment.site)]
    reach = SITE.format(folders) if flag == "-S" else ""
    result = environment.run(flag, "-c", reach + TRAIN, **SWITCH)
    assert result.code == 0, result.stderr
    assert ("on: cpu bfloat16" in result.stderr) is is_on
    page = (ROOT / "docs/containers.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{flag}`")]
    cell = row.split("|")[2 if how == "by_pip" else 3].strip()
    assert cell.startswith("on" if is_on else "off")


def test_the_example_for_kubernetes_is_a_policy_and_a_pod_that_use_each_other(tmp_path):
    text = (ROOT / "scripts/container/kubernetes.yaml").read_text()
    config, pod = yaml.safe_load_all(text)
    (name,) = config["data"]
    (container,) = pod["spec"]["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert variables["AUTO_MIXED_PRECISION"] == f"{mounts['policy']}/{name}"
    assert variables["AUTO_MIXED_PRECISION_REPORT"].startswith(mounts["output"])
    (tmp_path / name).write_text(config["data"][name])
    policy = policyfile.load(str(tmp_path / name), "the example")
    assert policy.devices["cuda"] == "bfloat16"


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.pythonpath"])
def test_images_ask_for_what_the_package_asks_for(name):
    text = (ROOT / "scripts/container" / name).read_text()
    metadata = (ROOT / "setup.cfg").read_text()
    for need in ("wrapt>=1.14,!=2.2.0", "pyyaml>=5.4"):
        assert f"'{need}'" in text
        assert f"    {need}\n" in metadata
    assert "AUTO_MIXED_PRECISION=" not in text.replace("-e AUTO_MIXED_PRECISION=1", "")


def test_the_folder_of_the_second_image_is_found_as_it_says(wheel, tmp_path):
    """`pip install --target` puts the content of the wheel where PYTHONPATH looks."""
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*command, "--target", tmp_path / "autoamp", wheel], check=True)
    text = (ROOT / "scripts/container/Dockerfile.pythonpath").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("ENV PYTHONPATH=")]
    shim, folder = line.partition("=")[2].split(":")
    assert folder == "/opt/autoamp"
    assert (tmp_path / Path(shim).relative_to("/opt") / "sitecustomize.py").is_file()
