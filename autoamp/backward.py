"""Scaled backward: inside torch gradients carry the scale, inside user code they never do.

The scale enters with the seed gradient; before the engine's caller gets control back, also on an
exception, the gradients of every reached leaf are checked and unscaled in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .graphs import AccumulateGrad, executed, nodes_of
from .passes import Pass, UserCode, current
from .ranks import beyond, collectives, has_ranks
from .region import is_functionalizing
from .repeating import Accumulation, Call, Differentiation, checks_nan, unscaled, until_finite
from .scaling import any_of
from .session import Session
from .unskippable import Limit, Owners, Unheeded

_HALF_SEED_LIMIT = 32768.0
"""The largest power of two that float16 holds: a seed for a half root cannot be larger."""

_NOTHING = contextlib.nullcontext()


def engine_run_backward(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """What `torch.autograd.backward` and `grad` come down to, with their arguments in order."""
    engine = _Engine(session)

    def _engine_run_backward(
        roots: Any,
        seeds: Any,
        retain_graph: bool,
        create_graph: bool,
        inputs: Any,
        allow_unreachable: bool,
        accumulate_grad: bool,
    ) -> Any:
        def run(seeds: Any, retain_graph: bool) -> Any:
            audit = session.audit
            start = original if audit is None or not audit.is_open else audit.backward(original)
            return start(
                roots,
                seeds,
                retain_graph,
                create_graph,
                inputs,
                allow_unreachable,
                accumulate_grad=accumulate_grad,
            )

        around = current()
        try:
            return run_mixed(run, roots, seeds, retain_graph, inputs, accumulate_grad, around)
        except Exception as error:
            is_plain_backward = accumulate_grad and around is None and session.active
            if not is_plain_backward or not session.islands.fallback.gives_up_backward(error):
                raise
        for leaf in _leaves(session, roots, inputs):
            leaf.grad = None
        return None

    def run_mixed(
        run: Callable[[Any, bool], Any],
        roots: Any,
        seeds: Any,
        retain_graph: bool,
        inputs: Any,
        accumulate_grad: bool,
        around: Any,
    ) -> Any:
        in_region = getattr(session.local, "region", None) is not None
        from_user = isinstance(around, UserCode)
        with _autocast_off(session) if in_region or from_user else _NOTHING:
            if not session.active or _is_foreign():
                return run(seeds, retain_graph)
            call = Call(run, roots, seeds, inputs, retain_graph, around)
            return engine.run(call, accumulate_grad)

    return _engine_run_backward


class _Engine:
    """The runs of one session: scaled, and again at half the scale where nobody can skip."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.owners = Owners(session)
        self.unheeded = Unheeded(session, self.owners)
        self.limit_of_leaves = Limit(session.loss_scale.rule)
        self.limit_of_results = Limit(session.loss_scale.rule)

    def run(self, call: Call, accumulates: bool) -> Any:
        """`backward`, which accumulates, or `torch.autograd.grad`."""
        session, around = self.session, call.around
        if not session.scales:
            if not accumulates or around is not None or not session.agreement.is_awaited():
                return call.run(call.seeds, call.retain_graph)
            session.agreement.before_backward(_leaves(session, call.roots, call.inputs))
            call.run(call.seeds, call.retain_graph)
            return session.agreement.after_backward()
        if isinstance(around, Pass):  # by torch itself: a reentrant checkpoint
            if accumulates:
                around.take(_leaves(session, call.roots, call.inputs))
            return call.run(call.seeds, call.retain_graph)
        return self.accumulate(call) if accumulates else self.differentiate(call)

    def accumulate(self, call: Call) -> None:
        """`backward`: gradients are added to the ``.grad`` of leaves."""
        agreement = self.session.agreement
        if call.around is None:
            self.unheeded.look_back()
        self.session.spoilt.forget_cleared()
        leaves = _leaves(self.session, call.roots, call.inputs)
        if call.around is None and agreement.is_awaited():
            agreement.before_backward(leaves)
            if not self.session.scales:  # not all ranks scale
                call.run(call.seeds, call.retain_graph)
                return
        scale = self._scale(call)
        if agreement.is_apart(leaves):
            scale = agreement.limit.below(scale)
        strangers = self.owners.strangers(leaves) if not has_ranks() else []
        for_all = checks_nan() or self._is_early()
        nodes = call.nodes_to_keep() if strangers or for_all else None
        mark = self.session.backwards.count
        if nodes is None:
            running = self._pass(call, scale)
            try:
                call.attempt(running, leaves, call.retain_graph)
            finally:
                self._record(call, running, leaves, mark)
            agreement.after_backward()
            return
        is_alone = len(strangers) == len(leaves)
        limit = self.limit_of_leaves
        running = self._pass(call, limit.below(scale) if is_alone else scale, may_repeat=True)
        run = Accumulation(call, self.owners, running, for_all)
        try:
            until_finite(run, leaves, nodes)
            if for_all and run.fell_to is not None:  # no gate will see that
                self.unheeded.lower_to(run.fell_to)
            elif is_alone and not run.kept:
                limit.note(run.fell_to)
        finally:
            run.finish()
            self._record(call, run.recorded, leaves, mark)

    def differentiate(self, call: Call) -> Any:
        """`torch.autograd.grad`: gradients are returned."""
        limit, nodes = self.limit_of_results, call.nodes_to_keep()
        retained = _retained(self.session, call.roots)
        running = self._pass(call, limit.below(self._scale(call)), may_repeat=True)
        if nodes is None:
            grads = call.attempt(running, retained, call.retain_graph)
        else:
            run = Differentiation(call, running)
            grads = until_finite(run, retained, nodes)
            running = run.running
            limit.note(run.fell_to)
        return tuple(unscaled(grad, running.inverse) for grad in grads)

    def _is_early(self) -> bool:
        """Whether this is one of the first steps, on the way to a scale that holds."""
        scale = self.session.loss_scale
        first = 0 if scale.was_loaded or scale.rule.mode != "dynamic" else scale.rule.repeat_first
        return first > 0 and self.session.modules.steps() < first

    def _scale(self, call: Call) -> torch.Tensor:
        tensors = [root for root in call.roots if isinstance(root, torch.Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        outer = call.outer
        scale = self.session.loss_scale.current(device) if outer is None else outer.scale
        if any(tensor.dtype is torch.float16 for tensor in tensors):
            return scale.clamp(max=_HALF_SEED_LIMIT)
        return scale

    def _pass(self, call: Call, scale: torch.Tensor, may_repeat: bool = False) -> Pass:
        return Pass(scale, self.session.loss_scale.inverse(scale), call.outer, may_repeat)

    def _record(self, call: Call, running: Pass, leaves: list[torch.Tensor], mark: int) -> None:
        """Leave to the gates what they have to know."""
        if running.flags:
            backward = running.scale, any_of(running.flags)
            self.session.backwards.append(backward)
            self.session.backwards.collectives = collectives()
            self.session.spoilt.note(leaves, backward[1])
            if call.around is None:
                self.unheeded.note(leaves, mark, backward)


def _leaves(session: Session, roots: Any, inputs: Any) -> list[torch.Tensor]:
    """The tensors into whose ``.grad`` the engine will accumulate."""
    if inputs:
        nodes = [edge.node for edge in inputs if not isinstance(edge, torch.Tensor)]
        return [
            *(tensor for tensor in inputs if isinstance(tensor, torch.Tensor)),
            *(node.variable for node in nodes if type(node) is AccumulateGrad),
            *_retained(session, roots),
        ]
    stack = nodes_of(roots)
    leaves = [node.variable for node in stack if type(node) is AccumulateGrad]
    seen = set(stack)
    while stack:  # a fifth of a millisecond for 500 nodes: nothing in here that need not be
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                if type(node) is AccumulateGrad:
                    leaves.append(node.variable)
                else:
                    stack.append(node)
    leaves += beyond(leaves, seen)
    leaves += [tensor for tensor in session.retained() if tensor.grad_fn in seen]
    return leaves


def _retained(session: Session, roots: Any) -> list[torch.Tensor]:
    """The tensors that keep their gradient although they are no leaves, where there are any."""
    retained = list(session.retained())
    reached = executed(roots, ()) if retained else ()
    return [tensor for tensor in retained if tensor.grad_fn in reached]


def _is_foreign() -> bool:
    """Whether this run is not the script's own: compilers, CUDA graph capture."""
    return (
        torch.compiler.is_compiling()
        or (torch._C._len_torch_dispatch_stack() > 0 and is_functionalizing())
        or (_cuda_is_up() and torch.cuda.is_current_stream_capturing())
    )


_cuda_is_up: Callable[[], bool] = torch.cuda.is_initialized


def half_devices(session: Session) -> list[str]:
    """The types of device that have regions."""
    return [name for name, decision in session.decisions.items() if decision.dtype is not None]


@contextlib.contextmanager
def _autocast_off(session: Session) -> Iterator[None]:
    """A backward runs without autocast, also inside an open region, and called by user code in one.

    Where there is a training loop in a module, weights are about to change: casts made so far are
    dropped, and the rest of that region makes fresh ones.
    """
    local = session.local
    enabled = [name for name in half_devices(session) if torch.is_autocast_enabled(name)]
    if local.region is not None and not _is_foreign():
        local.forget_casts()
        # An island in another precision has it switched off, and would switch it on behind it.
        if torch.is_autocast_cache_enabled() or local.precision not in ("", "lower"):
            torch.set_autocast_cache_enabled(False)
            local.uncached = True  # the region that ends puts it back
    for name in enabled:
        torch.set_autocast_enabled(name, False)
    try:
        yield
    finally:
        for name in enabled:
            torch.set_autocast_enabled(name, True)
