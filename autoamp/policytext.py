"""`Policy` back to the text of one file, and to plain values; and how places in files are shown."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from . import policyfile
from .policy import LISTS, ModuleRule, OpRule, ParameterRule, Policy
from .resolution import resolved
from .spelling import one_line


def place(origin: str) -> str:
    """An origin in short: a shipped file by its name, one below the working directory from there.

    What cannot be printed is escaped: the name of a file may hold anything.
    """
    position = re.search(r"(:\d+)*$", origin)
    assert position is not None
    path = origin[: position.start()]
    folder, name = os.path.split(path)
    if folder == _shipped_folder():
        path = name
    elif os.path.isabs(path):
        with contextlib.suppress(OSError, ValueError):  # no working directory, or not below it
            path = os.fspath(Path(path).relative_to(Path.cwd()))
    return one_line(path + position.group())


@functools.cache
def _shipped_folder() -> str:
    return os.fspath(next(iter(policyfile.shipped().values())).parent)


def plain(policy: Policy) -> dict[str, Any]:
    """All that `policy` says, in the words of a file, as plain values.

    The rules for ops are all there, in order. A bound that is infinite is None.
    """
    constants = asdict(policy.loss_scale)
    return {
        "name": policy.name,
        "source": policy.source,
        "devices": dict(policy.devices),
        "ops": {
            "base": dict(policy.base),
            "rules": [{**_op(rule), "origin": rule.origin} for rule in policy.ops],
            "operands": policy.lower_operands,
            "results": policy.lower_results,
        },
        "fixups": policy.fixups,
        "modules": [{**_module(rule), "origin": rule.origin} for rule in policy.modules],
        "parameters": [{**_pattern(rule), "origin": rule.origin} for rule in policy.parameters],
        "outputs": policy.outputs,
        "loss_scale": {key: _number(value) for key, value in constants.items()},
        "fallback": asdict(policy.fallback),
        "distributed": {"gradients": policy.gradients},
        "performance": asdict(policy.performance),
    }


def _op(rule: OpRule) -> dict[str, Any]:
    if rule.when:
        return {"op": rule.op, "when": dict(rule.when), "precision": rule.into}
    return {"op": rule.op, **({"add": rule.into} if rule.into else {"remove": rule.leaves})}


def _module(rule: ModuleRule) -> dict[str, Any]:
    steps = {"from": rule.first} if rule.first else {}
    if rule.last not in _INFINITE:
        steps["to"] = int(rule.last)
    said = {**_pattern(rule), "precision": rule.precision}
    return {**said, "steps": steps} if steps else said


def _pattern(rule: ModuleRule | ParameterRule) -> dict[str, str]:
    kinds = ("regex", "type", "name")  # an empty name is that of the outermost module
    kind = next((kind for kind in kinds if getattr(rule, kind, "")), "name")
    return {kind: getattr(rule, kind)}


_INFINITE = (float("inf"), float("-inf"))


def _number(value: Any) -> Any:
    """A constant, whole numbers without a point."""
    if value in _INFINITE:
        return None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def document(policy: Policy) -> str:
    """The text of a file that loads to the same policy, with the place that each rule is from.

    Raises:
        PolicyError: as `resolved` does.
    """
    return "".join(f"{line}\n" for line in _lines(resolved(policy)))


def _lines(policy: Policy) -> Iterator[str]:
    said = plain(policy)
    yield f"# All that {place(policy.source)} and the files that it extends say, in one file."
    yield f"devices: {flow(said['devices'])}"
    yield "ops:"
    yield f"  base: {flow(said['ops']['base'])}"
    rules = said["ops"]["rules"]
    for into in LISTS:
        changes = {
            change: [(rule["op"], rule["origin"]) for rule in rules if rule.get(change) == into]
            for change in ("add", "remove")
        }
        yield from [f"  {into}:"] * any(changes.values())
        for change, ops in changes.items():
            yield from _list(f"    {change}", ops)
    yield from _list("  when", _apart(rule for rule in rules if "when" in rule))
    yield f"  operands: {said['ops']['operands']}"
    yield f"  results: {said['ops']['results']}"
    yield f"fixups: {flow(policy.fixups)}"
    yield from _list("modules", _apart(said["modules"]))
    yield from _list("parameters", _apart(said["parameters"]))
    yield f"outputs: {policy.outputs}"
    constants = {k: float("inf") if v is None else v for k, v in said["loss_scale"].items()}
    yield f"loss_scale: {flow(constants)}"
    yield f"fallback: {flow(said['fallback'])}"
    yield f"distributed: {flow(said['distributed'])}"
    yield f"performance: {flow(said['performance'])}"


def _apart(rules: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Each rule on one line, and its origin."""
    return [
        (flow({key: value for key, value in rule.items() if key != "origin"}), rule["origin"])
        for rule in rules
    ]


def _list(head: str, entries: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield from [f"{head}:"] * bool(entries)
    indent = " " * (len(head) - len(head.lstrip()) + 2)
    for entry, origin in entries:
        yield f"{indent}- {entry}  # {place(origin)}"


def flow(value: Any) -> str:
    """A value on one line, as `yamlnodes` and every other YAML reader understand it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{flow(key)}: {flow(v)}" for key, v in value.items()) + "}"
    if isinstance(value, str):
        is_plain = re.fullmatch(r"[A-Za-z_][\w.]*", value, re.ASCII)
        return value if is_plain and yaml.safe_load(value) == value else _quoted(value)
    if isinstance(value, float):  # YAML 1.1 takes 1e-05 for text
        return re.sub(r"^(-?\d+)e", r"\1.0e", repr(value)).replace("inf", ".inf")
    return json.dumps(value)


def _quoted(text: str) -> str:
    dumped: str = yaml.dump(text, default_style='"', width=10**9, allow_unicode=True)
    return dumped.rstrip("\n")
