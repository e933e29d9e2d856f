"""The page of a report: one file that needs nothing else, from the JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jinja2

from .. import report
from . import compare, plots

FLOATS = ("float16", "bfloat16", "float32", "float64")
LOW_ROOM = 4.0
"""Less than this factor between the largest number and the dtype's maximum is worth a word."""
MUCH_LOST = 0.01
"""A larger share of gradients that became zero is worth a word."""
MANY_SKIPS = 3, 0.01
"""More than so many skipped steps, and than that share of all: no mere search for a scale."""

_environment = jinja2.Environment(
    loader=jinja2.PackageLoader("autoamp.reporting", "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def html(content: Mapping[str, Any]) -> str:
    """The page as text."""
    audit, has_scale = content["audit"], content["loss_scale"]["mode"] != "off"
    return render(
        "report.html",
        title=f"autoamp: {content['script'] or 'report'}",
        content=content,
        headline=headline(content),
        facts=list(_facts(content)),
        remarks=list(_remarks(content)),
        modules=tree(audit["modules"]),
        scale_plot=plots.loss_scale(content) if has_scale else "",
        phase_plot=plots.ops_by_phase(audit["ops"]),
        name_plot=plots.ops_by_name(audit["names"]),
        speed_plot=plots.speed(content["time"]["curve"]),
        standing_lines=list(map(report.standing_line, content["stood_down"])),
        demotion_lines=[report.demotion_line(d) for d in content["demotions"]],
        fixups=_fixups(content["kernels"]),
        outcomes=_outcomes(content["patches"]),
    )


def comparison(content: Mapping[str, Any], most: int = 12) -> str:
    """The page of `autoamp compare`: at most so many curves over each other, losses first."""
    variants = content["variants"]
    parted: dict[str, float | None] = {}
    for row in variants[1:]:
        for found in row["agreements"]:
            parted[found["name"]] = parted.get(found["name"]) or found["parted"]
    names = [*parted, *(name for name in variants[0]["curves"] if name not in parted)]
    figures = []
    for name in names[:most]:
        series = {row["name"]: _finite(row["curves"].get(name, [])) for row in variants}
        said = [
            f["sentence"] for row in variants[1:] for f in row["agreements"] if f["name"] == name
        ]
        figures.append((name, plots.curves(name, series, parted.get(name)), said))
    speeds = {row["name"]: row["speeds"] for row in variants if row["speeds"]}
    return render(
        "compare.html",
        title="autoamp compare",
        content=content,
        table=list(compare.rows(content, size)),
        figures=figures,
        left_out=max(0, len(names) - most),
        speed_plot=plots.speeds(speeds) if speeds else "",
        tones=TONES,
    )


TONES = {
    "agrees": "good",
    "disagrees": "bad",
    "broken": "bad",
    "failed": "bad",
    "unknown": "unsure",
}
"""What a verdict looks like."""


def _finite(curve: list[list[float]]) -> list[list[float]]:
    return [point for point in curve if math.isfinite(point[1])]


def render(template: str, **values: Any) -> str:
    """A template of ours, filled in."""
    values = {"mark": report.PAGE_MARK, **values}
    return _environment.get_template(template).render(**values)


def headline(content: Mapping[str, Any]) -> dict[str, str]:
    """Was it on: a word for the state, and a sentence that says why."""
    if not content["active"]:
        return {"state": "off", "text": content["reason"]}
    devices = content["devices"].items()
    running = [f"{name} in {found['dtype']}" for name, found in devices if found["dtype"] != "off"]
    if running and content["regions"]:
        word = "on" if content["finished"] else "on, and the run was killed or still runs"
        where = " and ".join(running)
        text = f'{word}: {where}, policy "{content["policy"]["name"]}", through {content["door"]}'
        return {"state": "on", "text": text}
    if devices:
        return {"state": "aside", "text": "; ".join(f"{n}: {found['why']}" for n, found in devices)}
    return {"state": "aside", "text": "on, but no model ran: nothing was done in lower precision"}


def _facts(content: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What is told in large figures: (what, figure, more)."""
    steps, scale, time = content["steps"], content["loss_scale"], content["time"]
    total = steps["taken"] + steps["skipped"]
    share = f"{steps['skipped'] / total:.2%} of all" if total else ""
    yield "steps taken", f"{steps['taken']:,}", f"{content['regions']:,} model calls"
    if scale["mode"] != "off":
        yield "steps skipped", f"{steps['skipped']:,}", share
        yield (
            "loss scale",
            f"{scale['final']:,.6g}",
            f"{scale['mode']}, from {scale['initial']:,.6g}",
        )
    if time["steps_per_second"]:
        yield (
            "steps per second",
            f"{time['steps_per_second']:.3g}",
            f"{duration(time['seconds'])} in all",
        )
    elif time["seconds"] is not None:
        yield "time", duration(time["seconds"]), ""
    for name, used in content["memory"]["devices"].items():
        yield f"peak memory, {name}", size(used), "allocated by torch"
    if content["memory"]["process"]:
        yield "peak memory, process", size(content["memory"]["process"]), "resident"
    audit = content["audit"]
    if audit["step"] is not None:
        yield (
            "share of ops in half",
            f"{_half_share(audit['ops']):.0%}",
            f"of step {audit['step']:,}",
        )
        yield "casts per step", f"{sum(audit['casts'].values()):,}", _casts(audit["casts"])
    demoted = {demotion["module"] for demotion in content["demotions"]}
    yield "modules demoted", f"{len(demoted):,}", "to float32, by what half broke"


def _half_share(ops: Mapping[str, Mapping[str, int]]) -> float:
    counts = [(word, count) for by_dtype in ops.values() for word, count in by_dtype.items()]
    floats = [(word, count) for word, count in counts if word in FLOATS]
    total = sum(count for _, count in floats)
    return sum(count for word, count in floats if word.endswith("float16")) / total if total else 0


def _casts(casts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {direction}" for direction, count in casts.items())


def _remarks(content: Mapping[str, Any]) -> Iterator[str]:
    """What a person should know who reads nothing else, in sentences."""
    steps, audit = content["steps"], content["audit"]
    total = steps["taken"] + steps["skipped"]
    number, part = MANY_SKIPS
    if steps["skipped"] > number and steps["skipped"] / total > part:
        yield (
            f"{steps['skipped'] / total:.1%} of the steps were skipped: gradients overflow often. "
            "Look for inf and nan in the loss and the data, or use BF16."
        )
    for row in audit["modules"]:
        name = f"{row['root']} {row['name']}".strip()
        if row["underflow"] is not None and row["underflow"] > MUCH_LOST:
            yield f"{name}: {row['underflow']:.1%} of its gradients became zero in half precision."
        for what, room in (("results", "head_room"), ("scaled gradients", "gradient_head_room")):
            if row[room] is not None and row[room] < LOW_ROOM:
                yield (
                    f"{name}: its largest {what} are within a factor of {row[room]:.2g} of the "
                    "largest number that half precision holds."
                )
    for target in content["replaced_since"]:
        yield f"{target} has been replaced by someone else after autoamp came."
    if audit["missing"]:
        yield f"The audit: {audit['missing']}."


def tree(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The modules with their depth, a last name, and for those without ops what is below them."""
    found = []
    for row in rows:
        below = [r for r in rows if r["root"] == row["root"] and _is_below(r["name"], row["name"])]
        words = row["precision"].split(" + ") if row["precision"] else []
        inner = sorted({w for r in below for w in r["precision"].split(" + ") if w})
        name = row["name"]
        found.append(
            {
                **row,
                "depth": name.count(".") + 1 if name else 0,
                "label": name.rpartition(".")[2] if name else row["root"],
                "words": words,
                "inner": [] if words else inner,
                "ops": sum(row["forward"].values()),
                "backward_ops": sum(row["backward"].values()),
            }
        )
    return found


def _is_below(name: str, outer: str) -> bool:
    return bool(name) and (not outer or name.startswith(f"{outer}."))


def _fixups(kernels: list[dict[str, str]]) -> dict[str, list[str]]:
    """By what is done to them, the ops whose calls half precision would break."""
    found: dict[str, list[str]] = {}
    for kernel in kernels:
        what = kernel["why"].rpartition("fix-up: ")
        if what[1]:
            found.setdefault(what[2], []).append(f"{kernel['op']} on {kernel['device']}")
    return found


def _outcomes(patches: list[dict[str, str]]) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for row in patches:
        found.setdefault(row["outcome"], []).append(row)
    return found


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02} h" if hours else f"{minutes}:{seconds:02} min"


def size(number: float) -> str:
    """Bytes as a person says them."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.2f} GiB"


def room(factor: float | None) -> str:
    """A factor of head room, short."""
    return "" if factor is None else f"{factor:.1f}x" if factor < 10 else f"{factor:,.0f}x"


def share(part: float | None) -> str:
    """A share in percent; a dash where none could be measured."""
    if part is None:
        return ""
    return "0" if part == 0 else f"{part:.2%}" if part >= 0.0001 else "<0.01%"


_environment.filters.update(size=size, room=room, share=share)
