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
from .samples import OVERLOADS_WITHOUT, WITHOUT, Sample, samples

Mixed = Callable[..., Any]
POLICIES = sorted(path.stem for path in (Path(__file__).parents[2] / "policies").glob("*.yaml"))
GIVEN = {
    # by list, the dtypes of the operands in turn, the last one for the rest
    **dict.fromkeys(("", LOWER, FLOAT32), (("float32",), ("lower",))),
    WIDEST: (("float32",), ("lower",), ("float32", "lower"), ("lower", "float32")),
}
GIVEN_TO_NORMS = (("float32",), ("lower", "float32"))
MADE_OF = {f"conv{n}d.padding": f"conv{n}d" for n in (1, 2, 3)}
"""Ops in no list that run as another op does, which they call."""
NOT_AS_GIVEN = {"cross_entropy_loss": "in no list, it calls ops of the float32 list"}

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
    for name, row in planned.items():
        sample = by_overload().get(name)
        if sample is None or name in NOT_AS_GIVEN or row.category == REFUSED:
            continue
        row = planned[MADE_OF.get(name, name)]
        for given in GIVEN[row.category] if name not in ONLY_THE_INPUT else GIVEN_TO_NORMS:
            job = Job(
                device, lower, sample, given, policy, cast_to(row, job_operands(sample, given))
            )
            if row.category == LOWER and loaded.lower_operands == "parameter":
                yield replace(job, cast=FLOAT32)
                job = replace(job, parameter=True)
            if job.cast == LOWER and loaded.lower_results == "float32":
                job = replace(job, results=FLOAT32)
            yield job


def cast_to(row: Row, operands: set[str]) -> str:
    """The precision that the plan gives a call, from those of its operands."""
    if row.category == WIDEST:
        return LOWER if operands == {LOWER} else FLOAT32
    return row.category


def job_operands(sample: Sample, given: tuple[str, ...]) -> set[str]:
    return set(given[: len(sample.operands)])


def wrong(todo: list[Job], seen: list[Compared]) -> dict[Any, Compared]:
    """The calls that did not run as planned."""
    return {
        (job.policy, job.lower, job.sample.overload, job.given, job.cast): one
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


@pytest.mark.parametrize(("policy", "lower"), CASES)
def test_on_the_cpu_every_op_runs_as_planned(
    mixed: Mixed, named: Callable[[str], str], policy: str, lower: str
) -> None:
    mixed(named(policy), lower)
    todo = list(jobs(named(policy), "cpu", lower))
    assert len(todo) > 200
    assert wrong(todo, [compare(job) for job in todo]) == {}


def test_on_cuda_every_op_runs_as_planned(named: Callable[[str], str]) -> None:
    todo = [job for policy, lower in CASES for job in jobs(named(policy), "cuda", lower)]
    assert len(todo) > 200 * len(CASES)
    assert wrong(todo, in_children(todo)) == {}
