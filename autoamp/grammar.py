"""The kinds of things that can be written in a policy file; `sections` says which, and where.

`reading` reads them and `schema` prints them, so that both mean the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

MAX_ITEMS = 10_000
MAX_ARGUMENTS = 50
"""Of one list, of one op: with aliases a small file could say more than can be read in hours."""


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a few."""

    about: str
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Flag:
    """true or false."""

    about: str


@dataclass(frozen=True, slots=True)
class Number:
    """A number within `bounds`, whose names are those of JSON Schema; `rule` says them."""

    about: str
    rule: str
    bounds: Mapping[str, float]
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """Text of which `problem` says what is wrong with it, if anything is.

    `rule` is the same in words of JSON Schema, as far as it has them.
    """

    about: str
    problem: Callable[[str], str]
    rule: Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class Op:
    """An op, in any spelling of `opnames`."""

    about: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """Names of arguments of an op, at least one, and the single value that each must have."""

    about: str


@dataclass(frozen=True, slots=True)
class Map:
    """Known keys: all of `needed`, exactly one of `one_of`, and some key at all if `some`."""

    about: str
    keys: Mapping[str, Kind]
    needed: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()
    some: bool = False


@dataclass(frozen=True, slots=True)
class List:
    """Any number of the same."""

    about: str
    of: Kind


@dataclass(frozen=True, slots=True)
class Either:
    """One word or text, or several in a map or list."""

    about: str
    one: Word | Text
    several: Map | List


Kind: TypeAlias = Word | Flag | Number | Text | Op | Arguments | Map | List | Either
