"""How many of tests/cases hold under autoamp, and which do not: `scripts/cases`, run as a program.

A case that fails without being listed here is news, and so is one that is listed and passes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CASES = TESTS / "cases"
SCRIPT = TESTS.parent / "scripts" / "cases"


@dataclass(frozen=True, slots=True)
class Run:
    """Options of `scripts/cases`, the share of cases that has to pass, and those known to fail."""

    options: tuple[str, ...]
    share: float
    known: dict[str, str]


HEARD = "a hook hears of the attempt that overflows at a scale of 65536, and then of the next"
CASTS = "it counts casts, and the policy safe casts each result besides"
PRODUCTS = "products of covariances lose the answer in half"
VMAP = "torch's own: vmap over grad of a norm under autocast (pytorch#184890)"
RUNS = {
    "plain": Run(("--plain",), 1.0, {}),
    "float16": Run(("--dtype", "float16"), 0.98, {"212": HEARD, "433": PRODUCTS}),
    "float16 inside": Run(("--dtype", "float16", "--inside"), 0.85, {}),
    "bfloat16": Run(("--dtype", "bfloat16"), 0.98, {"227": VMAP, "433": PRODUCTS}),
    "bfloat16 inside": Run(("--dtype", "bfloat16", "--inside"), 0.85, {}),
    "safe": Run(("--policy", "safe"), 0.99, {"273": CASTS}),
    "safe inside": Run(("--policy", "safe", "--inside"), 0.97, {}),
}
"""By name; `known` says for each case why it fails, docs/limits.md says more."""


def play(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("AUTO_MIXED_PRECISION")}
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False, env=kept
    )


def outcomes(output: str) -> dict[str, str]:
    """By the number of the case: why it failed, empty if it passed."""
    lines = re.findall(r"^(pass|FAIL)  (\w+?)_\w*(?:: (.*))?$", output, re.MULTILINE)
    return {number: (why.strip() or word) * (word == "FAIL") for word, number, why in lines}


@pytest.mark.parametrize("name", RUNS)
def test_the_cases_that_fail_are_few_and_known(name: str) -> None:
    run = RUNS[name]
    played = play(*run.options, CASES)
    found = outcomes(played.stdout)
    assert len(found) == len(list(CASES.glob("*.py"))), played.stdout + played.stderr
    failed = {number: why for number, why in found.items() if why}
    news = failed.keys() - run.known.keys()
    cured = run.known.keys() - failed.keys()
    assert (news, cured) == (set(), set()), failed
    assert len(failed) <= (1 - run.share) * len(found), failed
    assert played.returncode == bool(failed)


ENDINGS = {
    "1_passes.py": ("print('said')", ""),
    "2_asserts.py": ("x = 1\nassert x == 2, f'{x} is not 2'", "line 2: AssertionError: 1 is not 2"),
    "3_leaves.py": ("raise SystemExit('no')", "left with 'no'"),
    "4_leaves_well.py": ("raise SystemExit(0)", ""),
    "5_hangs.py": ("while True: pass", "took more than 3 s"),
    "6_is_killed.py": (
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "ended by SIGKILL",
    ),
    "7_is_main.py": (
        "import sys, torch\n"
        "assert __name__ == '__main__' and sys.modules['__main__'].__file__ == __file__\n"
        "assert sys.argv == [__file__] and torch.get_num_threads() == 1",
        "",
    ),
    "8_sees_half.py": (
        "import torch; y = torch.nn.Linear(1, 1)(torch.ones(1, 1))\n"
        "assert y.dtype is torch.bfloat16",
        "line 2: AssertionError: ",
    ),
    "9_sees_autoamp.py": ("import autoamp\nassert autoamp.status()['active']", ""),
}


@pytest.mark.parametrize("where", ["", "--inside", "--plain"])
def test_the_runner_tells_how_each_case_ended(where: str, tmp_path: Path) -> None:
    for name, (text, _) in ENDINGS.items():
        (tmp_path / name).write_text(text)
    expected = {name.partition("_")[0]: why for name, (_, why) in ENDINGS.items()}
    if where == "--inside":
        expected["8"] = ""
    if where == "--plain":
        expected["9"] = "line 2: AssertionError: "
    run = play("--dtype", "bfloat16", "--timeout", "3", *filter(None, [where]), tmp_path)
    assert outcomes(run.stdout) == {number: why.strip() for number, why in expected.items()}, run
    assert list(outcomes(run.stdout)) == sorted(expected)
    passed = sum(not why for why in expected.values())
    assert f"\n{passed} of {len(expected)} passed (" in run.stdout
    assert run.returncode == 1


def test_each_case_says_where_it_comes_from_and_what_must_hold() -> None:
    for case in CASES.glob("*.py"):
        assert re.fullmatch(r"\d{3}_\w+", case.stem)
        first, second, *_ = case.read_text().splitlines()
        assert re.match(r"# (Source|Pattern): .", first), case.name
        assert re.match(r"# Must hold under AMP: .", second), case.name
