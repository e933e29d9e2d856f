"""Under every policy every op runs as the plan says, in all its overloads, in place and to `out`.

A call inside a region is compared with the same call outside, its operands cast by hand as the plan
says: the dtypes that are computed in, those of the results, and on the CPU each bit of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autoamp import opnames
from autoamp.categories import FLOAT32, LOWER, REFUSED, WIDEST
from autoamp.plan import Row, rows
from autoamp.policyfile import load

from .children import ONLY_THE_INPUT, Compared, Job, compare, in_children
from .samples import OVERLOADS_WITHOUT, WITHOUT, WRITING_WITHOUT, Sample, samples

Mixed = Callable[..., Any]
POLICIES = sorted(path.stem for path in (Path(__file__).parents[2] / "policies").glob("*.yaml"))
GIVEN = {
    # by list, the dtypes of the operands in turn, the last one for the rest
    **dict.fromkeys(("", LOWER, FLOAT32), (("float32",), ("lower",))),
    WIDEST: (("lower",), ("float32", "lower"), ("lower", "float32")),
}
GIVEN_TO_NORMS = (("float32",), ("lower", "float32"))
EVERY_OP = sorted(opnames.table()["ops"].keys() - WITHOUT.keys())


def spellings() -> list[str]:
    """Names for every op, none of which says what another has said."""
    said: set[str] = set()
    names = []
    for name in sorted(EVERY_OP, key=lambda op: -len(opnames.resolve(op))):
        if not said & set(opnames.resolve(name)):
            said |= set(opnames.resolve(name))
            names.append(name)
    return names


EVERYTHING = {
    # policies that say one thing of every op
    **{
        into: f"ops: {{base: none, {into}: {{add: [{', '.join(spellings())}]}}}}\n"
        for into in (LOWER, FLOAT32, WIDEST)
    },
    "none": "ops: {base: none}\n",
}


@functools.cache
def by_overload() -> dict[str, Sample]:
    """The call of every overload, in-place forms and those with `out` too."""
    return {sample.overload: sample for op in EVERY_OP for sample in samples(op)}


def jobs(policy: str, device: str, lower: str) -> Iterator[Job]:
    """A call for each row of the plan, from operands of each kind."""
    loaded = load(policy)
    planned = {row.op: row for row in rows(loaded, device, lower)}
    has_lists = bool(loaded.ops) or loaded.base[lower] != "none"
    for name, row in planned.items():
        sample = by_overload().get(name)
        if sample is None or row.category == REFUSED or does_more_than_cast(row):
            continue
        if not row.category and has_lists and is_made_of_others(name):
            continue  # it runs as the ops do that it calls
        operands = len(sample.operands)
        givens = GIVEN_TO_NORMS if name in ONLY_THE_INPUT else GIVEN[row.category]
        for given in dict.fromkeys(given[:operands] for given in givens):
            job = Job(device, lower, sample, given, policy, cast_to(row, given))
            if row.category == LOWER and loaded.lower_operands == "parameter":
                yield replace(job, cast=FLOAT32)
                job = replace(job, parameter=True)
            if job.cast == LOWER and loaded.lower_results == "float32":
                job = replace(job, results=FLOAT32)
            yield job


def does_more_than_cast(row: Row) -> bool:
    """Whether a fix-up looks at the arguments of a call; test_fixups has those."""
    return row.fix is not None and (row.fix.adjust is not None or row.fix.only_with is not None)


def is_made_of_others(name: str) -> bool:
    """Whether torch carries an op out by calling others, which meet autocast again."""
    key = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


def cast_to(row: Row, given: tuple[str, ...]) -> str:
    """The precision that the plan gives a call, from those of its operands."""
    if row.category == WIDEST:
        return LOWER if set(given) == {LOWER} else FLOAT32
    return row.category


def wrong(todo: list[Job], seen: list[Compared]) -> dict[Any, Compared]:
    """The calls that did not run as planned."""
    return {
        (job.policy, job.sample.overload, job.given, job.cast): one
        for job, one in zip(todo, seen, strict=True)
        if not one.agrees
    }


@pytest.fixture
def named(tmp_path: Path) -> Callable[[str], str]:
    """`named(policy)` is how to ask for a shipped policy, or for one of `EVERYTHING`."""

    def name(policy: str) -> str:
        if policy not in EVERYTHING:
            return policy
        path = tmp_path / f"{policy}.yaml"
        path.write_text(EVERYTHING[policy])
        return str(path)

    return name


CASES = [
    *((policy, lower) for policy in POLICIES for lower in ("float16", "bfloat16")),
    *((policy, "float16") for policy in EVERYTHING),
]
"""In bfloat16 without the forms that write: the kernels are those of float16."""


def test_every_row_of_the_plan_has_a_call_or_a_reason(named: Callable[[str], str]) -> None:
    planned = {
        row.op
        for policy in (*POLICIES, *EVERYTHING)
        for device in ("cpu", "cuda")
        for row in rows(load(named(policy)), device, "float16")
        if row.fix is None  # policies cannot name all of those; test_fixups calls them
    }
    reasons = {*WITHOUT, *OVERLOADS_WITHOUT, *WRITING_WITHOUT}
    assert len(planned) > 1400
    assert planned - by_overload().keys() <= reasons
    assert not by_overload().keys() & reasons


@pytest.mark.parametrize(("policy", "lower"), CASES)
def test_on_the_cpu_every_op_runs_as_planned(
    mixed: Mixed, named: Callable[[str], str], policy: str, lower: str
) -> None:
    mixed(named(policy), lower)
    todo = [
        job
        for job in jobs(named(policy), "cpu", lower)
        if lower == "float16" or not job.sample.writes
    ]
    assert len(todo) > 200
    assert wrong(todo, [compare(job) for job in todo]) == {}


def test_on_cuda_every_op_runs_as_planned(named: Callable[[str], str]) -> None:
    """What two policies have in common is called under the first: fake tensors take their time."""
    todo: dict[Job, Job] = {}
    for policy in POLICIES:
        for job in jobs(named(policy), "cuda", "float16"):
            todo.setdefault(replace(job, policy=""), job)
    assert len(todo) > 2000
    assert wrong(list(todo.values()), in_children(list(todo.values()))) == {}
