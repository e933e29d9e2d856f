"""May the optimizer move? A step whose gradients are not finite is skipped.

The gate stands at class level, outside torch's own step wrapper and inside the schedulers' one: a
skipped step runs no step hooks, touches neither parameters nor state, and no scheduler warns.
"""

from __future__ import annotations

import functools
import gc
import inspect
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch._compile import _disable_dynamo

from . import hooks, overflow, passes
from .closures import Evaluations, Skip
from .ranks import collectives, least
from .region import is_compiling
from .scaling import any_of
from .session import Backward, Session

_READ_BY_KERNELS = ("grad_scale", "found_inf")
"""Attributes of an optimizer that fused kernels look for; a script may have set the first."""


def _unknown() -> object:
    return ...


_frame_callback: Callable[[], object] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", _unknown
)


def dynamo_is_off() -> bool:
    """Whether frames called from here are certain not to be compiled."""
    return _frame_callback() is None


class Outcome(NamedTuple):
    """How a gated step ended: what `LossScale.update` wants to know of it."""

    found_inf: torch.Tensor | bool
    ran_with: torch.Tensor
    skipped: torch.Tensor | bool


class _OpenGates(threading.local):
    """Per thread: the optimizers whose gates are open, and how steps inside of others ended."""

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self.inner: list[Outcome] = []


