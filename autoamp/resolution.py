"""What several files say of each op, one after the other, as what a single file can say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import opnames
from .errors import PolicyError
from .policy import LISTS, OpRule, Policy

Word = tuple[Any, ...]
"""What can hold of an op: (``remove`` or ``add``, list), (``when``, list, values) or `IN_NONE`."""
IN_NONE: Word = ("in no list",)
"""Also where torch refuses the op, which no `remove` says."""
Said = dict[Word, int]
"""What holds of one op, and the numbers of the rules that say so."""
NO_FILE = "a single file cannot say that; use autoamp policy explain, or show --json."


def resolved(policy: Policy) -> Policy:
    """`policy` with only those rules for ops that count in the end, in the order of one file.

    Raises:
        PolicyError: one file cannot say it, and only files that contradict each other do.
    """
    said: dict[str, Said] = {}
    for number, rule in enumerate(policy.ops):
        for op in opnames.resolve(rule.op):
            _hear(said.setdefault(op, {}), rule, number)
    found: dict[tuple[Word, str], int] = {}
    for op, words in said.items():
        for word, number in words.items():
            if word == IN_NONE:
                _check_is_not_refused(op, policy.ops[number])
            else:
                found[word, _name(op, word, policy.ops[number], said)] = number
    rules = (_rule(policy.ops[n], *names) for names, n in sorted(found.items(), key=_rank))
    return replace(policy, ops=tuple(rules))


def _hear(said: Said, rule: OpRule, number: int) -> None:
    """Let `rule` change what holds of an op, as `plan` has it."""
    if rule.when:
        values = frozenset(rule.when)
        for into in LISTS:
            said.pop(("when", into, values), None)
        said["when", rule.into, values] = number
    elif rule.into:
        said.clear()
        said["add", rule.into] = number
    elif said.pop(("add", rule.leaves), None) is not None:
        said.update({("remove", into): number for into in LISTS})
        said[IN_NONE] = number
    elif not any(("add", into) in said for into in LISTS):
        said["remove", rule.leaves] = number


def _name(op: str, word: Word, rule: OpRule, said: Mapping[str, Said]) -> str:
    """What to call an op of aten in one file: as `rule` does, if `word` suits all that means."""
    for name in (rule.op, op):
        meant = opnames.resolve(name)
        if op in meant and all(_suits(word, said.get(other, {})) for other in meant):
            return name
    others = [other for other in opnames.resolve(op) if not _suits(word, said.get(other, {}))]
    raise PolicyError(
        f"{rule.origin}: this holds of aten's {op} but not of {', '.join(others)}, which '{op}' "
        f"means too, and {NO_FILE}"
    )


def _suits(word: Word, said: Said) -> bool:
    """Whether `word` holds of an op, or is a removal that another list's addition outdoes."""
    into = next((other[1] for other in said if other[0] == "add"), None)
    return word in said or (word[0] == "remove" and into not in (None, word[1]))


def _check_is_not_refused(op: str, rule: OpRule) -> None:
    if "refused" in opnames.table()["ops"].get(op, {}).values():
        raise PolicyError(
            f"{rule.origin}: this lets through {op}, which torch refuses, and {NO_FILE}"
        )


def _rank(found: tuple[tuple[Word, str], int]) -> tuple[int, int, int]:
    """The place in one file: removals and additions by list, then conditions."""
    (word, _), number = found
    kind = ("remove", "add", "when").index(word[0])
    return kind, 0 if word[0] == "when" else LISTS.index(word[1]), number


def _rule(rule: OpRule, word: Word, name: str) -> OpRule:
    if word[0] == "remove":
        return OpRule(name, "", rule.origin, leaves=word[1])
    return replace(rule, op=name)
