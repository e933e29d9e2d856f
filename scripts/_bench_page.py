"""The tables of docs/speed.md, from findings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from _bench import Finding
from _bench_training import COMPARISONS

WORDS = {"bfloat16": "BF16", "float16": "FP16"}


PREFIXES = ("memory ", "runtime", "growth ")


def tables(findings: list[Finding]) -> str:
    """One for each kind of finding that has one: the ratios, and those of the `PREFIXES`."""
    kinds: dict[str, list[Finding]] = {prefix: [] for prefix in ("", *PREFIXES)}
    for finding in findings:
        prefix = next((prefix for prefix in PREFIXES if finding.row.startswith(prefix)), "")
        if prefix or _comparison(finding):
            kinds[prefix].append(finding)
    return "\n".join(_table(prefix, those) for prefix, those in kinds.items() if those)


def _comparison(finding: Finding) -> str | None:
    return next((c.what for c in COMPARISONS if finding.what.endswith(c.what)), None)


def _table(prefix: str, findings: list[Finding]) -> str:
    """A line for each row of findings; runtime's and growth's for each subject instead."""
    cells: dict[str, dict[str, str]] = {}
    for finding in findings:
        line, column = _place(prefix, finding)
        cells.setdefault(line, {})[column] = _cell(finding)
    columns = list(dict.fromkeys(column for line in cells.values() for column in line))
    lines = [["", *columns]]
    lines += [[name, *(line.get(c, "") for c in columns)] for name, line in cells.items()]
    return "".join(_markdown(lines))


def _place(prefix: str, finding: Finding) -> tuple[str, str]:
    name, _, word = finding.row.removeprefix(prefix).strip().rpartition(" ")
    row = ", ".join(part for part in (name, WORDS.get(word, word)) if part)
    if prefix == "runtime":
        what = finding.what.removesuffix(", plain")
        column = "added" if what == finding.what else "the plain call"
        return f"{what} ({row})" if row else what, column
    if prefix == "growth ":
        count, _, what = finding.what.partition(": ")
        return f"{count} ({row})", what
    return row, _comparison(finding) or finding.what


def _cell(finding: Finding) -> str:
    low, median, high = (f"{value:,.{_digits(finding)}f}" for value in finding.quartiles)
    unit = "" if finding.unit in ("", "x") else f" {finding.unit}"
    spread = "" if len(finding.values) == 1 else f" [{low}, {high}]"
    target = "" if finding.target is None else f" {finding.verdict}"
    return f"{median}{unit}{spread}{target}"


def _digits(finding: Finding) -> int:
    return {"ns": 0, "us": 0, "MB": 0, "%": 1}.get(finding.unit, 2)


def _markdown(lines: Iterable[list[str]]) -> Iterator[str]:
    for number, line in enumerate(lines):
        yield f"| {' | '.join(line)} |\n"
        if number == 0:
            yield "|---" * len(line) + "|\n"
