"""The house keeps its shape: one direction, one room that patches, one table of what is patched."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import autoamp
from autoamp.patches import PATCHES
from autoamp.requirements import PRIVATE

PACKAGE = Path(autoamp.__file__).parent
README = Path(__file__).parents[1] / "README.md"
ROOMS = {path.stem: ast.parse(path.read_text()) for path in PACKAGE.glob("*.py")}
ALL_CODE = {
    str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")
}
REPORTING = {
    f"reporting.{path.stem}": ast.parse(path.read_text())
    for path in (PACKAGE / "reporting").glob("*.py")
    if path.stem != "__init__"
}
PLOTTING = {"jinja2", "matplotlib", "rich", "tensorboard"}
STANDARD_LIBRARY_ONLY = {"__init__", "bootstrap"}
WITHOUT_TORCH = {"__init__", "__main__", "bootstrap", "errors", "settings", "policy", "policyfile"}
WITHOUT_TORCH |= {"grammar", "opnames", "oprules", "reading", "schema", "sections", "spelling"}
WITHOUT_TORCH |= {
    "policycli",
    "learned",
    "reportcli",
    "policytext",
    "resolution",
    "yamlnodes",
    "report",
    "speech",
    "api",
    "cli",
    "doctor",
}


def imported(tree: ast.Module) -> tuple[set[str], set[str]]:
    """(our rooms, other packages) that a room imports when it is itself imported."""
    ours, others = set(), set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").removeprefix("autoamp").lstrip(".")
            if node.level or (node.module or "").split(".")[0] == "autoamp":
                ours |= {module} if module else {alias.name for alias in node.names}
            else:
                others.add((node.module or "").split(".")[0])
    return ours & ROOMS.keys(), others


def reachable(room: str) -> set[str]:
    found: set[str] = set()
    stack = [room]
    while stack:
        for other in imported(ROOMS[stack.pop()])[0] - found:
            found.add(other)
            stack.append(other)
    return found


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_no_room_imports_itself_through_others(room: str) -> None:
    assert room not in reachable(room)


def test_nothing_of_reporting_imports_itself_through_others() -> None:
    """The names of these rooms, and of those they import, are spelled out from the package on."""
    rooms = {**ROOMS, **REPORTING}
    arrows = {}
    for room, tree in rooms.items():
        inside = room.startswith("reporting.")
        arrows[room] = set()
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.level:
                base = "reporting" if inside and node.level == 1 else ""
                path = ".".join(filter(None, (base, node.module)))
                names = {".".join(filter(None, (path, alias.name))) for alias in node.names}
                arrows[room] |= ({path} | names) & rooms.keys()
    for room in REPORTING:
        found, stack = set(), [room]
        while stack:
            new = arrows[stack.pop()] - found
            found |= new
            stack += new
        assert room not in found, room


@pytest.mark.parametrize("room", sorted(ROOMS | REPORTING))
def test_plotting_is_loaded_by_pages_alone(room: str) -> None:
    others = imported((ROOMS | REPORTING)[room])[1]
    assert room in ("reporting.page", "reporting.plots") or not others & PLOTTING


@pytest.mark.parametrize("room", sorted(STANDARD_LIBRARY_ONLY))
def test_start_up_imports_nothing_of_ours_and_only_light_modules(room: str) -> None:
    ours, others = imported(ROOMS[room])
    assert ours == set()
    assert others <= {"__future__", "os", "sys", "_thread"}


@pytest.mark.parametrize("room", sorted(WITHOUT_TORCH & ROOMS.keys()))
def test_what_says_and_reads_does_not_load_torch(room: str) -> None:
    for name in {room, *reachable(room)}:
        assert "torch" not in imported(ROOMS[name])[1], name


@pytest.mark.parametrize("room", sorted(ROOMS.keys() - {"cli", "doctor", "__main__"}))
def test_the_runtime_does_not_know_the_command_line(room: str) -> None:
    assert not reachable(room) & {"cli", "doctor"}


@pytest.mark.parametrize("file", sorted(ALL_CODE.keys() - {"patching.py"}))
def test_only_patching_sets_attributes_by_name(file: str) -> None:
    """`object.__setattr__` on our own copies (casting) is another matter."""
    calls = [
        ast.unparse(node)
        for node in ast.walk(ALL_CODE[file])
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr")
    ]
    assert calls == []


@pytest.mark.parametrize("room", sorted(ROOMS.keys() - {"patches"}))
def test_only_the_table_names_what_is_replaced(room: str) -> None:
    """Activation names one row again: the one that Dynamo must not see."""
    names = {
        node.value
        for node in ast.walk(ROOMS[room])
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"torch[\w.]*:[\w.]+", node.value)
    }
    assert names == ({"torch.nn:Module.__call__"} if room == "activation" else set())


def inside_functions(tree: ast.Module) -> set[str]:
    """What functions look up in torch when they run: dotted names, without the first part."""
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.Lambda))]
    texts = {
        ast.unparse(node)
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
    }
    return {text.removeprefix("torch.") for text in texts if re.fullmatch(r"torch[\w.]+", text)}


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_private_names_of_torch_are_checked_before_anything_runs(room: str) -> None:
    """A name that is looked up when a room is loaded is missed then; the others are listed."""
    private = {name for name in inside_functions(ROOMS[room]) if re.search(r"(^|\.)_[^_]", name)}
    known = {".".join(name.split(".")[:n]) for name in PRIVATE for n in range(1, 9)}
    assert {name for name in private if not name.startswith(PRIVATE)} <= known


def test_readme_prints_the_table_of_patches() -> None:
    readme = README.read_text()
    section = readme.split("## What is patched", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", section, re.MULTILINE)
    assert rows == [(patch.target, patch.why) for patch in PATCHES]


def test_public_functions_say_what_they_do() -> None:
    silent = [
        f"{room}.{node.name}"
        for room, tree in ROOMS.items()
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert silent == []
