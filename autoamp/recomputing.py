"""Checkpoints outside of regions: what opened regions in the forward opens them again.

torch runs a checkpointed function once more inside the backward, under the autocast state in which
`checkpoint` was called. In a region that is all it needs. Outside, the modules and ops that the
function calls have opened regions of their own, and no region opens in a backward but here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._compile import _disable_dynamo

from .kernels import nesting
from .region import enter_nesting, leave_nesting
from .session import Session

_current_graph_task_id = torch._C._current_graph_task_id


def checkpoint(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`torch.utils.checkpoint.checkpoint`: called outside of a region, it remembers that."""

    @_disable_dynamo  # as torch's own is
    def eagerly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if session.active and _regions_may_open(session):
            function = _the_same_again(function, session)
        return original(function, *args, **kwargs)

    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        return eagerly(*args, **kwargs)

    return checkpoint


def _the_same_again(function: Callable[..., Any], session: Session) -> Callable[..., Any]:
    has_run, local = False, session.local

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        if has_run:
            with _outside_of_regions(session):
                return function(*args, **kwargs)
        has_run, before, local.repeats = True, local.repeats, True
        try:
            return function(*args, **kwargs)
        finally:
            local.repeats = before

    return run


def _regions_may_open(session: Session) -> bool:
    local = session.local
    return (
        nesting() == 0 and not local.stands and (local.recomputes or _current_graph_task_id() == -1)
    )


@contextlib.contextmanager
def _outside_of_regions(session: Session) -> Iterator[None]:
    """As where `checkpoint` was called: torch's contexts for the state of then do not count."""
    of_thread = vars(session.local)
    before = dict(of_thread)
    depth = nesting()
    for _ in range(depth):
        leave_nesting()
    of_thread.clear()
    of_thread.update(casts={}, recomputes=True, repeats=True)
    try:
        yield
    finally:
        of_thread.clear()
        of_thread.update(before)
        for _ in range(depth):
            enter_nesting()
