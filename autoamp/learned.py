"""What a run has taught, as a policy: the report's demotions as module rules. No torch here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from . import policyfile, policytext
from .spelling import one_line


def policy(report: Mapping[str, Any], source: str) -> str:
    """The text of a policy file with which the run of `report` would demote nothing.

    It extends the policy of that run; `source` is how the report is called in its first line.
    """
    shipped = {os.fspath(path): name for name, path in policyfile.shipped().items()}
    base = report["policy"]["source"]
    lines = [
        f"# Learned from {one_line(source)}: what half precision broke there runs in float32.",
        f"extends: {policytext.flow(shipped.get(base, base))}",
        *_modules(report["demotions"]),
        *_loss_scale(report),
    ]
    return "".join(f"{line}\n" for line in lines)


def _modules(demotions: list[Mapping[str, Any]]) -> Iterator[str]:
    """The rules for each module, inner ones first: itself, and what is below it."""
    latest = {demotion["module"]: demotion for demotion in demotions}
    open_ones = [name for name, demotion in latest.items() if not demotion["below"]]
    yield from ["modules:"] * bool(latest)
    for name in sorted(latest, key=lambda name: (-len(name.split(".")) * bool(name), name)):
        below = latest[name]["below"]
        is_inside = any(name != outer and _is_below(name, outer) for outer in open_ones)
        pattern = _with_all_below(name) if below and is_inside else _pattern(name)
        why = one_line(f"{latest[name]['type']}: {latest[name]['cause']}")
        yield f"  - {policytext.flow({**pattern, 'precision': 'float32'})}  # {why}"
        if not below:
            rest = {"name": f"{name}.*" if name else "*"}
            rest = rest if _pattern(name) == {"name": name} else _with_all_below(name)
            yield f"  - {policytext.flow({**rest, 'precision': 'lower'})}"


def _is_below(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


def _pattern(name: str) -> dict[str, str]:
    return {"regex": re.escape(name)} if set(name) & set("*?[") else {"name": name}


def _with_all_below(name: str) -> dict[str, str]:
    return {"regex": re.escape(name) + r"(\..*)?"}


def _loss_scale(report: Mapping[str, Any]) -> Iterator[str]:
    """The scale that held, where steps were skipped on the way to it."""
    scale = report["loss_scale"]
    if scale["mode"] == "dynamic" and report["steps"]["skipped"]:
        after = max((demotion["step"] for demotion in report["demotions"]), default=0)
        held = min([value for step, value in scale["history"] if step > after] or [scale["final"]])
        yield f"loss_scale: {policytext.flow({'init': held})}"
