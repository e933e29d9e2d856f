"""The environment, read once, as a frozen value.

Every variable is a row of `VARIABLES`; a name or a value that is not understood is an error, never
a silent default.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .bootstrap import OFF, ON
from .errors import SettingsError
from .policy import SCALES
from .speech import LEVELS
from .spelling import nearest

SWITCH = "AUTO_MIXED_PRECISION"
DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for, the switch itself apart (`bootstrap` reads that).

    `loss_scale` is ``"dynamic"``, a static scale, or None: as the policy says. `lower_add` and the
    like name ops for the lists of the policy, as they are spelled in the variable.
    """

    policy: str = "default"
    dtype: str | None = None
    loss_scale: str | float | None = None
    log: str = "notice"
    report: str | None = None
    tensorboard: str | None = None
    strict: bool = False
    dry: bool = False
    only: tuple[str, ...] = ()
    lower_add: tuple[str, ...] = ()
    lower_remove: tuple[str, ...] = ()
    float32_add: tuple[str, ...] = ()
    float32_remove: tuple[str, ...] = ()
    widest_add: tuple[str, ...] = ()
    widest_remove: tuple[str, ...] = ()


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"use one of: {', '.join(words)}")
        return text

    return read


def _flag(text: str) -> bool:
    if text.lower() not in ON + OFF:
        raise ValueError(f"use one of: {', '.join(ON + OFF)}")
    return text.lower() in ON


def _loss_scale(text: str) -> str | float:
    if text == "dynamic":
        return text
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0.0 < scale < float("inf"):
        raise ValueError("use 'dynamic' or a positive number") from None
    least, most = SCALES
    if not least <= scale <= most:
        raise ValueError(f"use 'dynamic' or a number from {least:.3g} to {most:.3g}")
    return scale


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


VARIABLES: Mapping[str, Callable[[str], Any]] = {
    "POLICY": str,
    "DTYPE": _one_of(*DTYPES),
    "LOSS_SCALE": _loss_scale,
    "LOG": _one_of(*LEVELS),
    "REPORT": str,
    "TENSORBOARD": str,
    "STRICT": _flag,
    "DRY": _flag,
    "ONLY": _words,
    "LOWER_ADD": _words,
    "LOWER_REMOVE": _words,
    "FLOAT32_ADD": _words,
    "FLOAT32_REMOVE": _words,
    "WIDEST_ADD": _words,
    "WIDEST_REMOVE": _words,
}


_NAMES = (SWITCH, *(f"{SWITCH}_{name}" for name in VARIABLES))
_LIKENESS = 0.94
"""Of two spellings with one slip between them; ``USE_MIXED_PRECISION`` is somebody else's."""


def read(environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings in `environ`; ``_POLICY`` outranks a policy that the switch names.

    Raises:
        SettingsError: a variable with our prefix, or nearly, is unknown, or its value cannot be
            understood.
    """
    switch = environ.get(SWITCH, "").strip()
    values: dict[str, Any] = {}
    if switch and switch.lower() not in ON + OFF:
        values["policy"] = switch
    for name in sorted(environ):
        if not name.startswith(SWITCH + "_"):
            if near := _misspelled(name):
                raise SettingsError(f"{name}: unknown variable. Did you mean {near}?")
            continue
        suffix, text = name[len(SWITCH) + 1 :], environ[name].strip()
        if suffix not in VARIABLES:
            near = nearest(suffix, VARIABLES)
            hint = f"Did you mean {SWITCH}_{near}?" if near else f"Known: {', '.join(VARIABLES)}."
            raise SettingsError(f"{name}: unknown variable. {hint}")
        if not text:
            continue
        try:
            values[suffix.lower()] = VARIABLES[suffix](text)
        except ValueError as error:
            raise SettingsError(f"{name}={text}: {error}.") from None
    return Settings(**values)


def _misspelled(name: str) -> str | None:
    """The variable that `name` is nearly; None for one of others, and for the switch itself."""
    is_near = any(word in name.upper() for word in ("MIXED", "PRECISION"))
    if not is_near or name == SWITCH or f"_{SWITCH}" in name:
        return None
    return nearest(name, _NAMES, _LIKENESS)


def origin_of_policy(environ: Mapping[str, str] = os.environ) -> str:
    """The variable that names the policy, for messages about it."""
    return SWITCH + "_POLICY" if environ.get(SWITCH + "_POLICY", "").strip() else SWITCH


def is_excluded(only: tuple[str, ...], script: str) -> bool:
    """Whether ``_ONLY`` leaves this script out: globs of file names, the last match wins."""
    if not only:
        return False
    name = os.path.basename(script)
    excluded = not only[0].startswith("!")
    for glob in only:
        if fnmatch.fnmatch(name, glob.removeprefix("!")):
            excluded = glob.startswith("!")
    return excluded
