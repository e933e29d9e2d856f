"""What a policy makes of each op on a device: in which dtype it runs, who says so, who does it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from . import opnames, plan, policyfile, policytext
from .categories import AS_GIVEN, FLOAT32, LOWER, REFUSED, WIDEST, overload
from .plan import NO_KERNEL, Row
from .policy import Policy
from .policytext import place
from .spelling import one_line

SCHEMA = 1
"""Version of the layout of `facts`; it grows when a key changes its meaning or goes."""

_EXPECTED: Mapping[str, str] = {
    FLOAT32: "float32",
    WIDEST: "widest operand",
    REFUSED: "an error",
    AS_GIVEN: "as given",
}


def expectation(policy: Policy, row: Row, dtype: str) -> tuple[str, str]:
    """The dtypes in which an op computes and which its result has, in regions in `dtype`.

    It says what holds of calls that meet none of the row's conditions, and of lists whose ops need
    a parameter (``operands: parameter``) of calls that have one. Results that are written into a
    given tensor have that tensor's dtype.
    """
    if row.category == LOWER:
        return dtype, "float32" if policy.lower_results == "float32" else dtype
    expected = _EXPECTED.get(row.category, row.category)
    return expected, expected


def facts(
    policy: Policy,
    device: str,
    dtype: str | None = None,
    ops: Iterable[str] | None = None,
    every: bool = False,
) -> dict[str, Any]:
    """What `lines` prints, as plain data.

    `dtype` None: the policy's for the device, which may be off, and then there are no ops. `ops`
    names the ops of aten to tell about; else those in a list are, or with `every` all that a policy
    can name.

    Raises:
        PolicyError: a condition of the policy is on an argument that its op does not have.
    """
    plan.check(policy)
    word = dtype or policy.devices[device]
    shown = policytext.plain(policy)
    told = () if word == "off" else _told(policy, plan.rows(policy, device, word), word, ops, every)
    return {
        "schema": SCHEMA,
        "policy": {"name": policy.name, "source": policy.source},
        "device": device,
        "dtype": word,
        "torch": str(torch.__version__),
        "base": policy.base.get(word, ""),
        "operands": policy.lower_operands,
        "results": policy.lower_results,
        **{key: shown[key] for key in _SHOWN},
        "ops": list(told),
    }


_SHOWN = (
    "fixups",
    "modules",
    "parameters",
    "outputs",
    "loss_scale",
    "fallback",
    "distributed",
    "performance",
)


def _told(
    policy: Policy, rows: Sequence[Row], dtype: str, ops: Iterable[str] | None, every: bool
) -> Iterator[dict[str, Any]]:
    found: dict[str, list[Row]] = {op: [] for op in opnames.table()["ops"]} if every else {}
    for row in rows:
        found.setdefault(row.packet, []).append(row)
    for op in sorted(found if ops is None else set(ops), key=lambda op: op.lstrip("_")):
        yield from _op(policy, op, found.get(op, []), dtype, every)


def _op(
    policy: Policy, op: str, rows: Sequence[Row], dtype: str, every: bool
) -> Iterator[dict[str, Any]]:
    """One entry for the overloads that agree; those in no list are not worth one beside others."""
    listed = [row for row in rows if row.category or row.conditions or row.kernel != NO_KERNEL]
    groups: dict[Any, list[Row]] = {}
    for row in (rows if every else listed or rows[:1]) or [_unlisted(op)]:
        groups.setdefault((row.category, row.conditions), []).append(row)
    for (_, conditions), group in groups.items():
        telling = next((row for row in group if not _is_torchs(row.origin)), group[0])
        yield {
            "op": op,
            "overloads": {row.op: row.kernel for row in group},
            **_says(policy, telling, dtype),
            "origin": _origin(telling),
            "fixup": next((row.fixup for row in group if row.fixup), ""),
            "kernel": _kernels(row.kernel for row in group),
            "conditions": [
                {
                    "when": dict(rule.when),
                    **_says(policy, replace(telling, category=rule.into), dtype),
                    "origin": rule.origin,
                }
                for rule in reversed(conditions)
            ],
        }


def _unlisted(op: str) -> Row:
    packet = getattr(torch.ops.aten, op, None)
    if packet is None:
        return Row(op, AS_GIVEN, AS_GIVEN, f"torch {torch.__version__} has no such op", NO_KERNEL)
    which = packet.overloads()[0]
    return Row(op if which == "default" else f"{op}.{which}", AS_GIVEN, AS_GIVEN, "", NO_KERNEL)


def _kernels(kernels: Iterable[str]) -> str:
    *others, last = dict.fromkeys(kernels)
    return " and ".join([*(kernel.removesuffix(" kernel") for kernel in others), last])


def _says(policy: Policy, row: Row, dtype: str) -> dict[str, str]:
    computes, gives = expectation(policy, row, dtype)
    return {"list": row.category or "as given", "computes": computes, "gives": gives}


def _is_torchs(origin: str) -> bool:
    return not origin or origin.startswith("torch's list")


def _origin(row: Row) -> str:
    """Who put an op where it is; of an op in no list torch's lists say nothing."""
    if row.category or not _is_torchs(row.origin):
        return row.origin
    name = overload(row.op).name()
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    return "no list; made of other ops, which may be in one" if is_composite else "no list"


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The facts for a person."""
    for label, entries in _header(found):
        for position, entry in enumerate(entries):
            yield f"{'' if position else label:<11} {entry}"
    if found["dtype"] == "off":
        yield f"Models on {found['device']} run in float32."
        return
    yield ""
    yield from _table(found["ops"])


def _header(found: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    policy, dtype = found["policy"], found["dtype"]
    file = place(policy["source"])
    is_name = policy["name"] in policyfile.shipped()
    yield "policy", [f"{policy['name']} ({file})" if is_name else file]
    if found.get("variables"):
        yield "variables", [f"{k}={one_line(v)}" for k, v in found["variables"].items()]
    yield "torch", [found["torch"]]
    yield "device", [f"{found['device']}, {dtype}"]
    if dtype == "off":
        return
    yield "ops", list(_about_ops(found))
    yield "modules", [_rule(rule, rule["precision"]) for rule in found["modules"]] or ["no rules"]
    yield "parameters", [_rule(r, "float32") for r in found["parameters"]] or ["no rules"]
    yield "outputs", [found["outputs"]]
    yield "loss scale", [_loss_scale(found)]
    yield "fallback", [", ".join(f"{k} {v}".lower() for k, v in found["fallback"].items())]
    yield "gradients", [f"between processes: {found['distributed']['gradients']}"]
    yield "performance", [", ".join(f"{k} {v}" for k, v in found["performance"].items())]


def _about_ops(found: Mapping[str, Any]) -> Iterator[str]:
    whose = {"cuda": "CUDA", "device": found["device"]}.get(found["base"])
    yield f"torch's lists for {whose}, and the policy's rules" if whose else "the policy's rules"
    if found["operands"] == "parameter":
        yield "those in lower: where a parameter is an operand, else in float32"
    if found["results"] == "float32":
        yield "those in lower: results are cast to float32"
    if found["fixups"] == "on":
        yield "fix-ups for what half precision breaks"


def _rule(rule: Mapping[str, Any], precision: str) -> str:
    kind = next(kind for kind in ("name", "regex", "type") if kind in rule)
    steps = "".join(f", {word} step {step}" for word, step in rule.get("steps", {}).items())
    return f'{kind} "{one_line(rule[kind])}": {precision}{steps} ({place(rule["origin"])})'


def _loss_scale(found: Mapping[str, Any]) -> str:
    rules = found["modules"]
    if "float16" not in (found["dtype"], *(rule["precision"] for rule in rules)):
        return f"none, {found['dtype']} needs none"
    said = dict(found["loss_scale"])
    mode = said.pop("mode")
    if mode == "dynamic":
        return ", ".join([mode, *(f"{k} {v}".lower() for k, v in said.items() if v is not None)])
    return f"static, {said['init']}" if mode == "static" else "off"


def _table(ops: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    rows = [("op", "list", "computes in", "gives", "carried out by", "origin")]
    ops = list(ops)
    entries = Counter(op["op"] for op in ops)
    for op in ops:
        name = op["op"] if entries[op["op"]] == 1 else ", ".join(op["overloads"])
        origins = [place(op["origin"]), *[op["fixup"]] * bool(op["fixup"])]
        rows.append((name, *_cells(op), op["kernel"], "; ".join(origins)))
        for condition in op["conditions"]:
            said = ", ".join(f"{key}={value!r}" for key, value in condition["when"].items())
            name = one_line(f"  where {said}")
            rows.append((name, *_cells(condition), op["kernel"], place(condition["origin"])))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


def _cells(said: Mapping[str, Any]) -> tuple[str, str, str]:
    return said["list"], said["computes"], said["gives"]
