"""A policy file, and the files that it extends, to `Policy`.

Each file is read once, whoever extends it, and its words are put over those of the files before it:
what a file does not say itself it does not change.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from . import opnames, oprules
from .errors import PolicyError, SettingsError
from .policy import LISTS, ModuleRule, OpRule, ParameterRule, Policy
from .reading import Said, read
from .sections import POLICY
from .settings import SWITCH, Settings
from .spelling import hint, one_line
from .yamlnodes import WHOLE, Piece, compose

MAX_DEPTH = 50
"""Of files that extend files."""
Sections: TypeAlias = Mapping[str, Said]
"""What one file says, by section."""


def shipped() -> dict[str, Path]:
    """The policies that come with autoamp: in the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "policies", package.parent / "policies"):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    raise PolicyError(f"{package}/policies: the shipped policies are missing; reinstall autoamp.")


def load(reference: str, origin: str = SWITCH) -> Policy:
    """The policy called `reference`: a shipped name, or a path (with a separator, or .yaml).

    `origin` says who asked, for the message when there is no such policy.

    Raises:
        PolicyError: no such policy, an unreadable file, or a mistake in it.
    """
    path = _find(reference, origin, Path())
    with contextlib.suppress(OSError):  # the working directory may have been deleted
        path = Path(os.path.abspath(path))
    files: dict[str, Sections] = {}
    _read(path, "", (), files)
    policy = Policy()
    for sections in files.values():
        for name, build in _BUILD.items():
            if name in sections:
                policy = replace(policy, **build(sections[name], policy))
    _check_bounds(list(files.values()), policy)
    return replace(policy, name=reference, source=str(path))


def with_overrides(policy: Policy, settings: Settings) -> Policy:
    """`policy` with the lists of ``AUTO_MIXED_PRECISION_LOWER_ADD`` and the like put over it.

    Raises:
        SettingsError: a variable names an unknown op, or one that another variable names too.
    """
    listed = []
    for into, change in itertools.product(LISTS, ("add", "remove")):
        variable = f"{SWITCH}_{into}_{change}".upper()
        for spelling in getattr(settings, f"{into}_{change}"):
            if not opnames.resolve(spelling):
                raise SettingsError(f"{variable}: {one_line(opnames.complaint(spelling))}")
            listed.append(oprules.Listed(spelling, into, change == "remove", variable, at=variable))
    return replace(policy, ops=(*policy.ops, *oprules.rules(listed, SettingsError)))


def _find(reference: str, where: str, folder: Path) -> Path:
    if os.sep in reference or reference.endswith((".yaml", ".yml")):
        return folder / os.path.expanduser(reference)
    known = shipped()
    if reference in known:
        return known[reference]
    shown = one_line(reference)
    raise PolicyError(
        f"{where}: unknown policy '{shown}'. {hint(reference, known)} "
        f"A file is named by its path: ./{shown}.yaml"
    )


def _read(path: Path, asked_at: str, above: tuple[str, ...], files: dict[str, Sections]) -> None:
    """Put the files that `path` extends into `files`, in order, and then the file itself.

    `asked_at` is where another file extends this one; `above` and the keys of `files` are real
    paths: of the files that extend this one, and of those that have been read.
    """
    node = compose(path, f"{asked_at}: " if asked_at else "")
    sections = read(Piece(path, node, WHOLE), POLICY).value if node is not None else {}
    above = (*above, _real(path))
    if len(above) > MAX_DEPTH:
        raise PolicyError(f"{asked_at}: more than {MAX_DEPTH} files, each extending the next.")
    elsewhere = set(files)
    for reference in _references(sections):
        base = _find(reference.value, reference.at, path.parent)
        real = _real(base)
        if real in above:
            raise PolicyError(
                f"{reference.at}: 'extends' goes round in a circle; remove one reference."
            )
        if real not in files:
            _read(base, reference.at, above, files)
        elif real not in elsewhere:
            raise PolicyError(
                f"{reference.at}: '{reference.value}' is read already, for one before it, and "
                "would change nothing here; remove it or put it first."
            )
    files[above[-1]] = sections


def _real(path: Path) -> str:
    try:
        return os.path.realpath(path)
    except ValueError:  # a path that cannot be; opening it will say so
        return str(path)


def _references(sections: Sections) -> list[Said]:
    extends = sections.get("extends")
    if extends is None:
        return []
    return extends.value if isinstance(extends.value, list) else [extends]


def _plain(said: Said) -> dict[str, Any]:
    return {key: value.value for key, value in said.value.items()}


