"""Plain scripts of `patterns/`, played in this process with and without autoamp, and compared.

A pattern is an unmodified script: it knows torch and nothing else, and leaves what counts in a
global dict `result`. Its hand-written twin, where there is one, is `NAME_amp.py` beside it, and
finds `DTYPE`, `INIT_SCALE` and `GROWTH_INTERVAL` among its globals.
"""

from __future__ import annotations

import random
import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import autoamp

PATTERNS = Path(__file__).with_name("patterns")


@dataclass(frozen=True, slots=True)
class Mode:
    """A dtype, and a loss scale that moves every `interval` good steps from `init`."""

    dtype: str
    init: float = 65536.0
    interval: int = 2000


MODES: Mapping[str, Mode] = {
    "float16": Mode("float16"),
    "overflows": Mode("float16", 2.0**30, 3),  # in some steps, and back up again
    "bfloat16": Mode("bfloat16"),
}


def plain(name: str) -> dict[str, Any]:
    """What the pattern finds in float32, without autoamp."""
    autoamp.disable()
    return _play(name, {})


def by_hand(name: str, mode: Mode) -> dict[str, Any]:
    """What its hand-written `torch.amp` twin finds."""
    autoamp.disable()
    return _play(
        f"{name}_amp",
        {
            "DTYPE": getattr(torch, mode.dtype),
            "INIT_SCALE": mode.init,
            "GROWTH_INTERVAL": mode.interval,
        },
    )


def mixed_by(
    mixed: Callable[..., Any], folder: Path, name: str, mode: Mode, sections: str = ""
) -> dict[str, Any]:
    """What the pattern finds under autoamp; `mixed` is the fixture, `folder` a temporary one.

    `sections` are more lines of the policy.
    """
    policy = folder / "mode.yaml"
    scale = f"loss_scale: {{init: {mode.init}, interval: {mode.interval}}}\n"
    policy.write_text(scale + sections)
    mixed(str(policy), dtype=mode.dtype)
    return _play(name, {})


def _play(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    random.seed(0)
    torch.manual_seed(0)
    played = runpy.run_path(str(PATTERNS / f"{name}.py"), dict(found), run_name="__main__")
    result: dict[str, Any] = played["result"]
    return result


def differences(ours: Any, theirs: Any, at: str = "result") -> list[str]:
    """Where two results differ in a single bit; NaN equals itself."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        same = ours.dtype is theirs.dtype and torch.equal(
            ours.nan_to_num(nan=12345.0), theirs.nan_to_num(nan=12345.0)
        )
        return [] if same else [at]
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping) and ours.keys() == theirs.keys():
        return [d for key in ours for d in differences(ours[key], theirs[key], f"{at}[{key!r}]")]
    if isinstance(ours, (list, tuple)) and isinstance(theirs, type(ours)):
        if len(ours) != len(theirs):
            return [f"{at}: {len(ours)} items, {len(theirs)} in the reference"]
        pairs = zip(ours, theirs, strict=True)
        return [d for i, (a, b) in enumerate(pairs) for d in differences(a, b, f"{at}[{i}]")]
    same = ours == theirs or (ours != ours and theirs != theirs)
    return [] if same else [f"{at}: {ours!r} != {theirs!r}"]
