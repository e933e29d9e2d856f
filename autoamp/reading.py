"""Nodes of YAML to what the kinds of `grammar` allow, or one line about the first mistake."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from . import grammar, opnames
from .spelling import hint
from .yamlnodes import Piece, check_tag, entries, kind_of, plain_value, scalar


@dataclass(frozen=True, slots=True)
class Said:
    """What a policy file says, and where: ``file:line:column``.

    A map's value is ``{key: Said}``, that of a list ``[Said]``; all others are plain.
    """

    value: Any
    at: str


def read(piece: Piece, kind: grammar.Kind) -> Said:
    """What `piece` says, if `kind` allows it.

    Raises:
        PolicyError: the first thing that it does not allow.
    """
    return Said(_READ[type(kind)](piece, kind), piece.at)


def _word(piece: Piece, kind: grammar.Word) -> str:
    word = scalar(piece)
    if word not in kind.words:
        raise piece.error(f"{piece.what} is '{word}'. {hint(word, kind.words)}")
    return word


def _flag(piece: Piece, kind: grammar.Flag) -> bool:
    word = scalar(piece)
    if word.lower() not in ("true", "false"):
        raise piece.error(f"{piece.what} is '{word}'; use true or false.")
    return word.lower() == "true"


def _number(piece: Piece, kind: grammar.Number) -> float:
    text = scalar(piece)
    try:
        number = (int if kind.whole else float)(text.lstrip("+").replace(".inf", "inf"))
        ok = all(_HOLDS[name](number, bound) for name, bound in kind.bounds.items())
    except ValueError:
        ok = False
    if not ok:
        a_number = "a whole number" if kind.whole else "a number"
        raise piece.error(f"{piece.what} is '{text}'; use {a_number} {kind.rule}.")
    return number


_HOLDS: Mapping[str, Callable[[float, float], bool]] = {  # all false for NaN
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}


def _free_text(piece: Piece, kind: grammar.Text) -> str:
    text = scalar(piece)
    if kind_of(piece.node) == "null":
        raise piece.error(f"{piece.what} is empty; give it a value or remove the key.")
    problem = kind.problem(text)
    if problem:
        raise piece.error(f"{piece.what} {problem}.")
    return text


def _op(piece: Piece, kind: grammar.Op) -> str:
    spelling = scalar(piece)
    if not opnames.resolve(spelling):
        raise piece.error(opnames.complaint(spelling, re.sub(r"\[\d+\]$", "", piece.what)))
    return spelling


def _arguments(piece: Piece, kind: grammar.Arguments) -> dict[str, Said]:
    arguments = {}
    said = entries(piece)
    if len(said) > grammar.MAX_ARGUMENTS:
        raise piece.error(f"{piece.what} names more than {grammar.MAX_ARGUMENTS} arguments.")
    for name, value in said.items():
        if not name.isidentifier():
            raise piece.error(f"{piece.what} names '{name}', which is no argument.")
        arguments[name] = Said(plain_value(value), value.at)
    if not arguments:
        raise piece.error(f"{piece.what} is empty; name an argument and the value it must have.")
    return arguments


def _map(piece: Piece, kind: grammar.Map) -> dict[str, Said]:
    said = entries(piece, kind.keys)
    for key in kind.needed:
        if key not in said:
            raise piece.error(f"{piece.what} has no '{key}'; add it.")
    rivals = [key for key in kind.one_of if key in said]
    if kind.one_of and not rivals:
        raise piece.error(f"{piece.what} needs one of: {', '.join(kind.one_of)}.")
    if len(rivals) > 1:
        raise piece.error(f"{piece.what} has {' and '.join(rivals)}; keep one of them.")
    if kind.some and not said:
        raise piece.error(f"{piece.what} is empty; give it {' or '.join(kind.keys)}.")
    return {key: read(value, kind.keys[key]) for key, value in said.items()}


def _list(piece: Piece, kind: grammar.List) -> list[Said]:
    node = piece.node
    if not isinstance(node, yaml.SequenceNode):
        example = f"; write [{node.value}]" if kind_of(node) == "a single value" else ""
        raise piece.error(f"{piece.what} must be a list, not {kind_of(node)}{example}.")
    check_tag(piece)
    if len(node.value) > grammar.MAX_ITEMS:
        raise piece.error(f"{piece.what} has more than {grammar.MAX_ITEMS} entries.")
    return [
        read(Piece(piece.path, item, f"{piece.what}[{i}]"), kind.of)
        for i, item in enumerate(node.value)
    ]


def _either(piece: Piece, kind: grammar.Either) -> Any:
    collection, name = _COLLECTIONS[type(kind.several)]
    if isinstance(piece.node, collection):
        return read(piece, kind.several).value
    if isinstance(piece.node, yaml.CollectionNode):
        raise piece.error(f"{piece.what} must be one word or {name}, not {kind_of(piece.node)}.")
    return read(piece, kind.one).value


_COLLECTIONS: Mapping[type, tuple[type[yaml.CollectionNode], str]] = {
    grammar.Map: (yaml.MappingNode, "a map"),
    grammar.List: (yaml.SequenceNode, "a list"),
}
_READ: Mapping[type, Callable[[Piece, Any], Any]] = {
    grammar.Word: _word,
    grammar.Flag: _flag,
    grammar.Number: _number,
    grammar.Text: _free_text,
    grammar.Op: _op,
    grammar.Arguments: _arguments,
    grammar.Map: _map,
    grammar.List: _list,
    grammar.Either: _either,
}
