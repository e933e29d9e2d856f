"""What goes wrong silently in half precision, seen while a module runs: the probe of first calls.

It looks at the result of every op in a region, and raises where one is wrong that float32 would
have right. `fallback` then runs the module concerned again in float32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .casting import HALF


class Finding(BaseException):
    """Something that half precision breaks, found before harm was done.

    No `Exception`: it passes through the script's own ``except`` clauses to the module call that
    runs again.
    """


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that looks at ops, as all of ours do: compiled code runs as it would without.

    Dynamo must not trace it. torch sees to that by loading Dynamo, which takes a second; here it is
    done only where Dynamo is loaded already: without, nothing is traced.
    """

    supports_higher_order_operators = True
    _is_shielded = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        cls = type(self)
        if not cls._is_shielded and "torch._dynamo" in sys.modules:
            cls._is_shielded = True
            shielded = _disable_dynamo(vars(cls)["__torch_dispatch__"])
            cls.__torch_dispatch__ = shielded  # type: ignore[method-assign]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Asked by torch."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Probe(Watcher):  # type: ignore[no-untyped-call]
    """Looks at ops on one type of device for as long as `is_looking` says so."""

    def __init__(self, device_type: str, is_looking: Callable[[], bool]) -> None:
        super().__init__()
        self._device_type = device_type
        self._is_looking = is_looking

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or not self._is_looking():
            return func(*args, **kwargs)
        if any(map(is_unreal, tensors_in((args, kwargs)))):
            return func(*args, **kwargs)
        written = [] if not func._schema.is_mutable else _written(func, args, kwargs)
        with quietly():
            before = {id(tensor): tensor.clone() for tensor in written if tensor.dtype in HALF}
        result = func(*args, **kwargs)
        if func.is_view or not any(map(self._concerns, tensors_in((result, args)))):
            return result
        with quietly():
            if before:
                args, kwargs = _replaced((args, kwargs), before)
            what = _lost_constant(func, args, kwargs, result)
            what = what or _lost_count(func, args, kwargs, result)
            what = what or _overflow(func, args, kwargs, result)
        if what:
            raise Finding(f"{_name(func)}: {what}")
        return result

    def _concerns(self, tensor: torch.Tensor) -> bool:
        is_half = tensor.dtype in HALF and tensor.device.type == self._device_type
        return is_half and type(tensor) in _PLAIN


class quietly:  # noqa: N801 - reads as a word: `with quietly():`
    """What is computed for our own sake is nobody's business: no modes, autocast or gradients."""

    def __enter__(self) -> None:
        self._guards: tuple[Any, Any] = (
            torch._C._DisableTorchDispatch(),
            torch._C._DisableAutocast(),
        )
        for guard in self._guards:
            guard.__enter__()  # type: ignore[no-untyped-call]
        self._grad = torch.is_grad_enabled()
        # Not `torch.no_grad`: torch may hold the lock of its cast cache, which that clears.
        torch._C._set_grad_enabled(False)

    def __exit__(self, *exception: object) -> None:
        torch._C._set_grad_enabled(self._grad)
        for guard in reversed(self._guards):
            guard.__exit__(*exception)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Other classes are left alone: to look at a distributed tensor, all ranks would have to."""


def is_unreal(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for others, or holds no numbers that could be looked at."""
    return tensor.is_meta or _is_wrapped(tensor) or isinstance(tensor, FakeTensor)


_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments, or in the result, of an op or module."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def all_finite(values: Any) -> bool:
    """Whether every floating point tensor among these holds finite numbers only. Waits."""
    return all(bool(tensor.isfinite().all()) for tensor in _numbers(values))


def none_is_spoilt(values: Any) -> bool:
    """Whether none of these holds NaN or +inf; -inf is what masks are made of. Waits."""
    infinity = float("inf")
    return not any(bool((n.isnan() | (n == infinity)).any()) for n in _numbers(values))


def _numbers(values: Any) -> Iterator[torch.Tensor]:
    return (tensor for tensor in tensors_in(values) if has_numbers(tensor))


