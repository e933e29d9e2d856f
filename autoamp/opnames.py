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

from .spelling import nearest

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
    **{f"adaptive_max_pool{n}d_with_indices": (f"adaptive_max_pool{n}d",) for n in (1, 2, 3)},
    "affine_grid": ("affine_grid_generator",),
    "clip": ("clamp",),
    "concat": ("cat",),
    "concatenate": ("cat",),
    "cross_entropy": ("cross_entropy_loss",),
    "divide": ("div",),
    **{f"dropout{n}d": ("feature_dropout",) for n in (1, 2, 3)},
    "fold": ("col2im",),
    **{f"fractional_max_pool{n}d_with_indices": (f"fractional_max_pool{n}d",) for n in (2, 3)},
    "grid_sample": ("grid_sampler",),
    "interpolate": _UPSAMPLE,
    "logsigmoid": ("log_sigmoid",),
    "max_unpool1d": ("max_unpool2d",),
    "multiply": ("mul",),
    "nll_loss": ("nll_loss", "nll_loss2d"),
    "norm": (
        *("norm", "linalg_vector_norm", "linalg_matrix_norm", "frobenius_norm", "nuclear_norm"),
    ),
    "rnn": ("rnn_tanh", "rnn_relu"),
    "sub": ("sub", "rsub"),
    "subtract": ("sub", "rsub"),
    "true_divide": ("div",),
    "unfold": ("im2col",),
    "upsample": _UPSAMPLE,
    "upsample_bilinear": ("upsample_bilinear2d",),
    "upsample_nearest": ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
}
"""Names that mean other ops of aten, or more of them, than the one of their own name: Python
functions of torch and reflected forms (``2 - x`` is ``rsub``). Aliases that torch carries out by
calling the op itself (``arccos``, ``Tensor.__matmul__``) need no row."""

MADE_OF_OTHERS: Mapping[str, tuple[str, ...]] = {
    "gaussian_nll_loss": ("log", "sub", "pow", "div", "mean"),
    "gumbel_softmax": ("log", "softmax"),
    "linear_cross_entropy": ("linear", "cross_entropy"),
    "local_response_norm": ("mul", "avg_pool2d", "avg_pool3d", "add", "pow", "div"),
    **{f"lp_pool{n}d": ("pow", f"avg_pool{n}d", "mul") for n in (1, 2, 3)},
    "multi_head_attention_forward": (
        *("linear", "baddbmm", "bmm", "softmax", "scaled_dot_product_attention"),
    ),
    "multilabel_soft_margin_loss": ("logsigmoid", "mul", "add", "sum", "mean"),
    "normalize": ("norm", "clamp_min", "div"),
    "softmin": ("neg", "softmax"),
    "softsign": ("abs", "add", "div"),
    "tanhshrink": ("tanh", "sub"),
    "triplet_margin_with_distance_loss": ("pairwise_distance", "clamp_min", "mean"),
}
"""Functions in Python that have no op of their own, and the ops that do their arithmetic."""


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


def complaint(spelling: str, where: str = "") -> str:
    """What to say of a `spelling` that `resolve` does not know, and stands in `where`."""
    name = plain(spelling)
    place = f" in {where}" if where else ""
    op, _, overload = name.partition(".")
    if overload and op in spellings():
        return f"'{spelling}'{place} is an overload; name the op, for all of them: '{op}'."
    if name.endswith("_") and name[:-1] in spellings():
        return f"'{spelling}'{place} is an in-place form; name the op: '{name[:-1]}'."
    if name in MADE_OF_OTHERS:
        others = ", ".join(MADE_OF_OTHERS[name])
        return f"'{spelling}'{place} is made of other ops; name those: {others}."
    near = nearest(name.rpartition(".")[2], {**spellings(), **MADE_OF_OTHERS}, 0.7)
    remedy = (
        f"Did you mean '{near}'?"
        if near
        else "Use the name of a function in torch.nn.functional or torch, like softmax."
    )
    return f"unknown op '{spelling}'{place}. {remedy}"
