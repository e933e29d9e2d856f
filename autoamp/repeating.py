"""Runs of the engine that are made again at half the scale: overflow where nobody can skip.

The graph is kept for as long as that takes. Leaves before which a gate stands are left to it.
"""

from __future__ import annotations

import abc
import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .graphs import COMPILED, executed, let_go
from .passes import Found, Pass, UserCode, found, run_in
from .ranks import has_ranks
from .scaling import any_of, check, inverse_of
from .unskippable import Owners


class Call(NamedTuple):
    """One call of the engine by the script; `around` is the user code that it comes from, if any.

    `run` takes seeds, and whether to keep the graph.
    """

    run: Callable[[Any, bool], Any]
    roots: Any
    seeds: Any
    inputs: Any
    retain_graph: bool
    around: UserCode | Pass | None

    @property
    def outer(self) -> Pass | None:
        """The pass in the middle of which this one is."""
        return None if self.around is None else self.around.outer

    def attempt(self, running: Pass, leaves: list[torch.Tensor], keep: bool) -> Any:
        """Run the engine; whatever happens, nothing stays scaled."""
        try:
            running.take(leaves)
            return run_in(running, self.run, running.to_scaled(self.seeds), keep)
        finally:
            running.settle()

    def nodes_to_keep(self) -> set[Any] | None:
        """What has to be kept so that the engine can run again, None where it cannot or need not.

        Inside another backward an overflow is seen by that one. What torch.compile makes gives its
        memory away. Ranks that wait for each other in the middle of a backward (synchronised norms,
        sharded parameters) would wait for ever.
        """
        if self.around is not None or has_ranks():
            return None
        if self.retain_graph:
            return set()
        nodes = executed(self.roots, self.inputs)
        return None if any(type(node).__name__ == COMPILED for node in nodes) else nodes


class _Run(abc.ABC):
    """A call that is made again at half the scale until it `is_done`; `running` is the last pass.

    `fell_to`: the scale that it took, None if it was done at once, or never.
    """

    def __init__(self, call: Call, running: Pass) -> None:
        self.call = call
        self.running = running
        self.fell_to: float | None = None

    @abc.abstractmethod
    def is_done(self, result: Any) -> bool:
        """Whether what the script will see is finite. Waits for the device."""


class Differentiation(_Run):
    """A run of `torch.autograd.grad`: what it returns has to be finite."""

    def is_done(self, result: Any) -> bool:
        """Whether the gradients can be handed out."""
        grads = [_without_layers(grad) for grad in result if grad is not None]
        return _are_finite(grads) or _are_hopeless(self.call.roots)


class Accumulation(_Run):
    """A run of `backward` that reaches leaves before which no gate stands.

    After an overflow those get what a run at a lower scale gives. The leaves of optimizers keep
    what the first run gave, as by hand: their gates skip the step. Under anomaly detection they are
    treated as the others: by hand it would end the program. So they are `for_all`.
    """

    def __init__(self, call: Call, owners: Owners, running: Pass, for_all: bool) -> None:
        super().__init__(call, running)
        self.owners = owners
        self.for_all = for_all
        self.recorded = running
        self.kept: list[Found] = []
        self._strangers: list[torch.Tensor] | None = None

    def is_done(self, result: Any) -> bool:
        """Whether all is finite that nobody would skip."""
        if not self.kept:
            self.recorded = self.running
        if not self.running.overflowed():
            return True
        if self._strangers is None:
            reached = [one.tensor for one in self.running.before or ()]
            if self.for_all:
                self._strangers = reached
            else:
                self.owners.look()
                self._strangers = self.owners.strangers(reached)
            if self._is_finite() or _are_hopeless(self.call.roots):
                return True
            strangers = set(map(id, self._strangers))
            self.kept = [found(tensor) for tensor in reached if id(tensor) not in strangers]
        return self._is_finite()

    def _is_finite(self) -> bool:
        return _are_finite(
            [tensor.grad for tensor in self._strangers or () if tensor.grad is not None]
        )

    def finish(self) -> None:
        """Give the leaves of optimizers the gradients of the first run."""
        for one in self.kept:
            one.put_back()


def until_finite(run: _Run, leaves: list[torch.Tensor], nodes: set[Any]) -> Any:
    """Run the engine, again at half the scale until the run is done or at 1; then let go of it.

    NaN that anomaly detection finds is no error before the scale is at 1, nor worth a warning.
    """
    first = run.running
    while True:
        result, is_done = None, False
        try:
            with _quietly_unless_last(run.running):
                result = run.call.attempt(run.running, leaves, True)
            is_done = run.is_done(result)
        except RuntimeError as error:
            if not _is_anomaly(error) or not _may_fall(run.running):
                raise
        if is_done or not _may_fall(run.running):
            break
        for one in reversed(run.running.before or []):
            one.put_back()
        scale = run.running.scale / 2
        run.running = Pass(scale, inverse_of(scale), first.outer, may_repeat=True)
    if is_done and run.running is not first:
        run.fell_to = float(run.running.scale)
    if not run.call.retain_graph:
        let_go(nodes)
    return result


def _are_finite(tensors: list[torch.Tensor]) -> bool:
    flags = check(tensors)
    return not flags or not any_of(flags).item()


def _may_fall(running: Pass) -> bool:
    return not running.is_heard and float(running.scale) > 1.0


def _are_hopeless(roots: Any) -> bool:
    """Whether there is nothing finite to differentiate: no scale is to blame."""
    tensors = [root for root in roots if isinstance(root, torch.Tensor)]
    return bool(tensors) and not any(
        _without_layers(tensor).detach().isfinite().any().item() for tensor in tensors
    )


def checks_nan() -> bool:
    """Whether anomaly detection is on, and ends a backward that meets NaN."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def _is_anomaly(error: RuntimeError) -> bool:
    return checks_nan() and "returned nan values in its" in str(error)


@contextlib.contextmanager
def _quietly_unless_last(running: Pass) -> Iterator[None]:
    if not checks_nan() or not _may_fall(running):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Error detected in ")
        yield


def unscaled(grad: torch.Tensor | None, inverse: torch.Tensor) -> torch.Tensor | None:
    """A gradient that is handed out, in the dtype that it has."""
    if grad is None:
        return None
    return (grad * inverse.to(grad.device, non_blocking=True)).to(grad.dtype)


def _without_layers(tensor: torch.Tensor) -> torch.Tensor:
    """What lies under the layers of `torch.func` and of ``is_grads_batched``: all values."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    if functorch.is_legacy_batchedtensor(tensor):
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        while functorch.is_legacy_batchedtensor(tensor):
            tensor, level = torch._remove_batch_dim(tensor, level, 1, 0), level - 1
    return tensor
