"""Mixed precision against float32, from runs of both: how much faster, and is the model right?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median, quantiles
from typing import Any

from ..report import standing_line
from . import verdict
from .curves import thinned
from .playing import Run

FLOAT32 = "float32"
NOT_RUN = "did not run"
SLOWER = 0.95
"""A speed-up below is worth a word."""


def told(runs: Sequence[Run], variants: Sequence[str], command: str, asked: int) -> dict[str, Any]:
    """All that is known, as plain data."""
    by_variant = {name: [run for run in runs if run.variant == name] for name in variants}
    full = by_variant[FLOAT32]
    rows = [_variant(name, found, full) for name, found in by_variant.items()]
    return {
        "command": command,
        "repeats": max((run.repeat + 1 for run in runs), default=0),
        "asked": asked,
        "was_interrupted": any(run.was_interrupted for run in runs),
        "variants": rows,
        "verdicts": [_verdict(row, rows[0]) for row in rows[1:]],
        "rule": verdict.RULE,
        "notes": list(_notes(runs, rows)),
    }


def _variant(name: str, runs: Sequence[Run], full: Sequence[Run]) -> dict[str, Any]:
    speeds = [speed for run in runs for speed in run.speeds()]
    failed = [run for run in runs if run.failed]
    curves = _curves(runs)
    reports = [run.report for run in runs if run.report is not None and name != FLOAT32]
    ratios = []
    if name != FLOAT32:
        ratios = [
            b / a
            for first, second in zip(full, runs, strict=False)
            for a, b in zip(first.speeds(), second.speeds(), strict=False)
        ]
    done = [run for run in runs if not run.was_interrupted]
    return {
        "name": name,
        "runs": len(runs),
        "failed": len(failed),
        "code": failed[0].code if failed else 0,
        "error": list(failed[0].tail) if failed else [],
        "seconds": median(run.seconds for run in done) if done else None,
        "speeds": speeds,
        "speed": _spread(speeds),
        "speed_up": _spread(ratios),
        "memory": {
            "process": max((run.peak for run in runs if run.peak), default=None),
            "devices": _most([run.devices for run in runs]),
        },
        "steps": max((run.steps for run in runs), default=0),
        "skipped": sum(report["steps"]["skipped"] for report in reports),
        "demotions": reports[-1]["demotions"] if reports else [],
        "stood_down": reports[-1]["stood_down"] if reports else [],
        "devices": reports[-1]["devices"] if reports else {},
        "regions": sum(report["regions"] for report in reports),
        "reason": reports[-1]["reason"] if reports else "",
        "curves": {scalar: thinned(found[0]) for scalar, found in curves.items()},
        "agreements": [] if name == FLOAT32 else _agreements(_curves(full), curves),
    }


def _curves(runs: Sequence[Run]) -> dict[str, list[list[list[float]]]]:
    found: dict[str, list[list[list[float]]]] = {}
    for run in runs:
        for name, curve in run.curves().items():
            found.setdefault(name, []).append(curve)
    return found


def _agreements(full: Mapping[str, Any], mixed: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    shared = {name: curves for name, curves in full.items() if name in mixed}
    losses = verdict.judged(shared)
    for name, curves in shared.items():
        count = min(len(curves), len(mixed[name]))
        answer = verdict.compare(name, curves[:count], mixed[name][:count])
        if answer is not None:
            found.append(
                {
                    "name": name,
                    "is_loss": name in losses,
                    "agrees": answer.agrees,
                    "difference": answer.difference,
                    "parted": answer.parted,
                    "first": answer.first,
                    "last": answer.last,
                    "sentence": answer.sentence(),
                }
            )
    return sorted(found, key=lambda row: not row["is_loss"])


def _verdict(row: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, str]:
    """The answer for one policy: a word, and a sentence."""
    if not full["runs"] or not row["runs"]:
        return {"word": "unknown", "text": f"{row['name']}: {NOT_RUN}; there is nothing to compare"}
    if full["failed"] and row["failed"]:
        text = f"the script fails in float32 too, with exit code {full['code']}: nothing of autoamp"
        return {"word": "failed", "text": text}
    if row["failed"]:
        text = f"{row['name']}: the script runs in float32, and fails with exit code {row['code']}"
        return {"word": "broken", "text": text}
    if full["failed"]:
        text = f"the script fails in float32 with exit code {full['code']}, and runs under autoamp"
        return {"word": "failed", "text": text}
    if not row["regions"]:
        why = row["reason"] or "; ".join(
            f"{name}: {found['why']}" for name, found in row["devices"].items()
        )
        text = f"{row['name']}: nothing ran in mixed precision ({why or 'no model was called'})"
        return {"word": "unknown", "text": text}
    losses = [found for found in row["agreements"] if found["is_loss"]]
    apart = [found for found in losses if not found["agrees"]]
    if apart:
        return {"word": "disagrees", "text": f"{row['name']}: {apart[0]['sentence']}"}
    if losses:
        text = f"{row['name']}: " + "; ".join(found["sentence"] for found in losses[:3])
        return {"word": "agrees", "text": text}
    others = ", ".join(found["name"] for found in row["agreements"])
    what = f"only {others}" if others else "no number that it shows more than once"
    text = (
        f"{row['name']}: whether the model is still right cannot be judged: the script prints no "
        f"loss repeatedly ({what}). Have it print 'loss: 0.123' every few steps."
    )
    return {"word": "unknown", "text": text}


def _notes(runs: Sequence[Run], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    tf32 = sorted({what for run in runs if run.variant == FLOAT32 for what in run.tf32})
    if tf32:
        yield (
            f"The float32 baseline is really TF32 for {' and '.join(tf32)}: speed-ups are against "
            "that, and so are differences of numbers."
        )
    if not any(row["speeds"] for row in rows) and any(row["runs"] for row in rows):
        yield (
            "No optimizer of torch stepped: times are those of whole processes. Say how steps are "
            "told on the output: --steps-from 'step (\\d+)'."
        )
    if max((row["runs"] for row in rows), default=0) == 1:
        yield "One run each: spreads are within a run. --repeat 3 alternates three of each."
    for row in rows[1:]:
        if row["speed_up"] and row["speed_up"]["median"] < SLOWER:
            yield f"{row['name']} is slower than float32 here."
        yield from (f"{row['name']}: {standing_line(told)}." for told in row["stood_down"])
        if row["demotions"]:
            yield f"{row['name']}: {len(row['demotions'])} modules fell back to float32."
        if row["runs"] and row["regions"]:
            aside = [
                f"{name} ({found['why']})"
                for name, found in row["devices"].items()
                if found["dtype"] == "off"
            ]
            if aside:
                yield f"{row['name']}: stood aside on {', '.join(aside)}."


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median and quartiles."""
    if not values:
        return None
    if len(values) == 1:
        return {"median": values[0], "low": values[0], "high": values[0]}
    low, _, high = quantiles(values, n=4, method="inclusive")
    return {"median": median(values), "low": low, "high": high}


