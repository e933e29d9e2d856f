"""In which type the gradients of data parallel travel between processes.

Where the policy says ``distributed.gradients: half``, each `DistributedDataParallel` gets a
communication hook of ours. Torch takes one for ever, so ours stands in: for a hook that the script
registers, at whatever time, and for torch's own reduction where nothing is to be halved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from .session import Session

_distributed: Any = torch.distributed


class Reduction:
    """What stands in the place of one model's communication hook."""

    def __init__(self, session: Session, model: Any) -> None:
        self._session = session
        self._model = weakref.ref(model)
        self.of_script: tuple[Any, Callable[..., Any]] | None = None
        """The state and the hook that the script has registered, in the order they are called."""

    def __call__(self, state: object, bucket: Any) -> Any:
        """Torch asks for each bucket, once all of its gradients are there."""
        if self.of_script is not None:
            return self.of_script[1](self.of_script[0], bucket)
        group, half = self._group(), self._half(bucket.buffer())
        if half is None:
            return _whole(group, bucket)
        return getattr(_hooks(), _HALVED[half])(group, bucket)

    def _group(self) -> Any:
        model = self._model()
        return None if model is None else model.process_group

    def _half(self, gradients: torch.Tensor) -> torch.dtype | None:
        """The type in which these travel, None if in their own.

        All ranks have to give one answer: also one that joins with no data, and so has run nothing.
        float16 is for scaled gradients only.
        """
        session = self._session
        if not session.active or gradients.dtype is not torch.float32 or _is_sparse(gradients):
            return None
        if not session.agreement.has_one_type:
            return None
        half = session.decide(gradients.device).dtype
        is_scaled = session.may_scale or bool(session.scaler_owner)
        return None if half is torch.float16 and not is_scaled else half


_HALVED = {torch.float16: "fp16_compress_hook", torch.bfloat16: "bf16_compress_hook"}
"""Torch's own hooks: cast, divide by the number of ranks, add up, cast back."""


def _hooks() -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks


def _is_sparse(gradients: torch.Tensor) -> bool:
    return gradients.layout is not torch.strided


def _whole(group: Any, bucket: Any) -> Any:
    """As torch does without a hook: it multiplies by the inverse of the number of ranks."""
    group = _distributed.group.WORLD if group is None else group
    gradients = bucket.buffer().mul_(1.0 / group.size())
    work = _distributed.all_reduce(gradients, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def init_reducer(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`DistributedDataParallel._ddp_init_helper` makes the reducer: new ones get our hook."""

    def _ddp_init_helper(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        session.reductions.pop(self, None)
        if session.active and not getattr(self, "_use_python_reducer", False):
            reduction = session.reductions[self] = Reduction(session, self)
            _distributed._register_comm_hook(self.reducer, None, reduction)

    return _ddp_init_helper


def register(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`DistributedDataParallel.register_comm_hook`: the script's hook wins, as often as torch lets
    it register one: once.
    """

    def register_comm_hook(self: Any, state: object, hook: Callable[..., Any]) -> None:
        reduction = session.reductions.get(self)
        if reduction is None or reduction.of_script is not None:
            original(self, state, hook)  # torch says what is wrong with a second one
            return
        self._check_comm_hook(hook)
        self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks.append((hook, state))
        reduction.of_script = state, hook

    return register_comm_hook


def register_builtin(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`DistributedDataParallel._register_builtin_comm_hook`: the same for those of torch in C++."""

    def _register_builtin_comm_hook(self: Any, comm_hook_type: Any) -> None:
        reduction = session.reductions.get(self)
        if reduction is None or reduction.of_script is not None:
            original(self, comm_hook_type)
            return
        is_half = comm_hook_type == _distributed.BuiltinCommHookType.FP16_COMPRESS
        self.logger._set_comm_hook_name(str(comm_hook_type))
        hook = _hooks().fp16_compress_hook if is_half else _whole
        reduction.of_script = self.process_group, hook

    return _register_builtin_comm_hook
