"""YAML text to nodes, and nodes to keys and single values; every error with its place.

Nothing in a text can build an object or run code: it is composed, never constructed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from .errors import PolicyError
from .spelling import hint, one_line

MAX_BYTES = 1 << 20
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PLAIN_TAGS = ("str", "int", "float", "bool", "null", "timestamp", "map", "seq")
WHOLE = "the policy"
"""What messages call the whole file."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A node of a file, and what messages call it."""

    path: Path
    node: yaml.Node
    what: str

    @property
    def at(self) -> str:
        """``file:line:column``."""
        mark = self.node.start_mark
        return f"{self.path}:{mark.line + 1}:{mark.column + 1}"

    def error(self, problem: str) -> PolicyError:
        """`problem`, with the place before it."""
        return PolicyError(f"{self.at}: {one_line(problem)}")


def compose(path: Path, asked_at: str) -> yaml.Node | None:
    """The node of the whole text, None for a text that says nothing.

    `asked_at` is where another file asks for this one, or empty.

    Raises:
        PolicyError: the file cannot be read or is not YAML.
    """
    text = _text(path, asked_at)
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = _place(path, text[: mark.index]) if mark else str(path)
        problem = error.problem or "broken"
        if mark and text[mark.index : mark.index + 1] == "\t":
            problem = "a tab where YAML wants spaces; indent with spaces"
        raise PolicyError(f"{where}: not valid YAML: {problem}.") from None
    except yaml.reader.ReaderError:
        match = yaml.reader.Reader.NON_PRINTABLE.search(text)
        where = _place(path, text[: match.start()]) if match else str(path)
        raise PolicyError(f"{where}: not valid YAML: a control character; remove it.") from None
    except RecursionError:
        raise PolicyError(f"{path}:1:1: not a policy: nested too deeply.") from None
    return node


def _text(path: Path, asked_at: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # a path may hold what no path can
        problem = getattr(error, "strerror", None) or error
        name = str(path) if str(path).isprintable() else repr(str(path))
        raise PolicyError(
            f"{asked_at}{name}: {problem}; give the path of a readable policy file."
        ) from None
    if len(data) > MAX_BYTES:
        raise PolicyError(f"{path}: larger than {MAX_BYTES} bytes; this is not a policy.")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        where = _place(path, data[: error.start].decode())
        raise PolicyError(f"{where}: not UTF-8 text; save the file as UTF-8.") from None


def _place(path: Path, before: str) -> str:
    """`path`:line:column of the character behind the text `before`."""
    line_start = before.rfind("\n") + 1
    return f"{path}:{before.count(chr(10)) + 1}:{len(before) - line_start + 1}"


def entries(piece: Piece, known: Iterable[str] | None = None) -> dict[str, Piece]:
    """The values of a map by key; where `known` is None any key will do."""
    if not isinstance(piece.node, yaml.MappingNode):
        raise piece.error(f"{piece.what} must be a map (key: value), not {kind_of(piece.node)}.")
    check_tag(piece)
    prefix = f"{piece.what}." if piece.what != WHOLE else ""
    found: dict[str, Piece] = {}
    for key_node, value in piece.node.value:
        key_piece = Piece(piece.path, key_node, "a key")
        key = scalar(key_piece)
        if known is not None and key not in known:
            raise key_piece.error(f"unknown key '{key}'. {hint(key, known)}")
        if key in found:
            raise key_piece.error(f"key '{key}' is written twice; keep one.")
        found[key] = Piece(piece.path, value, prefix + key)
    return found


def scalar(piece: Piece) -> str:
    """The text of a single value, whatever YAML makes of it."""
    if not isinstance(piece.node, yaml.ScalarNode):
        raise piece.error(
            f"{piece.what} must be a single word or number, not {kind_of(piece.node)}."
        )
    check_tag(piece)
    return str(piece.node.value)


def check_tag(piece: Piece) -> None:
    """Refuse tags of YAML: they ask for objects to be built."""
    tag = piece.node.tag
    if tag.removeprefix("tag:yaml.org,2002:") not in _PLAIN_TAGS:
        raise piece.error(f"tag '{tag}' is not allowed in a policy; write a plain value.")


def kind_of(node: yaml.Node) -> str:
    """What messages call this kind of node."""
    if isinstance(node, yaml.ScalarNode):
        return "null" if node.tag == "tag:yaml.org,2002:null" else "a single value"
    return "a map" if isinstance(node, yaml.MappingNode) else "a list"


def plain_value(piece: Piece) -> bool | int | float | str | None:
    """A value as YAML 1.2 reads it: ``off`` is a word there, and ``1e-5`` a number."""
    text = scalar(piece)
    assert isinstance(piece.node, yaml.ScalarNode)
    if piece.node.style:  # quoted
        return text
    if not text:
        raise piece.error(f"{piece.what} has no value; write the one that the argument must have.")
    if text.lower() == ".nan":
        raise piece.error(f"{piece.what} is '{text}', which equals nothing; write another value.")
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    for pattern, make in _NUMBERS:
        if pattern.fullmatch(text):
            return make(text)
    return text


_CONSTANTS: Mapping[str, bool | float | None] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("null", "Null", "NULL", "~"), None),
    **{sign + ".inf": float(sign + "inf") for sign in ("", "+", "-")},
}
_NUMBERS: tuple[tuple[re.Pattern[str], Callable[[str], int | float]], ...] = (
    (re.compile(r"[-+]?[0-9]{1,18}"), int),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
)
