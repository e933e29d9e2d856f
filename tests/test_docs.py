"""What the documents show can be done as shown: snippets load, commands run, files exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from autoamp import policyfile
from autoamp.cli import main
from autoamp.settings import VARIABLES

ROOT = Path(__file__).parents[1]
PAGES = {
    path.name: path.read_text()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")))
}
TRAIN = """
import sys, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""
SECTION = re.compile(
    "(devices|ops|modules|parameters|outputs|loss_scale|fallback|performance|distributed): .+"
)


WHOLE = re.MULTILINE | re.DOTALL


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of the blocks that name this language."""
    return [
        (page, block)
        for page, text in PAGES.items()
        for opening, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, WHOLE)
        if opening == language
    ]


def inline() -> list[tuple[str, str]]:
    """(page, code) of what stands between single backquotes."""
    return [
        (page, code)
        for page, text in PAGES.items()
        for code in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=WHOLE))
    ]


@pytest.mark.parametrize(("page", "text"), blocks("yaml"))
def test_policies_load(page: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "team.yaml").write_text("extends: bf16\n")
    file = tmp_path / "below" / "mine.yaml"
    file.write_text(text)
    policyfile.load(str(file), page)


POLICY_LINES = [
    (page, code) for page, code in inline() if SECTION.fullmatch(code) and "[...]" not in code
]


@pytest.mark.parametrize(("page", "code"), POLICY_LINES)
def test_lines_of_policies_load(page: str, code: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("extends: default\n" + code.replace("…", "softmax") + "\n")
    policyfile.load(str(file), page)


def test_there_are_such_lines() -> None:
    assert len(POLICY_LINES) > 20


@pytest.mark.parametrize("page", PAGES)
def test_variables_exist(page: str) -> None:
    named = set(re.findall(r"(?<!TF_ENABLE_)AUTO_MIXED_PRECISION_([A-Z0-9_]+)\b", PAGES[page]))
    assert {n for n in named if not n.startswith("GRAPH_REWRITE")} <= VARIABLES.keys()


@pytest.mark.parametrize("page", PAGES)
def test_files_exist(page: str) -> None:
    here = ROOT if (ROOT / page).exists() else ROOT / "docs"
    for link in re.findall(r"\]\(([^)#:]+)\)", PAGES[page]):
        assert (here / link).exists(), link
    for path in re.findall(r"`((?:tests|scripts|docs|policies)/[\w./-]*)", PAGES[page]):
        assert (ROOT / path).exists(), path
    if page == "how-it-works.md":
        for room in re.findall(r"[\w/]+\.py\b", PAGES[page]):
            assert (ROOT / "autoamp" / room).exists(), room


@pytest.mark.parametrize(("page", "text"), blocks("python"))
def test_code_runs(page: str, text: str, run_script) -> None:
    result = run_script("import torch\nmodel, x = torch.nn.Linear(2, 2), torch.ones(1, 2)\n" + text)
    assert result.returncode == 0, result.stderr


COMMANDS = [
    (page, line.partition("#")[0].strip())
    for page, text in blocks("")
    for line in text.splitlines()
    if re.match(r"autoamp [a-z]", line) and not re.search("[|…[]", line.partition("#")[0])
]


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_commands_run(page: str, line: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("extends: default\n")
    (tmp_path / "train.py").write_text(TRAIN)
    command, _, target = line.partition(" > ")
    assert main(shlex.split(command)[1:]) in (0, None), capsys.readouterr().err
    if target:
        assert capsys.readouterr().out


def test_there_are_such_commands() -> None:
    assert len(COMMANDS) > 4


def test_readme_names_every_command() -> None:
    usage = subprocess.run(
        [sys.executable, "-m", "autoamp", "--help"], capture_output=True, text=True, check=True
    ).stdout
    commands = set(re.findall(r"^    (\w+) ", usage, re.MULTILINE))
    shown = PAGES["README.md"].split("## Commands and API", 1)[1].split("```", 2)[1]
    assert commands == set(re.findall(r"^autoamp (\w+)", shown, re.MULTILINE))
