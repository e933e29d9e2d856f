"""All that a policy file can say: one table, for the reader and for the schema."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping

from . import policy as words
from .grammar import Arguments, Either, Flag, Kind, List, Map, Number, Op, Text, Word


def _name(text: str) -> str:
    return "" if text.strip() else "is empty; write a name or remove the key"


def _any_name(text: str) -> str:
    return ""


def _regex(text: str) -> str:
    if not text:
        return "is empty and would match nothing; write a regular expression or remove the key"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the pattern may mean in a later Python
            re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a regular expression: {error}; correct it"
    return ""


def _class(text: str) -> str:
    if all(part.isidentifier() for part in text.split(".")):
        return ""
    return f"is '{text}', which is no class; write a class name like torch.nn.LayerNorm"


_NOT_BLANK = {"pattern": r"\S"}
_REFERENCE = Text("A shipped policy, or the path of a file.", _name, _NOT_BLANK)
_NAME = Text("A glob over qualified names; `*` matches dots too.", _name, _NOT_BLANK)
_MODULE_NAME = Text(f"{_NAME.about} '' is the outermost module.", _any_name, {})
_REGEX = Text(
    "A regular expression that matches a whole qualified name.",
    _regex,
    {"minLength": 1, "format": "regex"},
)
_CLASS = Text(
    "The name of a class, with its package or without; subclasses match too.",
    _class,
    {"pattern": r"^[^\W\d]\w*(\.[^\W\d]\w*)*$"},
)
_COUNT = ("from 1 to 2147483647", {"minimum": 1, "maximum": 2**31 - 1}, True)
_SCALE = dict(zip(("minimum", "maximum"), words.SCALES, strict=True))
_FACTOR = {"exclusiveMinimum": 1, "maximum": sys.float_info.max}

_BASE = Word(
    "device: torch's lists for the device; cuda: torch's lists for CUDA, on every device; "
    "none: no lists, every op runs in the dtypes it is given.",
    words.BASES,
)
_LISTS = {
    "lower": "Ops that run in the lower precision.",
    "float32": "Ops whose operands are cast to float32.",
    "widest": "Ops whose operands are cast to the widest dtype among them.",
}
_CONDITION = Map(
    "An op, and when it is in which list.",
    {
        "op": Op("The op."),
        "when": Arguments("Arguments of the op, and the value that each must have."),
        "precision": Word("The list that the op is in then.", words.LISTS),
    },
    needed=("op", "when", "precision"),
)
_OPS: Mapping[str, Kind] = {
    "base": Either(
        "The lists to start from.",
        _BASE,
        Map(
            "By lower precision.",
            {
                dtype: Word(f"Where that is {dtype}: {_BASE.about}", words.BASES)
                for dtype in ("float16", "bfloat16")
            },
        ),
    ),
    **{
        name: Map(
            about,
            {
                "add": List("Ops put into this list.", Op("An op.")),
                "remove": List("Ops taken out of this list.", Op("An op.")),
            },
        )
        for name, about in _LISTS.items()
    },
    "when": List("Ops that are in a list only when called with certain arguments.", _CONDITION),
    "operands": Word(
        "Which calls of the ops in `lower` run in the lower precision: any, or those with a "
        "parameter among the operands; the others run in float32.",
        words.OPERANDS,
    ),
    "results": Word(
        "What becomes of the results of the ops in `lower`: kept as they are, or cast to float32.",
        words.OUTPUTS,
    ),
}
_STEPS = Map(
    "The steps of the optimizer for which the rule holds.",
    {
        "from": Number("The first one, counted from 0.", "of 0 or more", {"minimum": 0}, True),
        "to": Number("The first one after.", "of 1 or more", {"minimum": 1}, True),
    },
    some=True,
)
_MODULE = Map(
    "Some modules, told by name or by class, and their precision.",
    {
        "name": _MODULE_NAME,
        "regex": _REGEX,
        "type": _CLASS,
        "precision": Word("The precision in which they run.", words.MODULE_PRECISIONS),
        "steps": _STEPS,
    },
    needed=("precision",),
    one_of=("name", "regex", "type"),
)
_PARAMETER = Map(
    "Some parameters, told by name.", {"name": _NAME, "regex": _REGEX}, one_of=("name", "regex")
)
_LOSS_SCALE: Mapping[str, Kind] = {
    "mode": Word("Whether the scale adapts, stands still, or is none.", words.MODES),
    "init": Number("The first scale.", "that float32 can hold and invert", _SCALE),
    "growth": Number("The factor by which it grows.", "above 1", _FACTOR),
    "backoff": Number(
        "The factor by which it shrinks.",
        "between 0 and 1",
        {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
    ),
    "interval": Number("Steps between two growths.", *_COUNT),
    "hysteresis": Number("Skipped steps in a row before it shrinks.", *_COUNT),
    "min": Number("The least scale.", "of 0 or more", {"minimum": 0}),
    "max": Number("The greatest scale.", "above 0", {"exclusiveMinimum": 0}),
    "hold_schedulers": Flag("Whether learning rates stay as they are after a skipped step."),
    "repeat_first": Number(
        "How many of the first steps are not skipped where their gradients overflow: the backward "
        "is run again at half the scale.",
        "of 0 or more",
        {"minimum": 0},
        True,
    ),
}

_FALLBACK: Mapping[str, Kind] = {
    "on_error": Word(
        "Whether a module that raises because of half precision runs in float32 from then on.",
        words.ON_ERROR,
    ),
    "on_overflow": Word(
        "Whether modules whose results overflow run in float32 from then on.", words.ON_OVERFLOW
    ),
    "inspect": Flag("Whether the first calls of a model are looked at for silent failures."),
    "patience": Number("Skipped steps in a row before overflows are looked for.", *_COUNT),
}

_DISTRIBUTED: Mapping[str, Kind] = {
    "gradients": Word(
        "The dtype in which DistributedDataParallel exchanges gradients: as they are, or in the "
        "lower precision.",
        words.GRADIENTS,
    ),
}

_PERFORMANCE: Mapping[str, Kind] = {
    "memory_format": Word(
        "The memory format of 2-D convolutions in a region: as it is, channels_last, or that where "
        "it pays.",
        words.MEMORY_FORMATS,
    ),
    "optimizer": Word(
        "Whether optimizers of torch for which the script asks for no form take their fused one; "
        "auto: on CUDA.",
        words.OPTIMIZERS,
    ),
    "float32_matmul": Word(
        "The precision of the float32 matrix products that are left, on CUDA.",
        words.FLOAT32_MATMULS,
    ),
    "cudnn_benchmark": Word(
        "Whether cuDNN times its algorithms and takes the fastest.", words.CUDNN_BENCHMARKS
    ),
    "weight_cache": Word(
        "Whether casts of weights that get no gradient are kept until the weights change.",
        words.WEIGHT_CACHES,
    ),
    "stand_down": Word(
        "Whether models that lower precision would not make faster stay float32.",
        words.STAND_DOWNS,
    ),
}

POLICY = Map(
    "What runs in which precision.",
    {
        "extends": Either(
            "The policies to start from. Later ones win over earlier ones, and this file over all.",
            _REFERENCE,
            List("Several of them.", _REFERENCE),
        ),
        "devices": Map(
            "The lower precision on each type of device.",
            {name: Word(f"That on {name}.", words.PRECISIONS) for name in words.DEVICES},
        ),
        "ops": Map("Which ops run in which precision.", _OPS),
        "fixups": Word(
            "Whether ops in no list that half precision breaks are put right, each in its own way.",
            words.FIXUPS,
        ),
        "modules": List("Modules with a precision of their own; the first match wins.", _MODULE),
        "parameters": List("Parameters whose ops stay float32.", _PARAMETER),
        "outputs": Word("The dtype of what leaves the outermost module.", words.OUTPUTS),
        "loss_scale": Map("How the gradients of float16 are scaled.", _LOSS_SCALE),
        "fallback": Map("What becomes of modules that half precision breaks.", _FALLBACK),
        "distributed": Map("How processes work together.", _DISTRIBUTED),
        "performance": Map("What is done for speed besides.", _PERFORMANCE),
    },
)
"""The whole file."""
