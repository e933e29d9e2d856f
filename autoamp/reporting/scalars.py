"""The numbers that a script shows while it trains: on its output, and in TensorBoard's files."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

Curve = list[list[float]]
"""``[[step, value], …]``"""

_NUMBER = r"[-+]?(?:\d[\d_]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
_PAIR = re.compile(
    rf"""(?P<name>[A-Za-z_](?:[\w./@-]|\([\w()]*\))*)      # loss, train/loss, D(G(z))
    ['"]?\s*(?:[:=]\s*|\s)\s*['"]?(?:tensor\()?
    (?P<value>{_NUMBER})(?![\w.]*[\w])(?![:-]\d)  # no time, no date""",
    re.VERBOSE | re.IGNORECASE,
)
_PROGRESS = re.compile(r"(\d+)/(\d+) \[\d+:\d+")
"""Where tqdm is: ``37/100 [00:04<…``."""
_STEPS = ("global_step", "step", "steps", "iteration", "iter", "it", "batch")
"""What lines call the place where they are, the best first."""
_CLOCKS = re.compile(
    r"(^|[/_.])(step|steps|iter|iters|iteration|it|batch|epoch|epochs|eta|time|elapsed|sec|secs|"
    r"seconds|ms|s|lr|learning_rate|memory|mem|gpu_mem|speed|throughput|samples|tokens|seed|rank|"
    r"size|total|num|workers|params|parameters|runtime|per_second|scale|global_step)($|[/_.])",
    re.IGNORECASE,
)
"""In names of what counts, measures time, or is set; ``total_loss`` is a loss still."""
LOSSES = re.compile(
    r"loss|error|nll|perplexity|ppl|cost|mse|mae|rmse|cross_?entropy|\bce\b|kl|elbo|objective",
    re.IGNORECASE,
)


def pairs(line: str) -> list[tuple[str, float]]:
    """Every name with a number that follows it in a line of output, names in small letters."""
    found = [(m["name"].rstrip(".-/").lower(), _float(m["value"])) for m in _PAIR.finditer(line)]
    return [(name, value) for name, value in found if name]


def _float(text: str) -> float:
    return float(text.replace("_", ""))


def is_no_curve(name: str) -> bool:
    """Whether a name is that of something that counts, measures time, or is set."""
    is_loss = LOSSES.search(name) is not None and "scale" not in name
    return _CLOCKS.search(name) is not None and not is_loss


class Scalars:
    """Curves by name, from lines as they come."""

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}

    def read(self, line: str) -> list[str]:
        """Take over what a line says; the names that it had numbers for."""
        found: dict[str, float] = {}
        for name, value in pairs(line):
            found.setdefault(name, value)
        place = _place(line, found)
        names = []
        for name, value in found.items():
            if is_no_curve(name):
                continue
            curve = self.curves.setdefault(name, [])
            step = place if place is not None else len(curve) + 1.0
            if curve and step < curve[-1][0]:  # a counter that starts again in each epoch
                step = curve[-1][0] + 1
            if curve and step == curve[-1][0]:
                curve[-1][1] = value  # the bar of one step, drawn again
            else:
                curve.append([step, value])
            names.append(name)
        return names

    def repeated(self) -> dict[str, Curve]:
        """The curves: what was said more than once."""
        return {name: curve for name, curve in self.curves.items() if len(curve) > 1}


def _place(line: str, found: Mapping[str, float]) -> float | None:
    """The step that a line is about, if it says so; an epoch has many lines, mostly."""
    for name in _STEPS:
        if name in found and math.isfinite(found[name]):
            return found[name]
    bar = _PROGRESS.search(line)
    return None if bar is None else float(bar[1])


# TensorBoard


def event_files(folder: Path, since: float, depth: int = 6) -> list[Path]:
    """TensorBoard's files below a folder that were written since then."""
    found: list[Path] = []
    stack = [(folder, depth)]
    while stack:
        place, left = stack.pop()
        try:
            entries = list(place.iterdir())
        except OSError:
            continue
        for entry in entries:
            if entry.is_dir() and not entry.is_symlink() and left and entry.name[:1] != ".":
                stack.append((entry, left - 1))
            elif ".tfevents." in entry.name and entry.stat().st_mtime >= since:
                found.append(entry)
    return sorted(found)


def events(path: Path) -> Iterator[tuple[str, int, float]]:
    """(tag, step, value) of each scalar in a file of TensorBoard; a torn end ends it."""
    data = path.read_bytes()
    at = 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        record = data[at + 12 : at + 12 + length]
        if len(record) < length:
            return
        at += 12 + length + 4
        fields = dict(_fields(record))
        step, summary = fields.get(2, 0), fields.get(5)
        for number, value in _fields(summary) if isinstance(summary, bytes) else ():
            if number == 1 and isinstance(value, bytes):
                entry = dict(_fields(value))
                tag, scalar = entry.get(1), entry.get(2)
                if isinstance(tag, bytes) and isinstance(scalar, float) and isinstance(step, int):
                    yield tag.decode("utf-8", "replace"), step, scalar


def _fields(message: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """The fields of one message in the wire format of Protocol Buffers."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield number, value
        elif kind == 2:
            length, at = _varint(message, at)
            yield number, message[at : at + length]
            at += length
        elif kind in (1, 5):
            form = "<d" if kind == 1 else "<f"
            yield number, struct.unpack_from(form, message, at)[0]
            at += struct.calcsize(form)
        else:
            return


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
