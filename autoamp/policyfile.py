"""YAML text to `Policy`; every error with file, line, column and what to write instead.

The text is composed into nodes and read by the tables below: nothing in it can build an object or
run code.
"""

from __future__ import annotations

import contextlib
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
_PLAIN = ("str", "int", "float", "bool", "null", "map", "seq")


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
    path = _find(reference, origin, Path())
    with contextlib.suppress(OSError):  # the working directory may have been deleted
        path = Path(os.path.abspath(path))
    return replace(_read(path, (), ""), name=reference, source=str(path))


def _find(reference: str, where: str, folder: Path) -> Path:
    if os.sep in reference or reference.endswith((".yaml", ".yml")):
        return folder / os.path.expanduser(reference)
    known = shipped()
    if reference in known:
        return known[reference]
    raise PolicyError(
        f"{where}: unknown policy '{reference}'. {_nearest(reference, known)} "
        f"A file is named by its path: ./{reference}.yaml"
    )


def _read(path: Path, above: tuple[str, ...], asked_at: str) -> Policy:
    """`above`: the real paths of the files that extend this one; `asked_at`: where one does."""
    document = _compose(path, asked_at)
    policy = Policy()
    if document is None:
        return policy
    sections = _mapping(path, document, "the policy", SECTIONS)
    if "extends" in sections:
        node = sections.pop("extends")
        base = _find(_scalar(path, node, "extends"), _at(path, node), path.parent)
        above = (*above, os.path.realpath(path))
        if os.path.realpath(base) in above:
            raise PolicyError(
                f"{_at(path, node)}: 'extends' goes round in a circle; remove one reference."
            )
        policy = _read(base, above, f"{_at(path, node)}: ")
    for name, node in sections.items():
        policy = replace(policy, **{name: SECTIONS[name](path, node, policy)})
    _check_bounds(path, sections.get("loss_scale", document), policy.loss_scale)
    return policy


def _compose(path: Path, asked_at: str) -> yaml.Node | None:
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
        text = data.decode()
    except UnicodeDecodeError as error:
        where = _place(path, data[: error.start].decode())
        raise PolicyError(f"{where}: not UTF-8 text; save the file as UTF-8.") from None
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
        raise PolicyError(f"{path}: not a policy: nested too deeply.") from None
    return node


def _place(path: Path, before: str) -> str:
    """`path`:line:column of the character behind the text `before`."""
    line_start = before.rfind("\n") + 1
    return f"{path}:{before.count(chr(10)) + 1}:{len(before) - line_start + 1}"


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
    _check_tag(path, node)
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
    _check_tag(path, node)
    return str(node.value)


def _check_tag(path: Path, node: yaml.Node) -> None:
    """YAML tags ask for objects to be built; a policy has none."""
    if node.tag.removeprefix("tag:yaml.org,2002:") not in _PLAIN:
        raise PolicyError(
            f"{_at(path, node)}: tag '{node.tag}' is not allowed in a policy; write a plain value."
        )


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
    "that float32 can hold and invert": lambda x: words.SCALES[0] <= x <= words.SCALES[1],
    "above 1": lambda x: 1.0 < x < float("inf"),
    "between 0 and 1": lambda x: 0.0 < x < 1.0,
    "from 1 to 2147483647": lambda x: 1 <= x < 2**31,
    "of 0 or more": lambda x: x >= 0.0,
    "above 0": lambda x: x > 0.0,
}
_LOSS_SCALE: Mapping[str, tuple[type, str]] = {
    "init": (float, "that float32 can hold and invert"),
    "growth": (float, "above 1"),
    "backoff": (float, "between 0 and 1"),
    "interval": (int, "from 1 to 2147483647"),
    "hysteresis": (int, "from 1 to 2147483647"),
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
