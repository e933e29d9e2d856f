"""What a policy makes of every op on one device: which list, who says so, and who carries it out.

Only where the policy differs from torch's own kernel does an op get one of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import fixups, opnames
from .categories import AS_GIVEN, FLOAT32, LOWER, WIDEST, overload, torchs_lists
from .errors import PolicyError
from .kernels import Condition, Kernel, Operands, is_parameter
from .policy import OpRule, Policy

TORCHS_KERNEL, OUR_KERNEL, NO_KERNEL = "torch's kernel", "our kernel", "no kernel"


@dataclass(frozen=True, slots=True)
class Row:
    """One overload of an op on one device: `category` is its list, ``""`` for none.

    `torchs` is torch's own list for it, `origin` who says `category`, `kernel` who carries it out.
    `fix` is the kernel of the fix-up that takes part in that.
    """

    op: str
    category: str
    torchs: str
    origin: str
    kernel: str
    conditions: tuple[OpRule, ...] = ()
    fix: Kernel | None = None

    @property
    def fixup(self) -> str:
        """What is done to calls besides what `origin` says."""
        return self.fix.why if self.fix is not None and self.fix.why != self.origin else ""

    @property
    def packet(self) -> str:
        """The op without its overload, in-place forms under the name of the op."""
        return _family(self.op.partition(".")[0])


def rows(policy: Policy, device_type: str, dtype: str) -> list[Row]:
    """Every overload that torch or the policy has in a list, for regions in `dtype` on a device."""
    torchs = torchs_lists(device_type)
    word = policy.base[dtype]
    lists = torchs if word == "device" else _inner(torchs, word)
    if word == "cuda":
        lists = {**lists, **torchs_lists("cuda")}
    listed_by = f"torch's list for {'cuda' if word == 'cuda' else device_type}"
    rules = _rules_by_family(policy)
    names = {name for name in (*lists, *torchs) if _exists(name)}
    for family in rules:
        names.update(_overloads(family))
    wanted = policy.fixups == "on"
    broken = {kernel.op: kernel for kernel in fixups.kernels_for(device_type, dtype, wanted)}
    found = [
        _row(policy, name, lists, listed_by, torchs, rules, broken) for name in names | set(broken)
    ]
    return sorted(found, key=lambda row: row.op)


def _inner(torchs: Mapping[str, str], base: str) -> dict[str, str]:
    """The lists for ops that nobody names, which torch makes of several others in one go.

    They compute in one dtype: were they given their operands as they are, their parts would meet
    autocast in the middle, and take float32 biases for half ones. As torch has it, or, with a
    policy that starts with no lists, in float32.
    """
    own = {name: listed for name, listed in torchs.items() if name.startswith("_")}
    return own if base == "cuda" else dict.fromkeys(own, FLOAT32)


def kernels(
    policy: Policy, device_type: str, dtype: str, covers: Operands | None = None
) -> list[Kernel]:
    """The kernels that `policy` needs in this torch for regions in `dtype` on a device.

    `covers` tells the parameters whose ops stay float32, where the policy has such rules.
    """
    if policy.follows_torch(dtype):
        return fixups.kernels_for(device_type, dtype, wanted=False)
    return [
        _kernel(policy, row, device_type, covers)
        for row in rows(policy, device_type, dtype)
        if row.kernel == OUR_KERNEL
    ]


def _row(
    policy: Policy,
    name: str,
    lists: Mapping[str, str],
    listed_by: str,
    torchs: Mapping[str, str],
    rules: Mapping[str, list[OpRule]],
    broken: Mapping[str, Kernel],
) -> Row:
    category, origin = lists.get(name, AS_GIVEN), listed_by
    conditions: list[OpRule] = []
    for rule in rules.get(_family(name.partition(".")[0]), ()):
        if rule.when:
            conditions += [rule] if _condition(name, rule) else []
        elif rule.into:
            category, origin, conditions = rule.into, rule.origin, []
        elif category == rule.leaves:
            category, origin = AS_GIVEN, rule.origin
    own = torchs.get(name, AS_GIVEN)
    looks = category == LOWER and (
        policy.lower_operands == "parameter"
        or policy.lower_results == "float32"
        or policy.parameters
    )
    fix = broken.get(name)
    if fix is not None and category == AS_GIVEN:
        category, origin = fix.category, fix.why
    elif fix is not None and not _goes_with(fix, category, origin == listed_by):
        fix = None  # the policy has said where the op runs
    if fix is not None or category != own or conditions or looks:
        kernel = OUR_KERNEL
    else:
        kernel = TORCHS_KERNEL if own else NO_KERNEL
    return Row(name, category, own, origin, kernel, tuple(conditions), fix)


def _goes_with(fix: Kernel, category: str, is_torchs: bool) -> bool:
    """Whether a fix-up changes what is not a matter of an op's list, or torch's list alone."""
    if category == WIDEST:
        return fix.adjust is not None
    return category == LOWER and is_torchs and fix.only_with is not None


def _kernel(policy: Policy, row: Row, device_type: str, covers: Operands | None) -> Kernel:
    is_lower = row.category == LOWER
    needed = row.fix.only_with if row.fix is not None else None
    return Kernel(
        row.op,
        device_type,
        row.category,
        f"{row.origin}; {row.fixup}" if row.fixup else row.origin,
        row.torchs,
        tuple(c for rule in row.conditions if (c := _condition(row.op, rule)) is not None),
        is_parameter if is_lower and policy.lower_operands == "parameter" else needed,
        covers if is_lower else None,
        policy.lower_results == "float32",
        row.fix.adjust if row.fix is not None else None,
    )


def _rules_by_family(policy: Policy) -> dict[str, list[OpRule]]:
    """The rules for each op of aten, in order; those whose op this torch does not have are out."""
    found: dict[str, list[OpRule]] = {}
    for rule in policy.ops:
        for packet in opnames.resolve(rule.op):
            if hasattr(torch.ops.aten, packet):
                found.setdefault(packet, []).append(rule)
    return found


def _family(packet: str) -> str:
    """The op that an in-place form belongs to; ``__ior__`` and the like stand for themselves."""
    return packet.removesuffix("_") if not packet.endswith("__") else packet


def _exists(name: str) -> bool:
    packet, _, which = name.partition(".")
    return hasattr(torch.ops.aten, packet) and (which or "default") in _names(packet)


def _names(packet: str) -> list[str]:
    return list(getattr(torch.ops.aten, packet).overloads())


def _overloads(family: str) -> Iterator[str]:
    """Every overload that computes from tensors, the in-place ones and those with ``out=`` too.

    And `view_as_complex`, which torch itself casts on the CPU: half has no complex view.
    """
    for packet in (family, f"{family}_"):
        for which in _names(packet) if hasattr(torch.ops.aten, packet) else ():
            name = packet if which == "default" else f"{packet}.{which}"
            if _computes(overload(name)._schema) or family == "view_as_complex":
                yield name


def _computes(schema: Any) -> bool:
    """Whether an op takes and gives tensors, and none of them shares memory with another."""
    shares = any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)
    takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
    return takes and not shares and any("Tensor" in str(r.type) for r in schema.returns)


def check(policy: Policy) -> None:
    """Refuse conditions on arguments that no form of their op has in this torch.

    Raises:
        PolicyError: with the place of the rule, and the arguments that there are.
    """
    for rule in (rule for rule in policy.ops if rule.when):
        packets = [p for p in opnames.resolve(rule.op) if hasattr(torch.ops.aten, p)]
        names = [name for packet in packets for name in _overloads(packet)]
        if names and not any(_condition(name, rule) for name in names):
            known = {
                argument.name: None
                for name in names
                for argument in overload(name)._schema.arguments
                if "Tensor" not in str(argument.type)
            }
            missing = next(key for key, _ in rule.when if key not in known)
            raise PolicyError(
                f"{rule.origin}: {rule.op} has no argument '{missing}'; "
                f"it takes {', '.join(known)}."
            )


def _condition(name: str, rule: OpRule) -> Condition | None:
    """A rule's argument values, found in the schema of an overload; None where it lacks one."""
    arguments = list(overload(name)._schema.arguments)
    places = {argument.name: index for index, argument in enumerate(arguments)}
    if not all(key in places for key, _ in rule.when):
        return None
    values = tuple(
        (places[key], key, arguments[places[key]].default_value, value) for key, value in rule.when
    )
    return Condition(rule.into, values)