class Gates:
    """The gates of one session, and what each optimizer has seen of its backwards."""

    def __init__(self, session: Session) -> None:
        self.session = session
        session.loss_scale.say = session.speech.notice
        self._holds = session.policy.loss_scale.hold_schedulers
        self._has_rules = bool(session.policy.modules)  # they may begin and end with steps
        self._seen: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._skipped: WeakKeyDictionary[torch.optim.Optimizer, torch.Tensor | bool]
        self._skipped = WeakKeyDictionary()  # the last step of each, the latest last
        self._fused: WeakKeyDictionary[Callable[..., Any], bool] = WeakKeyDictionary()
        self._local = _OpenGates()
        # Dynamo would trace into it. Nothing is loaded for this: making an optimizer loads Dynamo.
        self._eagerly = _disable_dynamo(functools.partial(self._pass_through))

    def gated(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """`step` of an optimizer class behind a gate; in ``super().step()`` only the outer acts."""

        session, local, fusing = self.session, self._local, self.session.fusing

        @functools.wraps(step)
        def gate(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() and not session.may_scale:
                return step(optimizer, *args, **kwargs)
            if not session.active or id(optimizer) in local.ids:
                return step(optimizer, *args, **kwargs)
            if fusing.is_on and not is_compiling():
                with fusing.step(optimizer):
                    return once(optimizer, args, kwargs)
            return once(optimizer, args, kwargs)

        def once(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            try:
                local.ids.add(id(optimizer))
                if session.may_scale:
                    run = self._pass_through if dynamo_is_off() else self._eagerly
                    return run(step, optimizer, args, kwargs)
                result = step(optimizer, *args, **kwargs)
                session.counts.steps += len(local.ids) == 1
                if self._has_rules:
                    session.modules.step_ended()
                return result
            finally:
                local.ids.discard(id(optimizer))
                self._leave(optimizer)

        vars(gate)["__autoamp_gate__"] = step
        return gate

    def _leave(self, optimizer: torch.optim.Optimizer) -> None:
        """A step is over, taken or not: weights may have changed, in an open region even."""
        session = self.session
        if not self._local.ids:
            self._local.inner.clear()
            if session.watch is not None:
                session.watch.step_ended(optimizer)
        session.weights.end_evaluation()
        if session.local.region is not None:
            session.local.forget_casts()

    def stepped(self) -> dict[torch.optim.Optimizer, int]:
        """The optimizers that have stepped, and how many backwards there had been by then."""
        return dict(self._seen.items())

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether its last step was skipped; where only the device knows, the host waits for it.

        A wrapper around an optimizer shares its parameter groups: the last step of either counts.
        """
        groups = {id(group) for group in optimizer.param_groups}
        for other, skipped in reversed(list(self._skipped.items())):
            if any(id(group) in groups for group in other.param_groups):
                answer = self._skipped[other] = bool(skipped)
                return answer
        return False

    def _pass_through(
        self,
        step: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        around = passes.current()
        if isinstance(around, passes.Pass):
            again = functools.partial(self._pass_through, step, optimizer, args, kwargs)
            owned = overflow.parameters(optimizer)
            return hooks.step_in_backward(self.session, around, owned, again)
        closure = args[0] if args else kwargs.get("closure")
        may_scale = self.session.scales or not self.session.decisions  # before the first region
        if may_scale and callable(closure):
            result, outcome = self._step_with_closure(step, optimizer, closure, args, kwargs)
        else:
            result, outcome = self._step(step, optimizer, args, kwargs)
        self._end(optimizer, outcome)
        if self._has_rules:
            self.session.modules.step_ended()
        return result

    def _step(
        self,
        step: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Outcome | None]:
        session, count = self.session, self.session.backwards.count
        backwards = session.backwards.since(self._seen.get(optimizer, 0)) if session.scales else []
        is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        is_fused = is_fused and self._reads_flag(step)
        is_spoilt, shared = False, []
        if session.scales and session.backwards.count:
            shared = overflow.shared_by(optimizer)
            session.agreement.before_step(optimizer, shared)
            if not is_fused:
                is_spoilt = session.spoilt.owned_by(optimizer)
            elif not backwards:
                is_spoilt = session.spoilt.flag_for(optimizer) is not False
        if not backwards and not is_spoilt and not shared:
            return step(optimizer, *args, **kwargs), None
        # What a script exchanges between backward and step may be gradients: those of other ranks.
        is_exchanged = bool(backwards) and session.backwards.collectives != collectives()
        if is_fused:
            result, outcome = self._step_fused(step, optimizer, backwards, args, kwargs)
        elif overflow.concerns(optimizer, backwards, session.spoilt, is_spoilt, is_exchanged):
            scale = overflow.scale_of(backwards) if backwards else session.backwards.last_scale
            result, outcome = None, Outcome(True, least(scale, shared), True)
        elif not backwards:
            return step(optimizer, *args, **kwargs), None
        else:
            result = step(optimizer, *args, **kwargs)
            outcome = Outcome(False, backwards[-1][0], False)
        self._seen[optimizer] = count  # not before: a step that raises may be tried again
        return result, outcome

    def _end(self, optimizer: torch.optim.Optimizer, outcome: Outcome | None) -> None:
        """Tell the loss scale, once for all steps inside of this one and itself (wrappers, SAM)."""
        local, is_inner = self._local, len(self._local.ids) > 1
        if local.inner and not is_inner:
            outcomes, local.inner = [*local.inner, *([outcome] if outcome else [])], []
            outcome = _all_in_one(outcomes)
        if self._holds:
            self._skipped.pop(optimizer, None)
            self._skipped[optimizer] = outcome.skipped if outcome else False
        if is_inner:
            local.inner += [outcome] if outcome else []
        elif outcome is None:
            self.session.counts.steps += 1
        elif self.session.agreement.is_apart(overflow.parameters(optimizer)):
            self.session.agreement.note(outcome.found_inf, outcome.ran_with)
            self.session.loss_scale.update(*outcome, may_move=False)
        else:
            self.session.loss_scale.update(*outcome)

    def _reads_flag(self, step: Callable[..., Any]) -> bool:
        """Whether a fused step looks for ``found_inf``, and does not ask for a `GradScaler`."""
        if step not in self._fused:
            self._fused[step] = "grad_scaler" not in inspect.signature(step).parameters
        return self._fused[step]

    def _step_fused(
        self,
        step: Callable[..., Any],
        optimizer: Any,
        backwards: list[Backward],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Outcome]:
        """Fused kernels skip by themselves, on the device: they read a flag, and nobody waits."""
        found_inf = overflow.in_gradients(optimizer, self.session.spoilt.flag_for(optimizer))
        found_inf = found_inf.clamp(max=1.0)  # kernels compare with one; flags were added up
        if _first_step_needs_the_host(optimizer):
            result = None if found_inf.item() else step(optimizer, *args, **kwargs)
        else:
            own = {key: vars(optimizer)[key] for key in _READ_BY_KERNELS if key in vars(optimizer)}
            optimizer.grad_scale, optimizer.found_inf = own.get("grad_scale"), found_inf
            try:
                result = step(optimizer, *args, **kwargs)
            finally:
                del optimizer.grad_scale, optimizer.found_inf
                vars(optimizer).update(own)
        ran_with = backwards[-1][0] if backwards else self.session.backwards.last_scale
        return result, Outcome(found_inf, ran_with, found_inf)

    def _step_with_closure(
        self,
        step: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Outcome | None]:
        session = self.session
        evaluations = Evaluations(closure, optimizer, session, self._seen.get(optimizer, 0))

        @functools.wraps(closure)
        def evaluate() -> Any:
            return evaluations.evaluate()

        if args:
            args = (evaluate, *args[1:])
        else:
            kwargs = {**kwargs, "closure": evaluate}
        outcome = None
        try:
            result = step(optimizer, *args, **kwargs)
            if evaluations.ran_with:
                overflows = evaluations.overflows
                scale = (overflows or evaluations.ran_with)[-1]
                outcome = Outcome(bool(overflows), scale, skipped=False)
        except Skip as skip:
            result, outcome = skip.loss, Outcome(True, skip.ran_with, skipped=True)
        self._seen[optimizer] = session.backwards.count
        return result, outcome


def _all_in_one(outcomes: list[Outcome]) -> Outcome:
    """Of a step and those inside it: one that overflowed counts, and so does one skipped."""
    overflowed = (outcome for outcome in reversed(outcomes) if outcome.found_inf is True)
    return Outcome(
        _any([outcome.found_inf for outcome in outcomes]),
        next(overflowed, outcomes[-1]).ran_with,
        _any([outcome.skipped for outcome in outcomes]),
    )


def _any(answers: list[torch.Tensor | bool]) -> torch.Tensor | bool:
    flags = [answer for answer in answers if isinstance(answer, torch.Tensor)]
    known = any(answer is True for answer in answers)
    return known if known or not flags else any_of(flags)


def profile_hook_step(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`Optimizer.profile_hook_step`: torch wraps ``step`` with it at a class's first instance."""

    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        return session.gates.gated(original(func))

    return profile_hook_step


def scheduler_step(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`LRScheduler.step` where the policy holds schedulers: nothing after a skipped step.

    Not while a scheduler is made: it sets its first learning rate by a step of its own.
    """

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_new = getattr(self, "_is_initial", "_last_lr" not in vars(self))  # older torch: no flag
        may_hold = session.active and not is_new and not is_compiling()
        if may_hold and session.gates.holds(self.optimizer):
            return None
        return original(self, *args, **kwargs)

    return step


def hooked_classes() -> list[Any]:
    """The optimizer classes, at all levels, whose own ``step`` carries torch's wrapper already.

    When autoamp comes, closures that keep such a step are among them: schedulers made earlier.
    """
    classes: list[Any] = []
    stack: list[type[torch.optim.Optimizer]] = [torch.optim.Optimizer]
    while stack:
        cls = stack.pop()
        stack += cls.__subclasses__()
        if getattr(vars(cls).get("step"), "hooked", False) and cls not in classes:
            classes.append(cls)
    # Only then, and only if there are any: this looks at every object that there is.
    if classes and hasattr(torch.optim.Optimizer.profile_hook_step, "__wrapped__"):
        keepers = gc.get_referrers(*[vars(cls)["step"] for cls in classes])
        classes += [_Kept(cell) for cell in keepers if isinstance(cell, types.CellType)]
    return classes


class _Kept:
    """A step in a closure, under the name that it has in a class."""

    def __init__(self, cell: types.CellType) -> None:
        said = {"__module__": "torch.optim", "__qualname__": "Optimizer"}
        vars(self).update(said, cell=cell, step=cell.cell_contents)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["cell"].cell_contents = vars(self)["step"] = value


def ungated(step: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind a gate, as torch would have it there: with its mark."""
    behind: Callable[..., Any] | None = vars(step).get("__autoamp_gate__")
    if behind is None:
        return step
    vars(behind)["hooked"] = True
    return behind


def _first_step_needs_the_host(optimizer: Any) -> bool:
    """Fused SGD skips its first step on the device by leaving momentum buffers uninitialised."""
    return any(
        group.get("momentum")
        and any(
            p.grad is not None and "momentum_buffer" not in optimizer.state.get(p, ())
            for p in group["params"]
        )
        for group in optimizer.param_groups
    )
