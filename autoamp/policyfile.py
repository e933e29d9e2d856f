"""YAML text to `Policy`; every error with file, line, column and what to write instead.

The text is composed into nodes and read by the tables below: nothing in it can build an object or
run code.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from . import policy as words
from .errors import PolicyError
from .policy import LossScaleRule, Policy

MAX_BYTES = 1 << 20
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SCALARS = ("str", "int", "float", "bool", "null")


def shipped() -> dict[str, Path]:
    """The policies that come with autoamp: in the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "policies", package.parent / "policies"):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    raise PolicyError(f"{package}/policies: the shipped policies are missing; reinstall autoamp.")


def load(reference: str, origin: str = "AUTO_MIXED_PRECISION") -> Policy:
    """The policy called `reference`: a shipped name, or a path (with a separator, or .yaml).

    `origin` says who asked, for the message when there is no such policy.

    Raises:
        PolicyError: no such policy, an unreadable file, or a mistake in it.
    """
    path = _find(reference, origin, Path.cwd())
    return replace(_read(path, ()), name=reference, source=str(path))


def _find(reference: str, where: str, folder: Path) -> Path:
    if os.sep in reference or reference.endswith((".yaml", ".yml")):
        return folder / Path(reference).expanduser()
    known = shipped()
    if reference in known:
        return known[reference]
    raise PolicyError(
        f"{where}: unknown policy '{reference}'. {_nearest(reference, known)} "
        f"A file is named by its path: ./{reference}.yaml"
    )


def _read(path: Path, above: tuple[Path, ...]) -> Policy:
    document = _compose(path)
    policy = Policy()
    if document is None:
        return policy
    sections = _mapping(path, document, "the policy", SECTIONS)
    if "extends" in sections:
        node = sections.pop("extends")
        base = _find(_scalar(path, node, "extends"), _at(path, node), path.parent)
        if base in (*above, path):
            raise PolicyError(
                f"{_at(path, node)}: 'extends' goes round in a circle; remove one reference."
            )
        policy = _read(base, (*above, path))
    for name, node in sections.items():
        policy = replace(policy, **{name: SECTIONS[name](path, node, policy)})
    _check_bounds(path, sections.get("loss_scale", document), policy.loss_scale)
    return policy


