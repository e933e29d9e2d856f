"""The commands below `autoamp policy`: results on stdout, what is wrong on stderr.

Only `explain` imports torch, when it runs; the others work where torch is missing or broken.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import bootstrap, opnames, policyfile, policytext, schema, settings
from .errors import AutoampError
from .policy import Policy

WIDTH = 100


def run(arguments: argparse.Namespace) -> int:
    """Run ``arguments.subcommand``; its exit code."""
    try:
        return _COMMANDS[arguments.subcommand](arguments)
    except AutoampError as error:
        _complain(str(error))
        return 1


def _list(arguments: argparse.Namespace) -> int:
    found = {name: (path, _about(path)) for name, path in policyfile.shipped().items()}
    if arguments.json:
        _print_json([{"name": n, "about": a, "path": str(p)} for n, (p, a) in found.items()])
        return 0
    left = max(map(len, found)) + 2
    for name, (path, about) in found.items():
        first, *others = [*textwrap.wrap(about, WIDTH - left), str(path)]
        _print(f"{name:<{left}}{first}")
        for line in others:
            _print(" " * left + line)
    return 0


def _about(path: Path) -> str:
    """The first paragraph of the comment that a policy starts with."""
    head = re.match(r"(?:#[ \t]*\S.*\n)*", path.read_text(encoding="utf-8"))
    assert head is not None
    return " ".join(line.lstrip("#").strip() for line in head.group().splitlines())


def _show(arguments: argparse.Namespace) -> int:
    policy = policyfile.load(arguments.policy, "autoamp policy show")
    if arguments.json:
        _print_json(policytext.plain(policy))
    else:
        sys.stdout.write(policytext.document(policy))
    return 0


def _validate(arguments: argparse.Namespace) -> int:
    code = 0
    for name in arguments.files:
        # A file is meant, whatever it is called; the name of a shipped policy does no harm.
        reference = os.path.join(os.curdir, name) if os.path.exists(name) else name
        try:
            policyfile.load(reference, "autoamp policy validate")
        except AutoampError as error:
            sys.stdout.flush()
            _complain(str(error))
            code = 1
        else:
            _print(f"{name}: a valid policy (ops of torch {opnames.table()['torch']})")
    return code


def _schema(arguments: argparse.Namespace) -> int:
    _print_json(schema.json_schema())
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    policy = _in_force(arguments.policy)
    # Switched on, autoamp would start in this process too, and what it changes is to be told from
    # what torch does by itself.
    bootstrap.disable()
    try:
        from .requirements import check_torch
    except (ImportError, OSError) as error:
        _complain(f"autoamp policy explain: {bootstrap._explain(error)}")
        return 1
    check_torch()
    from . import explain

    names = arguments.op and [op for name in arguments.op for op in opnames.resolve(name)]
    found = explain.facts(policy, arguments.device, arguments.dtype, names, arguments.all)
    found["variables"] = _variables()
    if arguments.json:
        _print_json(found)
    else:
        for line in explain.lines(found):
            _print(line)
    return 0


def _in_force(reference: str | None) -> Policy:
    """The policy called `reference`, or the environment's, with the environment's rules over it."""
    asked = settings.read()
    if reference is None:
        policy = policyfile.load(asked.policy, settings.origin_of_policy())
    else:
        policy = policyfile.load(reference, "autoamp policy explain")
    return policyfile.with_overrides(policy, asked).forced(asked.dtype, asked.loss_scale)


def _variables() -> dict[str, str]:
    """What is set of the variables that shape a policy."""
    unrelated = ("LOG", "REPORT", "STRICT", "ONLY")
    suffixes = (f"_{suffix}" for suffix in settings.VARIABLES if suffix not in unrelated)
    names = (settings.SWITCH + suffix for suffix in ("", *suffixes))
    return {name: value for name in names if (value := os.environ.get(name, "").strip())}


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "list": _list,
    "show": _show,
    "validate": _validate,
    "explain": _explain,
    "schema": _schema,
}


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _print_json(value: Any) -> None:
    _print(json.dumps(_finite(value), indent=1))


def _finite(value: Any) -> Any:
    """`value` with infinite numbers as YAML spells them: JSON has none."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    is_infinite = isinstance(value, float) and math.isinf(value)
    return str(value).replace("inf", ".inf") if is_infinite else value


def _complain(message: str) -> None:
    sys.stderr.write(f"{message}\n")
