"""Calls looked at on any device and under any policy; those on fake CUDA in processes of their own.

Fake tensors know no kernels: a call that reaches for one can end the process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import autoamp

from .observe import HALVES, Observation, autocast, counted, in_region, observe, on, tensors_on
from .samples import Sample, tensors

PREFIX = "AUTO_MIXED_PRECISION"
ONLY_THE_INPUT = ("batch_norm", "instance_norm")
"""Norms that are cast nothing but their input: what they write into their statistics stays."""
LIMITS_OF_FAKES = ("PyTorch is not linked with support for cuda", "Torch not compiled with CUDA")
CASTABLE = (torch.float32, *HALVES.values())


@dataclass(frozen=True)
class Job:
    """One call: operands in the dtypes that `given` names ("float32", "lower") in turn, the last
    one for the rest; in a region of `policy`, or under torch's own autocast where that is empty.

    `cast` names what the policy casts operands to ("" for nothing), and `results` what it casts
    results to. With `parameter` the last operand is a parameter.
    """

    device: str
    lower: str
    sample: Sample
    given: tuple[str, ...]
    policy: str = ""
    cast: str = ""
    results: str = ""
    parameter: bool = False


@dataclass(frozen=True)
class Seen:
    """`Observation` in words: "float32", "lower" or another dtype."""

    compute: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Compared:
    """A call in a region, and the same with operands cast by hand outside.

    `same`: the results are equal, bit for bit. `kept`: what the call writes into has the dtype that
    it had, and is what was returned, where torch returns it.
    """

    ours: Seen
    by_hand: Seen
    same: bool = True
    kept: bool = True

    @property
    def agrees(self) -> bool:
        """Whether all is as it was by hand; an error may be another one.

        Where fake tensors cannot go on for want of a CUDA build, what came before counts.
        """
        if any(limit in self.ours.error for limit in LIMITS_OF_FAKES):
            return self.ours.compute == self.by_hand.compute
        one = replace(self.ours, error=bool(self.ours.error))
        return one == replace(self.by_hand, error=bool(self.by_hand.error)) and (
            bool(one.error) or (self.same and self.kept)
        )


def look(job: Job) -> Seen:
    """Make the call under torch's own autocast."""
    sample = _given(job)
    with autocast(job.device, HALVES[job.lower]):
        return _in_words(job, observe(sample.call))


def compare(job: Job) -> Compared:
    """Make the call in a region, in this process, where the policy is active, and by hand."""
    sample = _given(job)
    into = sample.written
    before = [tensor.dtype for tensor in into]
    torch.manual_seed(0)
    ours = in_region(job.device, lambda: observe(sample.call))
    cast = _cast(job, _given(job))
    torch.manual_seed(0)
    by_hand = observe(cast.call)
    kept = [tensor.dtype for tensor in into] == before and (
        _returns(ours, into) or not _returns(by_hand, cast.written)
    )
    outputs = by_hand.outputs
    if into and not by_hand.error:  # the destination keeps its dtype, whatever was computed in
        outputs = counted(before)
    elif job.results:
        outputs = tuple(_dtypes(job)[job.results] for _ in outputs)
    expected = _in_words(job, replace(by_hand, outputs=outputs))
    same = job.device != "cpu" or _equal(tensors(ours.result), tensors(by_hand.result))
    return Compared(_in_words(job, ours), expected, same, kept)


def _returns(seen: Observation, into: list[torch.Tensor]) -> bool:
    results = tensors(seen.result)
    return all(result is tensor for result, tensor in zip(results, into, strict=False))


def _dtypes(job: Job) -> dict[str, torch.dtype]:
    return {"float32": torch.float32, "lower": HALVES[job.lower]}


def _given(job: Job) -> Sample:
    """The call with tensors of the job's own."""
    sample = on(job.device, job.sample, *(_dtypes(job)[word] for word in job.given))
    if not job.parameter:
        return sample
    last = sample.operands[-1]
    parameter = torch.nn.Parameter(last, requires_grad=False)
    return sample.changed(lambda tensor: parameter if tensor is last else tensor)


def _cast(job: Job, sample: Sample) -> Sample:
    """The call with operands cast by hand."""
    if not job.cast:
        return sample
    dtype = _dtypes(job)[job.cast]
    kept = tensors(sample.args[1:]) if job.sample.overload in ONLY_THE_INPUT else []

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        is_cast = tensor.dtype in CASTABLE and all(tensor is not other for other in kept)
        return tensor.to(dtype) if is_cast else tensor

    return sample.changed(cast)


def _in_words(job: Job, seen: Observation) -> Seen:
    words = {dtype: word for word, dtype in _dtypes(job).items()}
    return Seen(
        tuple(sorted(words[dtype] for dtype in seen.compute)),
        tuple(words[dtype] for dtype in seen.outputs),
        seen.error,
    )


def _equal(results: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    try:
        for one, other in zip(results, expected, strict=True):
            torch.testing.assert_close(one, other.to(one.dtype), rtol=0, atol=0, equal_nan=True)
    except (AssertionError, ValueError):
        return False
    return True


def in_children(jobs: Sequence[Job]) -> list[Any]:
    """`compare` the jobs that have a policy, `look` at the others, in processes of their own.

    A job that ends its process has that as its error, and another process goes on after it.
    """
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        todo, done = Path(folder) / "todo", Path(folder) / "done"
        while len(found) < len(jobs):
            todo.write_bytes(pickle.dumps(jobs[len(found) :]))
            done.write_bytes(b"")
            child = subprocess.run(
                [sys.executable, "-c", f"from {__name__} import work; work()", todo, done],
                env={**_environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
                capture_output=True,
                text=True,
                check=False,
            )
            found += _read(done)
            if len(found) < len(jobs):
                assert child.returncode < 0, child.stderr  # ended by a signal, not by our mistake
                ended = Seen(error=f"signal {-child.returncode}: {child.stderr[-200:]}")
                found.append(Compared(ended, Seen()) if jobs[len(found)].policy else ended)
    return found


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
    return {**kept, "OMP_NUM_THREADS": "1"}


def _read(path: Path) -> list[Any]:
    found = []
    with path.open("rb") as file, contextlib.suppress(EOFError):
        while True:
            found.append(pickle.load(file))
    return found


def work() -> None:
    """What such a process does."""
    todo, done = sys.argv[1:]
    jobs: list[Job] = pickle.loads(Path(todo).read_bytes())
    active = ("", "")
    with open(done, "ab", buffering=0) as file, tensors_on(jobs[0].device):
        for job in jobs:
            if active != (job.policy, job.lower):
                active = job.policy, job.lower
                autoamp.disable()
                os.environ[f"{PREFIX}_DTYPE"] = job.lower
                if job.policy:
                    autoamp.enable(job.policy)
            file.write(pickle.dumps(compare(job) if job.policy else look(job)))