def _most(found: Sequence[Mapping[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for one in found for name in one)
    return {name: max(one.get(name, 0) for one in found) for name in names}


def lines(content: Mapping[str, Any], size: Any) -> list[str]:
    """What is said on the terminal; `size` words bytes."""
    table = list(rows(content, size))
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    said = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in table]
    said = [line.rstrip() for line in said]
    for answer in content["verdicts"]:
        said += ["", f"{answer['word'].upper()}  {answer['text']}"]
    said += [f"({content['rule']})"]
    for row in content["variants"]:
        if row["error"]:
            said += ["", f"the script's own error, {row['name']}:", *row["error"]]
    said += ["", *content["notes"]] if content["notes"] else []
    if content["was_interrupted"]:
        said += ["", "Interrupted: this is about what had run by then."]
    return said


def rows(content: Mapping[str, Any], size: Any) -> Iterator[list[str]]:
    """The table: a head, and a row for each thing that was measured."""
    variants = content["variants"]
    yield ["", *(row["name"] for row in variants)]
    if any(row["speed"] for row in variants):
        yield ["steps per second", *(_span(row["speed"]) for row in variants)]
        yield ["speed-up", *(_span(row["speed_up"], "x") for row in variants)]
    yield ["seconds in all", *(_figure(row["seconds"], ".1f") for row in variants)]
    if any(row["memory"]["process"] for row in variants):
        peaks = [row["memory"]["process"] for row in variants]
        yield ["peak memory, process", *(size(peak) if peak else "" for peak in peaks)]
    for name in dict.fromkeys(name for row in variants for name in row["memory"]["devices"]):
        peaks = [row["memory"]["devices"].get(name) for row in variants]
        yield [f"peak memory, {name}", *(size(peak) if peak else "" for peak in peaks)]
    yield ["steps", *(f"{row['steps']:,}" for row in variants)]
    yield ["skipped steps", *(_count(row["skipped"], row) for row in variants)]
    yield ["demoted modules", *(_count(len(row["demotions"]), row) for row in variants)]
    for name in variants[0]["curves"]:
        finals = [_final(row["curves"].get(name, [])) for row in variants]
        yield [f"final {name}", *(_figure(final, ".5g") for final in finals)]


def _final(curve: Sequence[Sequence[float]]) -> float | None:
    return curve[-1][1] if curve else None


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _count(number: int, row: Mapping[str, Any]) -> str:
    return "" if row["name"] == FLOAT32 or not row["runs"] else f"{number:,}"


def _span(spread: Mapping[str, float] | None, unit: str = "") -> str:
    if spread is None:
        return ""
    low, high = f"{spread['low']:.3g}", f"{spread['high']:.3g}"
    return f"{spread['median']:.3g}{unit} [{low}, {high}]"
