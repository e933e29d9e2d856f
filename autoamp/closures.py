"""A closure runs its backward inside the step: where that overflows, it runs again in float32."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch

from . import overflow
from .ranks import anywhere, groups_of, local_values
from .region import exempted
from .scaling import any_of, check
from .session import Session


class Skip(BaseException):
    """Ends a step whose closure shows that there is nothing to step with, before it has begun.

    No error, and for nobody but the gate to catch.
    """

    def __init__(self, loss: Any, ran_with: torch.Tensor) -> None:
        self.loss = loss
        self.ran_with = ran_with


class Evaluations:
    """The closure of one step, as the optimizer calls it: once, or many times.

    After an overflow all that the step still asks of it is float32: a line search compares values.
    What is not finite in float32 either is no fault of the loss scale, and the script's own affair.

    `ran_with` holds the scale of each evaluation with a backward, `overflows` that of one to blame.
    """

    def __init__(
        self,
        closure: Callable[[], Any],
        optimizer: torch.optim.Optimizer,
        session: Session,
        seen: int,
    ) -> None:
        self.closure = closure
        self.optimizer = optimizer
        self.backwards = session.backwards
        self.spoilt = session.spoilt
        self.seen = seen
        self.ran_with: list[torch.Tensor] = []
        self.overflows: list[torch.Tensor] = []

    def evaluate(self) -> Any:
        """The loss, and gradients that are finite if they are so in float32.

        Raises:
            Skip: gradients from before the step overflowed, and the closure has kept them.
        """
        if self.overflows:
            return self._in_float32()
        before, mark = _Before(self.optimizer), self.backwards.count
        loss = self.closure()
        # It may add to gradients from before the step, or only report their loss.
        backwards = self.backwards.since(mark if self.ran_with else self.seen)
        if backwards and overflow.concerns(self.optimizer, backwards, self.spoilt):
            scale = overflow.scale_of(backwards)
            if self.backwards.count > mark:
                before.restore()
                loss = self._in_float32()
            if not overflow.in_gradients(self.optimizer).item():
                self.overflows.append(scale)
            elif not self.ran_with and not before.is_finite():
                raise Skip(loss, scale)
        if backwards:
            self.ran_with.append(backwards[-1][0])
        return loss

    def _in_float32(self) -> Any:
        with exempted():
            return self.closure()


class _Before:
    """What a closure finds, to be found again: gradients and the state of random generators."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._random = _random_state()
        self._gradients = [
            (p, *((None, None) if p.grad is None else (ref(p.grad), p.grad.detach().clone())))
            for group in optimizer.param_groups
            for p in group["params"]
        ]

    def restore(self) -> None:
        """Put it back. A gradient that is still there keeps its identity: it may be a view."""
        for put_back, state in self._random:
            put_back(state)
        for parameter, place, values in self._gradients:
            if place is not None and parameter.grad is not None and parameter.grad is place():
                parameter.grad.data.copy_(values)
            else:
                parameter.grad = values

    def is_finite(self) -> bool:
        """Whether all those gradients were finite, on all ranks that share the parameters."""
        values = local_values([values for _, _, values in self._gradients if values is not None])
        is_spoilt = bool(values) and bool(any_of(check(values)).item())
        return not anywhere(is_spoilt, groups_of(p for p, _, _ in self._gradients))


_cuda_is_up: Callable[[], bool] = torch.cuda.is_initialized


def _random_state() -> list[tuple[Callable[[Any], object], Any]]:
    """How to set each generator that a closure may draw from, and to what."""
    state: list[tuple[Callable[[Any], object], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
    ]
    if _cuda_is_up():
        state.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        state.append((numpy.set_state, numpy.get_state()))
    return state
