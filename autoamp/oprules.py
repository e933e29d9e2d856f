"""Lists of ops to add and to remove, as rules; one author's lists may not contradict each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import opnames
from .errors import AutoampError
from .policy import OpRule


@dataclass(frozen=True, slots=True)
class Listed:
    """An op in a list of ops to add to (or, `removed`, to take out of) `into`, one of `LISTS`.

    `where` is what messages call the list, `at` the place of the op, which they start with.
    """

    spelling: str
    into: str
    removed: bool
    where: str
    at: str


def rules(listed: Sequence[Listed], error: type[AutoampError]) -> tuple[OpRule, ...]:
    """Removals, then additions, each in their order.

    Raises:
        error: an op is listed twice, added to two lists, or both added to a list and removed.
    """
    earlier: dict[str, list[Listed]] = {}
    for op in listed:
        for aten in opnames.resolve(op.spelling):
            for other in earlier.setdefault(aten, []):
                problem = _contradiction(op, other)
                if problem:
                    raise error(f"{op.at}: {problem}")
            earlier[aten].append(op)
    return tuple(
        OpRule(opnames.plain(op.spelling), "", op.at, leaves=op.into)
        if op.removed
        else OpRule(opnames.plain(op.spelling), op.into, op.at)
        for op in sorted(listed, key=lambda op: not op.removed)
    )


def _contradiction(op: Listed, other: Listed) -> str:
    """What is wrong with two lists that both name one op, if anything is."""
    called = f"'{op.spelling}'" + f" ('{other.spelling}')" * (op.spelling != other.spelling)
    if op.where == other.where:
        same = set(opnames.resolve(op.spelling)) == set(opnames.resolve(other.spelling))
        return f"op {called} is twice in {op.where}; keep one." if same else ""
    if op.into == other.into:
        return f"op {called} is in {other.where} too; keep one."
    if not op.removed and not other.removed:
        return f"op {called} is in {other.where} too; an op is in one list: keep one."
    return ""
