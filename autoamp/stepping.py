"""May the optimizer move? A step whose gradients are not finite is skipped.

The gate stands at class level, outside torch's own step wrapper and inside the schedulers' one: a
skipped step runs no step hooks, touches neither parameters nor state, and no scheduler warns.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._compile import _disable_dynamo

from .region import exempted, is_compiling
from .scaling import any_of, unscale_
from .session import Backward, Session

STATE_KEY = "autoamp"
"""The one key that autoamp adds to ``optimizer.state_dict()``; plain PyTorch ignores it."""


def _unknown() -> object:
    return ...


_frame_callback: Callable[[], object] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", _unknown
)


def _dynamo_is_off() -> bool:
    """Whether frames called from here are certain not to be compiled."""
    return _frame_callback() is None


class _OpenGates(threading.local):
    """Per thread: the optimizers whose gates are open."""

    def __init__(self) -> None:
        self.ids: set[int] = set()


class Gates:
    """The gates of one session, and what each optimizer has seen of its backwards."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._seen: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._local = _OpenGates()
        # Dynamo would trace into it. Nothing is loaded for this: making an optimizer loads Dynamo.
        self._eagerly = _disable_dynamo(functools.partial(self._pass_through))

    def gated(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """`step` of an optimizer class behind a gate; in ``super().step()`` only the outer acts."""

        session, local = self.session, self._local

        @functools.wraps(step)
        def gate(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() and not session.may_scale:
                return step(optimizer, *args, **kwargs)
            if not session.active or id(optimizer) in local.ids:
                return step(optimizer, *args, **kwargs)
            local.ids.add(id(optimizer))
            try:
                if session.may_scale:
                    run = self._pass_through if _dynamo_is_off() else self._eagerly
                    return run(step, optimizer, args, kwargs)
                result = step(optimizer, *args, **kwargs)
                session.counts.steps += 1
                return result
            finally:
                local.ids.discard(id(optimizer))
                if getattr(session.local, "region", None) is not None:
                    torch.clear_autocast_cache()  # weights have changed inside an open region

        vars(gate)["__autoamp_gate__"] = step
        return gate

    def _pass_through(
        self,
        step: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        session = self.session
        closure = args[0] if args else kwargs.get("closure")
        if callable(closure):
            return self._step_with_closure(step, optimizer, closure, args, kwargs)
        backwards = session.backwards.since(self._seen.get(optimizer, 0)) if session.scales else []
        if not backwards:
            result = step(optimizer, *args, **kwargs)
            session.counts.steps += 1
            return result
        self._seen[optimizer] = session.backwards.count
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            return self._step_fused(step, optimizer, backwards, args, kwargs)
        found_inf = self._overflow(optimizer, backwards)
        ran_with = _lowest_scale(backwards) if found_inf else backwards[-1][0]
        result = None if found_inf else step(optimizer, *args, **kwargs)
        self.session.loss_scale.update(found_inf, ran_with)
        if found_inf:
            session.speech.info("autoamp: step skipped, its gradients are not finite")
        return result

    def _overflow(self, optimizer: torch.optim.Optimizer, backwards: list[Backward]) -> bool:
        """Whether this optimizer owns a gradient that is not finite: one synchronisation or two.

        A backward that overflowed need not concern this optimizer (another one's loss, gradients
        zeroed since).
        """
        if not any_of([found_inf for _, found_inf in backwards]).item():
            return False
        return bool(_check(optimizer).item())

    def _step_fused(
        self,
        step: Callable[..., Any],
        optimizer: Any,
        backwards: list[Backward],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Fused kernels skip by themselves, on the device: they read a flag, and nobody waits."""
        ran_with = backwards[-1][0]
        found_inf = _check(optimizer)
        if _first_step_needs_the_host(optimizer):
            result = None if found_inf.item() else step(optimizer, *args, **kwargs)
        else:
            optimizer.grad_scale, optimizer.found_inf = None, found_inf
            try:
                result = step(optimizer, *args, **kwargs)
            finally:
                del optimizer.grad_scale, optimizer.found_inf
        self.session.loss_scale.update(found_inf, ran_with)
        return result

    def _step_with_closure(
        self,
        step: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A closure runs its backward inside the step: one that overflows runs again in float32."""
        session = self.session
        overflows: list[torch.Tensor] = []
        ran_with: list[torch.Tensor] = []

        @functools.wraps(closure)
        def evaluated() -> Any:
            random_state = _random_state()
            mark = session.backwards.count
            loss = closure()
            backwards = session.backwards.since(mark)
            if backwards:
                ran_with.append(backwards[-1][0])
                if self._overflow(optimizer, backwards):
                    overflows.append(_lowest_scale(backwards))
                    _restore_random_state(random_state)
                    with exempted():
                        loss = closure()
            return loss

        if args:
            args = (evaluated, *args[1:])
        else:
            kwargs = {**kwargs, "closure": evaluated}
        result = step(optimizer, *args, **kwargs)
        self._seen[optimizer] = session.backwards.count
        if ran_with:
            scale = (overflows or ran_with)[-1]
            session.loss_scale.update(bool(overflows), scale, skipped=False)
        else:
            session.counts.steps += 1
        return result


def profile_hook_step(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`Optimizer.profile_hook_step`: torch wraps ``step`` with it at a class's first instance."""

    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        return session.gates.gated(original(func))

    return profile_hook_step


def state_dict(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`Optimizer.state_dict`: the loss scale rides along under one key, as plain numbers."""

    def state_dict(self: torch.optim.Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = original(self)
        if session.active and session.scales:
            state[STATE_KEY] = session.loss_scale.state()
        return state

    return state_dict


def load_state_dict(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`Optimizer.load_state_dict`: and comes back."""

    def load_state_dict(self: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        if STATE_KEY in state_dict:
            state_dict = dict(state_dict)
            session.loss_scale.load(state_dict.pop(STATE_KEY))
        original(self, state_dict)

    return load_state_dict


def hooked_classes() -> list[type[torch.optim.Optimizer]]:
    """The optimizer classes, at all levels, whose own ``step`` carries torch's wrapper already."""
    classes: list[type[torch.optim.Optimizer]] = []
    stack: list[type[torch.optim.Optimizer]] = [torch.optim.Optimizer]
    while stack:
        cls = stack.pop()
        stack += cls.__subclasses__()
        if getattr(vars(cls).get("step"), "hooked", False) and cls not in classes:
            classes.append(cls)
    return classes


def ungated(step: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind a gate, as torch would have it there: with its mark."""
    behind: Callable[..., Any] | None = vars(step).get("__autoamp_gate__")
    if behind is None:
        return step
    vars(behind)["hooked"] = True
    return behind


def _check(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """One flag for all gradients of the optimizer as they are now; nothing is changed.

    The kernel that unscales checks too, in one pass; by a factor of one.
    """
    # `.data` has its own version counter: multiplying by one is no edit in autograd's eyes.
    grads = [
        p.grad.data
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    ]
    with torch.no_grad():
        flags = unscale_(grads, torch.ones((), device=grads[0].device)) if grads else []
    return any_of(flags) if flags else torch.zeros(())


def _lowest_scale(backwards: list[Backward]) -> torch.Tensor:
    """The smallest scale among the backwards that overflowed, as the object that they ran with."""
    scales = [scale for scale, found_inf in backwards if found_inf.item()]
    return min(scales, key=float) if scales else backwards[-1][0]


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


_cuda_is_up: Callable[[], bool] = torch.cuda.is_initialized


def _random_state() -> tuple[torch.Tensor, list[torch.Tensor]]:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if _cuda_is_up() else []


def _restore_random_state(state: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