def _devices(said: Said, policy: Policy) -> Mapping[str, Any]:
    return {"devices": {**policy.devices, **_plain(said)}}


def _ops(said: Said, policy: Policy) -> Mapping[str, Any]:
    sections: Sections = said.value
    changes: dict[str, Any] = {
        field: sections[key].value
        for key, field in (("operands", "lower_operands"), ("results", "lower_results"))
        if key in sections
    }
    if "base" in sections:
        base = sections["base"]
        everywhere = dict.fromkeys(policy.base, base.value)
        changes["base"] = (
            {**policy.base, **_plain(base)} if isinstance(base.value, dict) else everywhere
        )
    listed = [
        oprules.Listed(op.value, into, change == "remove", f"ops.{into}.{change}", op.at)
        for into in sections
        if into in LISTS
        for change, ops in sections[into].value.items()
        for op in ops.value
    ]
    rules = (*oprules.rules(listed, PolicyError), *_conditional(sections.get("when")))
    return {**changes, "ops": (*policy.ops, *rules)}


def _conditional(said: Said | None) -> tuple[OpRule, ...]:
    rules: dict[Any, OpRule] = {}
    for entry in said.value if said is not None else ():
        op, when, into = (entry.value[key] for key in ("op", "when", "precision"))
        rule = OpRule(opnames.plain(op.value), into.value, op.at, tuple(_plain(when).items()))
        same = (opnames.resolve(rule.op), frozenset(rule.when))
        if same in rules:
            raise PolicyError(f"{op.at}: op '{op.value}' has this condition twice; keep one.")
        rules[same] = rule
    return tuple(rules.values())


def _modules(said: Said, policy: Policy) -> Mapping[str, Any]:
    rules = []
    for entry in said.value:
        rule = {key: value.value for key, value in entry.value.items() if key != "steps"}
        steps = _steps(entry.value["steps"]) if "steps" in entry.value else {}
        rules.append(ModuleRule(origin=entry.at, **rule, **steps))
    return {"modules": (*rules, *policy.modules)}


def _steps(said: Said) -> dict[str, Any]:
    steps = {"first": 0, "last": float("inf")}
    steps.update((_STEPS[key], value) for key, value in _plain(said).items())
    if steps["first"] >= steps["last"]:
        raise PolicyError(
            f"{said.at}: steps go from {steps['first']} to {steps['last']}; "
            "'to' must be greater than 'from'."
        )
    return steps


_STEPS = {"from": "first", "to": "last"}


def _parameters(said: Said, policy: Policy) -> Mapping[str, Any]:
    rules = (ParameterRule(entry.at, **_plain(entry)) for entry in said.value)
    return {"parameters": (*rules, *policy.parameters)}


def _outputs(said: Said, policy: Policy) -> Mapping[str, Any]:
    return {"outputs": said.value}


def _fixups(said: Said, policy: Policy) -> Mapping[str, Any]:
    return {"fixups": said.value}


def _loss_scale(said: Said, policy: Policy) -> Mapping[str, Any]:
    return {"loss_scale": replace(policy.loss_scale, **_plain(said))}


def _fallback(said: Said, policy: Policy) -> Mapping[str, Any]:
    return {"fallback": replace(policy.fallback, **_plain(said))}


def _distributed(said: Said, policy: Policy) -> Mapping[str, Any]:
    return _plain(said)


def _performance(said: Said, policy: Policy) -> Mapping[str, Any]:
    return {"performance": replace(policy.performance, **_plain(said))}


_BUILD: Mapping[str, Callable[[Said, Policy], Mapping[str, Any]]] = {
    "devices": _devices,
    "ops": _ops,
    "fixups": _fixups,
    "modules": _modules,
    "parameters": _parameters,
    "outputs": _outputs,
    "loss_scale": _loss_scale,
    "fallback": _fallback,
    "distributed": _distributed,
    "performance": _performance,
}
"""By section of a file, what it changes in a policy."""


def _check_bounds(files: Sequence[Sections], policy: Policy) -> None:
    """Only all files together tell whether the scale starts within its bounds."""
    rule = policy.loss_scale
    if not rule.min <= rule.init <= rule.max:
        at = next(file["loss_scale"].at for file in reversed(files) if "loss_scale" in file)
        raise PolicyError(
            f"{at}: loss_scale.init is {rule.init:g}, outside min {rule.min:g} "
            f"to max {rule.max:g}; change init, min or max."
        )