def has_numbers(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds floating point numbers that can be looked at."""
    is_plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
    return is_plain and tensor.is_floating_point() and not is_unreal(tensor)


def is_opaque(module: torch.nn.Module) -> bool:
    """Whether a module runs compiled code, into which nobody looks."""
    kind = type(module)
    return (
        isinstance(module, torch.jit.ScriptModule)
        or kind.__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
    )


def is_plain() -> bool:
    """Whether nothing captures or transforms what runs here."""
    if _cuda_is_up() and torch.cuda.is_current_stream_capturing():
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


_cuda_is_up: Callable[[], bool] = torch.cuda.is_initialized


# Constants

BOUND, VALUE, TERM, FACTOR, COMPARED = "bound", "value", "term", "factor", "compared"
"""What a constant is to an op: a limit, the result itself, something added, multiplied, asked."""
CONSTANTS: Mapping[str, tuple[str, tuple[tuple[int, str], ...]]] = {
    "add": (TERM, ((1, "other"),)),
    "sub": (TERM, ((1, "other"),)),
    "rsub": (TERM, ((1, "other"),)),
    "mul": (FACTOR, ((1, "other"),)),
    "div": (FACTOR, ((1, "other"),)),
    "clamp": (BOUND, ((1, "min"), (2, "max"))),
    "clamp_min": (BOUND, ((1, "min"),)),
    "clamp_max": (BOUND, ((1, "max"),)),
    "hardtanh": (BOUND, ((1, "min_val"), (2, "max_val"))),
    "threshold": (BOUND, ((1, "threshold"), (2, "value"))),
    "maximum": (BOUND, ((0, "self"), (1, "other"))),
    "minimum": (BOUND, ((0, "self"), (1, "other"))),
    "where": (VALUE, ((1, "self"), (2, "other"))),
    "masked_fill": (VALUE, ((2, "value"),)),
    "index_fill": (VALUE, ((3, "value"),)),
    "fill": (VALUE, ((1, "value"),)),
    "full": (VALUE, ((1, "fill_value"),)),
    "full_like": (VALUE, ((1, "fill_value"),)),
    "new_full": (VALUE, ((2, "fill_value"),)),
    "scalar_tensor": (VALUE, ((0, "s"),)),
    "lt": (COMPARED, ((1, "other"),)),
    "le": (COMPARED, ((1, "other"),)),
    "gt": (COMPARED, ((1, "other"),)),
    "ge": (COMPARED, ((1, "other"),)),
}
"""By op, the arguments that decide its result when they are constants. The eps of a norm is in no
row: its kernel adds it in float32."""
_HELD_TO = 0.1
"""A constant that is off by more, relative to itself, is not held: 1e-7 is 1.2e-7 in float16."""


def _lost_constant(func: Any, args: Any, kwargs: Any, result: Any) -> str:
    role, places = CONSTANTS.get(_family(func), ("", ()))
    dtype = _dtype_of(func, role, args, kwargs, result)
    if dtype is None:
        return ""
    for index, name in places:
        constant = _constant(args[index] if index < len(args) else kwargs.get(name))
        if constant is not None and is_lost(constant, dtype, role):
            return f"{_word(dtype)} cannot hold the constant {constant:g}"
    return ""


def is_lost(constant: float, dtype: torch.dtype, role: str) -> bool:
    """Whether a constant means something else in `dtype`, for an op to which it is `role`."""
    if constant == 0 or constant in (float("inf"), float("-inf")) or constant != constant:
        return False
    limits = torch.finfo(dtype)
    if abs(constant) > limits.max:
        return role not in (BOUND, COMPARED)  # no value is beyond it, in either precision
    held = torch.tensor(constant, dtype=dtype).item()
    if role in (BOUND, COMPARED) and abs(held) == 1 and abs(constant) != 1:
        return abs(abs(constant) - 1) < limits.eps / 4
    return abs(held - constant) > _HELD_TO * abs(constant)


def _constant(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype not in HALF:
        is_real = value.is_floating_point() and not value.requires_grad
        return float(value) if is_real else None
    return None


def _dtype_of(func: Any, role: str, args: Any, kwargs: Any, result: Any) -> torch.dtype | None:
    """The half dtype in which an op works with its constant."""
    if not role:
        return None
    given = args if role == COMPARED else result
    halves = [tensor.dtype for tensor in tensors_in(given) if tensor.dtype in HALF]
    return halves[0] if halves else None


# Counts and coordinates

_WHOLE = (torch.int64, torch.int32, torch.int16)
_GRIDS = ("arange", "linspace", "logspace", "range")


def _lost_count(func: Any, args: Any, kwargs: Any, result: Any) -> str:
    family = _family(func)
    if not isinstance(result, torch.Tensor) or result.dtype not in HALF or not result.numel():
        return ""
    word = _word(result.dtype)
    if family in _GRIDS and "dtype" in kwargs:
        exact = func(*args, **{**kwargs, "dtype": torch.float32})
        step = (exact[1:] - exact[:-1]).abs().min() if exact.numel() > 1 else exact.new_ones(())
        if bool((result.float() - exact).abs().max() > step / 4):
            return f"{word} cannot tell the values of this grid apart"
    if family == "_to_copy" and args[0].dtype in _WHOLE and _differ(args[0], result):
        return f"{word} cannot hold these whole numbers"
    if family in ("add", "sub") and func._schema.is_mutable:
        step = _constant(args[1])
        is_count = step is not None and step != 0 and step.is_integer()
        if is_count and bool((result == args[0]).any()):
            return f"{word} counts no further"
    return ""


def _differ(numbers: torch.Tensor, held: torch.Tensor) -> bool:
    return bool((held.to(numbers.dtype) != numbers).any())


# Numbers beyond the range


def _overflow(func: Any, args: Any, kwargs: Any, result: Any) -> str:
    if _family(func) in _UNDEFINED or all_finite(list(_halves(result))):
        return ""
    given = (args, kwargs)
    if _is_not_finite(args) or _is_not_finite(tuple(kwargs.values())) or not all_finite(given):
        return ""
    if _family(func) == "_to_copy" and _is_mask(args[0], result):
        return ""
    if torch.Tag.nondeterministic_seeded not in func.tags:  # another draw would move the state
        try:
            exact = func(*to_float32(args), **to_float32(kwargs))
        except RuntimeError:
            exact = None
        if exact is not None and not all_finite(exact):
            return ""
    return "the result leaves the range of " + _word(next(t.dtype for t in _halves(result)))


_UNDEFINED = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize")
"""Ops whose results are whatever the memory holds."""


def _halves(value: Any) -> Iterator[torch.Tensor]:
    return (tensor for tensor in tensors_in(value) if tensor.dtype in HALF)


def _is_not_finite(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_not_finite, value))
    return isinstance(value, float) and (value != value or abs(value) == float("inf"))


def _is_mask(given: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether only numbers far below became -inf, and no row did all along: attention masks."""
    if not given.dim() or bool((result.isnan() | (result == float("inf"))).any()):
        return False
    return not bool((result == float("-inf")).all(dim=-1).any())


def to_float32(value: Any) -> Any:
    """Arguments of an op with half tensors, and half dtypes, as float32."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in HALF else value
    if isinstance(value, (list, tuple)):
        return type(value)(map(to_float32, value))
    if isinstance(value, dict):
        return {key: to_float32(item) for key, item in value.items()}
    return torch.float32 if value in HALF else value


# Ops


def _family(func: Any) -> str:
    name: str = func._schema.name.removeprefix("aten::")
    return name.removesuffix("_") if not name.endswith("__") else name


def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += list(tensors_in(value))
    return found


def _replaced(value: Any, before: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return before.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, before) for item in value)
    if isinstance(value, dict):
        return {key: _replaced(item, before) for key, item in value.items()}
    return value
