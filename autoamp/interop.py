"""At the borders inside a model: other libraries and the script's own forward hooks see float32.

What leaves a module is float32 anyway. What is taken out in the middle of a forward, as an array or
by a hook, becomes float32 here. A script's own half tensors look the same in there as those that
autoamp made: of them, too, a float32 copy is handed out inside a region, and edits of an array are
not seen by the tensor.
"""

from __future__ import annotations

import collections
import copy
import functools
import gc
import operator
import types
from collections.abc import Callable
from typing import Any

import torch

from . import region
from .casting import HALF, to_float32
from .functions import device_around
from .hooks import is_torchs_own
from .islands import half_to_float32
from .region import is_compiling
from .session import Session


def array(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`Tensor.numpy`, by which ``np.asarray`` goes too.

    NumPy has no bfloat16: where autoamp makes such tensors, all of them become float32 arrays.
    """

    def numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        session.weights.forget(self)
        if self.dtype in HALF and (_may_be_ours(session) or _has_no_array(self.dtype, session)):
            return original(self.float(), *args, **kwargs)
        return original(self, *args, **kwargs)

    return numpy


def traced(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """A function that records a program: it sees the float32 one, made of torch's own functions.

    The tracer names values after the variables of the frame that calls an op, and ONNX inputs have
    those names: no frame of ours may be between.
    """
    in_float32, ledger = region.in_float32(original, session), session.ledger

    def traced(*args: Any, **kwargs: Any) -> Any:
        if torch.nn.functional.linear not in session.stand_ins:  # a trace in a trace
            return in_float32(*args, **kwargs)
        functions = [
            entry.target
            for entry in ledger.entries
            if entry.target.startswith("torch.nn.functional:")
        ]
        for target in functions:
            ledger.lift(target)
        try:
            return in_float32(*args, **kwargs)
        finally:
            for target in functions:
                ledger.lower(target)

    return traced


def dlpack(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`Tensor.__dlpack__` and ``to_dlpack``."""

    def to_dlpack(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        session.weights.forget(tensor)
        if tensor.dtype in HALF and _may_be_ours(session):
            return original(tensor.float(), *args, **kwargs)
        return original(tensor, *args, **kwargs)

    return to_dlpack


def _may_be_ours(session: Session) -> bool:
    return session.local.region is not None or device_around(session) is not None


def _has_no_array(dtype: torch.dtype, session: Session) -> bool:
    decided = (decision.dtype for decision in session.decisions.values())
    return dtype is torch.bfloat16 and session.active and torch.bfloat16 in decided


def forward_hook(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`Module.register_forward_hook`, and ``register_module_forward_hook`` for all modules."""

    def register(*args: Any, **kwargs: Any) -> Any:
        return original(*_with_hook(args, kwargs, session, is_pre=False), **kwargs)

    return register


def forward_pre_hook(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`Module.register_forward_pre_hook`, and ``register_module_forward_pre_hook``."""

    def register(*args: Any, **kwargs: Any) -> Any:
        return original(*_with_hook(args, kwargs, session, is_pre=True), **kwargs)

    return register


def _with_hook(
    args: tuple[Any, ...], kwargs: dict[str, Any], session: Session, is_pre: bool
) -> tuple[Any, ...]:
    """The arguments, (hook,) or (module, hook), with a hook of the script as a `Hook`."""
    if "hook" in kwargs:
        kwargs["hook"] = _seeing_float32(kwargs["hook"], session, is_pre)
        return args
    return (*args[:-1], _seeing_float32(args[-1], session, is_pre))


def _seeing_float32(hook: Any, session: Session, is_pre: bool) -> Any:
    if type(hook) is Hook:  # taken from another module
        hook = hook.__wrapped__
    inner = hook
    while isinstance(inner, functools.partial):
        inner = inner.func
    return hook if is_torchs_own(inner) else Hook(hook, session, is_pre)


_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


_FOR_ALL_MODULES = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
)
"""Where hooks for all modules stand. `gc` does not tell of these where a program has frozen it."""


def unhook() -> None:
    """Put the script's hooks back in the places of ours, on all modules that there are."""
    for hook in [one for one in gc.get_referrers(Hook) if type(one) is Hook]:
        for holder in (*gc.get_referrers(hook), *_FOR_ALL_MODULES):
            if isinstance(holder, collections.OrderedDict):  # what torch keeps hooks in
                for key in [key for key, value in holder.items() if value is hook]:
                    holder[key] = hook.__wrapped__


def script_stub(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """What makes TorchScript of a function: of the script's hook, where it finds ours."""

    def make_stub(func: Any, *args: Any, **kwargs: Any) -> Any:
        return original(func.__wrapped__ if type(func) is Hook else func, *args, **kwargs)

    return make_stub


class Hook:
    """A forward hook or pre-hook of the script, as it stands on a module.

    Inside a region it sees float32 tensors and runs in float32. The results (a pre-hook's: the
    arguments) go on as those tensors, unless it returns others: what it keeps is a part of the
    graph and can be used outside, as in a script without autoamp.

    It compares, is copied and is saved as the script's hook: files know nothing of it.
    """

    def __init__(self, hook: Any, session: Session, is_pre: bool) -> None:
        self.__wrapped__ = hook
        self.session = session
        self.is_pre = is_pre

    def __call__(self, module: torch.nn.Module, *given: Any) -> Any:
        """Given are (args,) or (args, kwargs), and after these the result unless it `is_pre`."""
        hook, session = self.__wrapped__, self.session
        if is_compiling():
            if not session.islands.where_in_trace():
                return hook(module, *given)
            full = half_to_float32(given)
            result = hook(module, *full)
            return self._pass_on(full) if result is None else result
        device_type = device_around(session)
        if device_type is None and session.local.region is None:
            return hook(module, *given)
        full = to_float32(given)
        if device_type is None:
            result = hook(module, *full)
        else:
            result = session.islands.call_own(hook, (module, *full), {}, device_type)
        return self._pass_on(full) if result is None and full is not given else result

    def _pass_on(self, full: tuple[Any, ...]) -> Any:
        if self.is_pre:
            return full if len(full) == 2 else full[0]
        return full[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What a hook is an instance of (torch's pruning asks), but for functions: Dynamo asks."""
        kind = type(self.__wrapped__)
        return Hook if kind in _FUNCTIONS else kind

    def __eq__(self, other: object) -> bool:
        return bool(self.__wrapped__ == (other.__wrapped__ if type(other) is Hook else other))

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(copy.deepcopy(self.__wrapped__, memo), self.session, self.is_pre)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return operator.getitem, ((self.__wrapped__,), 0)
