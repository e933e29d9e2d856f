"""Plots as SVG that lives inside a page: its colours are the page's, light or dark.

matplotlib draws with colours that stand for CSS variables; the text stays text.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import count, pairwise
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

COLOURS = {
    "ink": "#010101",
    "muted": "#020202",
    "line": "#030303",
    "bad": "#040404",
    "warn": "#050505",
    "float16": "#060606",
    "bfloat16": "#070707",
    "float32": "#080808",
    "float64": "#090909",
    "other": "#0a0a0a",
    "paper": "#0b0b0b",
    "first": "#0c0c0c",
    "second": "#0d0d0d",
    "third": "#0e0e0e",
    "fourth": "#0f0f0f",
}
"""What matplotlib is given for each CSS variable of the page."""
SERIES = ("first", "second", "third", "fourth")
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "autoamp",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": COLOURS["ink"],
    "axes.edgecolor": COLOURS["line"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": COLOURS["line"],
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "legend.frameon": False,
    "legend.labelcolor": COLOURS["ink"],
    "path.simplify": True,
    "text.parse_math": False,
}
_numbers = count(1)


def loss_scale(content: Mapping[str, Any]) -> str:
    """The loss scale over the steps, with skipped steps and demotions."""
    scale, steps = content["loss_scale"], content["steps"]
    last = max(steps["taken"] + steps["skipped"], 1)
    points = [*scale["history"], [last, scale["final"]]]

    def draw(axes: Any) -> None:
        axes.set_yscale("log", base=2)
        x, y = zip(*points, strict=True)
        axes.step(x, y, where="post", color=COLOURS["float16"], linewidth=1.8)
        if scale["skips"]:
            at = [_held(points, step) for step in scale["skips"]]
            word = f"skipped step ({steps['skipped']:,})"
            axes.plot(scale["skips"], at, "x", color=COLOURS["bad"], markersize=6, label=word)
        for index, step in enumerate(sorted({d["step"] for d in content["demotions"]})):
            word = "" if index else "module demoted to float32"
            axes.axvline(step, color=COLOURS["warn"], linestyle="--", linewidth=1.2, label=word)
        if min(y) == max(y):
            axes.set_ylim(y[0] / 4, y[0] * 4)
        axes.yaxis.set_major_formatter(FuncFormatter(_short))
        _label(axes, "optimizer steps", "loss scale")

    return _svg(draw, "The loss scale over the steps", legend=True)


def ops_by_phase(ops: Mapping[str, Mapping[str, int]]) -> str:
    """Bars: how many ops of forward and backward ran in which dtype."""
    rows = [(phase, counts) for phase, counts in ops.items() if counts]
    return _bars(rows, "Ops of one step by dtype", 0.62)


def ops_by_name(names: Sequence[Mapping[str, Any]], most: int = 14) -> str:
    """Bars: the ops that ran most often."""
    counts: dict[str, dict[str, int]] = {}
    for row in names:
        by_dtype = counts.setdefault(row["op"], {})
        by_dtype[row["dtype"]] = by_dtype.get(row["dtype"], 0) + row["count"]
    rows = sorted(counts.items(), key=lambda item: -sum(item[1].values()))[:most]
    return _bars(rows, "The most frequent ops by dtype", 0.3)


def speed(curve: Sequence[Sequence[float]]) -> str:
    """Steps per second over the steps, in up to 60 stretches."""
    stride = max(1, len(curve) // 60)
    points = curve[::stride]
    pairs = [
        ((a[0] + b[0]) / 2, (b[0] - a[0]) / (b[1] - a[1]))
        for a, b in pairwise(points)
        if b[1] > a[1]
    ]

    def draw(axes: Any) -> None:
        x, y = zip(*pairs, strict=True)
        axes.plot(x, y, color=COLOURS["first"], linewidth=1.6, marker="." if len(x) < 20 else "")
        axes.set_ylim(bottom=0)
        _label(axes, "optimizer steps", "steps per second")

    return _svg(draw, "Steps per second over the steps") if len(pairs) > 1 else ""


def curves(
    name: str, series: Mapping[str, Sequence[Sequence[float]]], parted: float | None = None
) -> str:
    """Curves over each other, and where they part."""

    def draw(axes: Any) -> None:
        for index, (word, points) in enumerate(series.items()):
            if not points:
                continue
            x, y = zip(*points, strict=True)
            style = "-" if index == 0 else "--"
            colour = COLOURS[SERIES[index % len(SERIES)]]
            mark = "." if len(x) < 30 else ""
            axes.plot(x, y, style, color=colour, linewidth=1.7, marker=mark, label=word)
        if parted is not None:
            axes.axvline(
                parted, color=COLOURS["bad"], linestyle=":", linewidth=1.4, label="part here"
            )
        _label(axes, "step", name)

    return _svg(draw, f"{name} over the steps", legend=True)


def speeds(rows: Mapping[str, Sequence[float]]) -> str:
    """Every measured speed as a dot, by variant."""

    def draw(axes: Any) -> None:
        for index, (_, values) in enumerate(rows.items()):
            colour = COLOURS[SERIES[index % len(SERIES)]]
            axes.plot(values, [index] * len(values), "o", color=colour, alpha=0.55, markersize=6)
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.grid(axis="x", linewidth=0.6)
        axes.set_xlabel("steps per second")

    return _svg(draw, "Steps per second by variant", height=0.7 + 0.45 * len(rows))


def _bars(rows: Sequence[tuple[str, Mapping[str, int]]], title: str, height: float) -> str:
    words = list(dict.fromkeys(word for _, counts in rows for word in counts))
    words.sort(key=lambda word: (word not in COLOURS, word))

    def draw(axes: Any) -> None:
        labels = [label for label, _ in rows]
        left = [0] * len(rows)
        for word in words:
            widths = [counts.get(word, 0) for _, counts in rows]
            colour = COLOURS[word if word in COLOURS else "other"]
            bars = axes.barh(labels, widths, 0.62, left=left, color=colour, label=word)
            most = max(sum(counts.values()) for _, counts in rows)
            texts = [f"{width:,}" if width > 0.06 * most else "" for width in widths]
            axes.bar_label(bars, texts, label_type="center", color=COLOURS["paper"], fontsize=9)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid(axis="x", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel("ops")

    return _svg(draw, title, legend=True, height=0.95 + height * len(rows)) if rows else ""


def _svg(draw: Callable[[Any], None], title: str, legend: bool = False, height: float = 2.5) -> str:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(6.4, height), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        if legend and handles:
            figure.legend(handles, labels, loc="outside upper left", ncols=4, fontsize=9)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return _for_page(out.getvalue(), title)


def _for_page(svg: str, title: str) -> str:
    """The element alone, under names that no other plot of the page has."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(?:width|height)="[\d.]+pt"', "", svg, count=2)
    prefix = f"p{next(_numbers)}-"
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}", svg)
    for name, colour in COLOURS.items():
        svg = re.sub(colour, f"var(--{name})", svg, flags=re.IGNORECASE)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font: \1 var(--font)", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(axis="y", linewidth=0.6)


def _held(points: Sequence[Sequence[float]], step: float) -> float:
    """The scale of before a step: the one that it was skipped with."""
    before = [value for at, value in points if at < step]
    return before[-1] if before else points[0][1]


def _short(value: float, _: Any) -> str:
    for unit, word in ((2**20, "Mi"), (2**10, "Ki")):
        if value >= unit:
            return f"{value / unit:g} {word}"
    return f"{value:g}"
