"""The JSON Schema of policy files, for editors: the grammar that the reader uses, in other words.

What only all files together can tell (a circle of `extends`, an op in two lists) it does not say.
YAML is meant as in version 1.2, where ``off`` is a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from . import grammar, opnames
from .sections import POLICY

Schema = dict[str, Any]


def json_schema() -> Schema:
    """The schema, as plain values that ``json.dump`` can write (draft 2020-12)."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "autoamp policy",
        **_schema(POLICY),
        "$defs": {"op": _every_op()},
    }


def _schema(kind: grammar.Kind) -> Schema:
    return {"description": kind.about, **_SCHEMAS[type(kind)](kind)}


def _number(kind: grammar.Number) -> Schema:
    return {"type": "integer" if kind.whole else "number", **kind.bounds}


def _arguments(kind: grammar.Arguments) -> Schema:
    return {
        "type": "object",
        "propertyNames": {"pattern": r"^[^\W\d]\w*$"},
        "additionalProperties": {"type": ["boolean", "number", "string", "null"]},
        "minProperties": 1,
        "maxProperties": grammar.MAX_ARGUMENTS,
    }


def _map(kind: grammar.Map) -> Schema:
    schema: Schema = {
        "type": "object",
        "properties": {key: _schema(value) for key, value in kind.keys.items()},
        "additionalProperties": False,
    }
    if kind.needed:
        schema["required"] = list(kind.needed)
    if kind.one_of:
        schema["oneOf"] = [{"required": [key]} for key in kind.one_of]
    if kind.some:
        schema["minProperties"] = 1
    return schema


def _list(kind: grammar.List) -> Schema:
    return {"type": "array", "items": _schema(kind.of), "maxItems": grammar.MAX_ITEMS}


def _every_op() -> Schema:
    """Every op by its plain name, which an editor can offer, or behind a prefix."""
    names = sorted(opnames.spellings())
    behind: dict[str, list[str]] = {}
    for prefix, meaning in opnames.PREFIXES:
        behind.setdefault(meaning, []).append(prefix)
    patterns = (
        f"({'|'.join(map(re.escape, prefixes))})({'|'.join(rest)})"
        for meaning, prefixes in behind.items()
        if (rest := [name.removeprefix(meaning) for name in names if name.startswith(meaning)])
    )
    return {"anyOf": [{"enum": names}, {"pattern": f"^({'|'.join(patterns)})$"}], "type": "string"}


_SCHEMAS: Mapping[type, Callable[[Any], Schema]] = {
    grammar.Word: lambda kind: {"enum": list(kind.words)},
    grammar.Flag: lambda kind: {"type": "boolean"},
    grammar.Number: _number,
    grammar.Text: lambda kind: {"type": "string", **kind.rule},
    grammar.Op: lambda kind: {"$ref": "#/$defs/op"},
    grammar.Arguments: _arguments,
    grammar.Map: _map,
    grammar.List: _list,
    grammar.Either: lambda kind: {"anyOf": [_schema(kind.one), _schema(kind.several)]},
}
