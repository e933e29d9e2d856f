"""How users spell ops, and the ops of aten that each spelling means; no torch.

`ops.json` lists every op that a policy can name, with torch's own list for it on each device. It is
generated from an installed torch by `scripts/ops`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PREFIXES = (
    ("torch.ops.aten.", ""),
    ("torch.nn.functional.", ""),
    ("torch.linalg.", "linalg_"),
    ("torch.special.", "special_"),
    ("torch.fft.", "fft_"),
    ("torch.Tensor.", ""),
    ("torch.", ""),
    ("aten::", ""),
    ("F.", ""),
)
"""What may stand before a name, and what it becomes; the first that fits."""

_UPSAMPLE = (
    *(f"upsample_{kind}" for kind in ("nearest1d", "nearest2d", "nearest3d")),
    *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)
SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "clip": ("clamp",),
    "concat": ("cat",),
    "concatenate": ("cat",),
    "cross_entropy": ("cross_entropy_loss",),
    "divide": ("div",),
    "grid_sample": ("grid_sampler",),
    "interpolate": _UPSAMPLE,
    "logsigmoid": ("log_sigmoid",),
    "multiply": ("mul",),
    "norm": (
        *("norm", "linalg_vector_norm", "linalg_matrix_norm", "frobenius_norm", "nuclear_norm"),
    ),
    "rnn": ("rnn_tanh", "rnn_relu"),
    "sub": ("sub", "rsub"),
    "subtract": ("sub", "rsub"),
    "true_divide": ("div",),
    "upsample": _UPSAMPLE,
}
"""Names that mean other ops of aten, or more of them, than the one of their own name: Python
functions of torch and reflected forms (``2 - x`` is ``rsub``). Aliases that torch carries out by
calling the op itself (``arccos``, ``Tensor.__matmul__``) need no row."""


@functools.cache
def table() -> Mapping[str, Any]:
    """``{"torch": version, "ops": {op of aten: {device: list}}}``."""
    path = Path(__file__).with_name("ops.json")
    content: Mapping[str, Any] = json.loads(path.read_text())
    return content


@functools.cache
def spellings() -> Mapping[str, tuple[str, ...]]:
    """Every name that a policy can use, without prefix, and the ops of aten that it means."""
    return {**{op: (op,) for op in table()["ops"]}, **SPELLINGS}


def plain(spelling: str) -> str:
    """A spelling without what may stand before a name: ``torch.linalg.vecdot`` is
    ``linalg_vecdot``."""
    for prefix, replacement in PREFIXES:
        if spelling.startswith(prefix):
            return replacement + spelling.removeprefix(prefix)
    return spelling


def resolve(spelling: str) -> tuple[str, ...]:
    """The ops of aten that `spelling` means; empty if it means none that a policy can name."""
    return spellings().get(plain(spelling), ())