def _compose(path: Path) -> yaml.Node | None:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise PolicyError(
            f"{path}: {error.strerror or error}; give the path of a readable policy file."
        ) from None
    if len(text) > MAX_BYTES:
        raise PolicyError(f"{path}: larger than {MAX_BYTES} bytes; this is not a policy.")
    try:
        node: yaml.Node | None = yaml.compose(text.decode(), Loader=_Loader)
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise PolicyError(f"{path}:{line}: not UTF-8 text; save the file as UTF-8.") from None
    except (yaml.MarkedYAMLError, yaml.reader.ReaderError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        problem = (
            getattr(error, "problem", None) or getattr(error, "reason", None) or "nested too deeply"
        )
        raise PolicyError(f"{where}: not valid YAML: {problem}.") from None
    return node


def _at(path: Path, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def _nearest(word: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(word, known, 1, 0.5)
    return f"Did you mean '{near[0]}'?" if near else f"Use one of: {', '.join(known)}."


def _mapping(path: Path, node: yaml.Node, what: str, known: Iterable[str]) -> dict[str, yaml.Node]:
    if not isinstance(node, yaml.MappingNode):
        raise PolicyError(
            f"{_at(path, node)}: {what} must be a map (key: value), not {_kind(node)}."
        )
    entries: dict[str, yaml.Node] = {}
    for key_node, value in node.value:
        key = _scalar(path, key_node, "a key")
        if key not in known:
            raise PolicyError(f"{_at(path, key_node)}: unknown key '{key}'. {_nearest(key, known)}")
        if key in entries:
            raise PolicyError(f"{_at(path, key_node)}: key '{key}' is written twice; keep one.")
        entries[key] = value
    return entries


def _scalar(path: Path, node: yaml.Node, what: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise PolicyError(
            f"{_at(path, node)}: {what} must be a single word or number, not {_kind(node)}."
        )
    if node.tag not in [f"tag:yaml.org,2002:{name}" for name in _SCALARS]:
        raise PolicyError(
            f"{_at(path, node)}: tag '{node.tag}' is not allowed in a policy; write a plain value."
        )
    return str(node.value)


def _kind(node: yaml.Node) -> str:
    kinds = ((yaml.MappingNode, "a map"), (yaml.SequenceNode, "a list"))
    return next((word for kind, word in kinds if isinstance(node, kind)), "a single value")


def _word(path: Path, node: yaml.Node, what: str, known: Iterable[str]) -> str:
    word = _scalar(path, node, what)
    if word not in known:
        raise PolicyError(f"{_at(path, node)}: {what} is '{word}'. {_nearest(word, known)}")
    return word


def _number(path: Path, node: yaml.Node, what: str, kind: type, rule: str) -> Any:
    text = _scalar(path, node, what)
    try:
        number = kind(text.lstrip("+").replace(".inf", "inf"))
        ok = _RULES[rule](number)
    except ValueError:
        ok = False
    if not ok:
        raise PolicyError(
            f"{_at(path, node)}: {what} is '{text}'; "
            f"use {'a whole number' if kind is int else 'a number'} {rule}."
        )
    return number


_RULES: Mapping[str, Callable[[float], bool]] = {
    "above 0 and finite": lambda x: 0.0 < x < float("inf"),
    "above 1": lambda x: 1.0 < x < float("inf"),
    "between 0 and 1": lambda x: 0.0 < x < 1.0,
    "of 1 or more": lambda x: x >= 1,
    "of 0 or more": lambda x: x >= 0.0,
    "above 0": lambda x: x > 0.0,
}
_LOSS_SCALE: Mapping[str, tuple[type, str]] = {
    "init": (float, "above 0 and finite"),
    "growth": (float, "above 1"),
    "backoff": (float, "between 0 and 1"),
    "interval": (int, "of 1 or more"),
    "hysteresis": (int, "of 1 or more"),
    "min": (float, "of 0 or more"),
    "max": (float, "above 0"),
}


def _devices(path: Path, node: yaml.Node, policy: Policy) -> Mapping[str, str]:
    devices = _mapping(path, node, "devices", words.DEVICES)
    said = {
        name: _word(path, value, f"devices.{name}", words.PRECISIONS)
        for name, value in devices.items()
    }
    return {**policy.devices, **said}


def _outputs(path: Path, node: yaml.Node, policy: Policy) -> str:
    return _word(path, node, "outputs", words.OUTPUTS)


def _loss_scale(path: Path, node: yaml.Node, policy: Policy) -> LossScaleRule:
    values: dict[str, Any] = {}
    for name, value in _mapping(
        path, node, "loss_scale", [f.name for f in fields(LossScaleRule)]
    ).items():
        what = f"loss_scale.{name}"
        if name == "mode":
            values[name] = _word(path, value, what, words.MODES)
        else:
            values[name] = _number(path, value, what, *_LOSS_SCALE[name])
    return replace(policy.loss_scale, **values)


def _check_bounds(path: Path, node: yaml.Node, rule: LossScaleRule) -> None:
    if not rule.min <= rule.init <= rule.max:
        raise PolicyError(
            f"{_at(path, node)}: loss_scale.init is {rule.init:g}, outside min {rule.min:g} "
            f"to max {rule.max:g}; change init, min or max."
        )


SECTIONS: Mapping[str, Callable[[Path, yaml.Node, Policy], Any]] = {
    "extends": lambda path, node, policy: None,  # read first, by `_read`
    "devices": _devices,
    "outputs": _outputs,
    "loss_scale": _loss_scale,
}
