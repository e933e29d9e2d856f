"""Kernels of our own on torch's Autocast dispatch keys: made, put in, and taken out.

A kernel there is found by every spelling of an op (function, method, module, TorchScript, names
imported early). It acts inside autoamp's regions; in a script's own `torch.autocast` contexts it
does what torch's kernel does.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor

from .categories import AS_GIVEN, FLOAT32, LOWER, REFUSED, WIDEST, autocast_key, overload

if TYPE_CHECKING:
    from .weights import WeightCasts

Operands = Callable[[torch.Tensor], bool]
"""Whether a tensor among the operands of a call is one that a rule speaks of."""


class Local(threading.local):
    """What one thread is doing: the device type of its open region, or None, the root that opened
    it, the precision in force there, and whether casts of weights are not kept for the rest, or
    (what to go back to) until gradients are recorded again; how the root is watched, if it is, and
    how often float32 did not help in it."""

    region: Any = None
    root: Any = None
    precision: str = ""
    uncached: bool = False
    recomputes: bool = False
    """Whether a checkpoint runs again, inside a backward, what opens regions (`recomputing`)."""
    repeats: bool = False
    """Whether what runs, outside of regions, will run again in a backward or does so: the same way.
    """
    stands: bool = False
    """Whether a root is running that stays float32, with all that it calls."""
    paused: bool | None = None
    watch: Any = None
    failures: int = 0
    counts: bool = False
    """Whether it matters if modules exchange something with other ranks."""

    def __init__(self) -> None:
        self.casts: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}
        """What our kernels keep for the region (`weights`)."""

    def forget_casts(self) -> None:
        """Weights have changed, or the region ends: torch's casts and ours are not to be used."""
        torch.clear_autocast_cache()
        self.casts.clear()


def nesting() -> int:
    """How many autocast contexts are open in this thread, regions among them."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


OWN = "own"
"""In the place of a precision: float32, but for modules, which go back to the region's."""
FULL = ("float32", OWN)
"""The precisions in which autocast is off."""

Values = tuple[tuple[int, str, Any, Any], ...]
"""Values that arguments must have: (position, name, default, value)."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A list for the calls whose arguments have these values."""

    category: str
    values: Values


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of one call: (args, kwargs)."""

Adjust = Callable[[Any], Callable[[tuple[Any, ...], dict[str, Any]], Arguments]]
"""For an overload, what becomes of the arguments of its calls before all else."""

_current_graph_task_id = torch._C._current_graph_task_id

MARK = ("ipu", torch.bfloat16)
"""The autocast dtype, of a device that torch cannot run on, by which a region that is a part of a
compiled graph is told from a script's own context: torch.compile carries it along."""


def is_in_traced_region() -> bool:
    """Whether what runs, or is traced, is a region that torch.compile has traced."""
    return torch.get_autocast_dtype(MARK[0]) is MARK[1]


@dataclass(frozen=True, slots=True)
class Kernel:
    """How one overload of an aten op runs on one device, and who says so.

    `torchs` is what torch's own kernel does. Calls that meet a condition run as that says (the last
    one wins). A call for which `only_with` finds no operand, or `never_with` finds one, runs in
    float32. With `float32_results` the results of `lower` are cast to float32. `adjust`
    changes arguments that half precision cannot take, whatever the list.
    """

    op: str
    device: str
    category: str
    why: str
    torchs: str = AS_GIVEN
    conditions: tuple[Condition, ...] = ()
    only_with: Operands | None = field(default=None, compare=False)
    never_with: Operands | None = field(default=None, compare=False)
    float32_results: bool = False
    adjust: Adjust | None = field(default=None, compare=False)

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """What makes code compiled with one kernel differ from code compiled with another."""
        looks = [x is not None for x in (self.only_with, self.never_with, self.adjust)]
        return self.op, self.device, self.category, self.conditions, *looks, self.float32_results


class Kernels:
    """The kernels in force; `remove` leaves the dispatcher as it was."""

    def __init__(self, local: Local, weights: WeightCasts) -> None:
        self.registered: list[Kernel] = []
        self.families: set[tuple[str, str]] = set()
        """(op, device) of those that functions of `torch.nn.functional` call by that name."""
        self._local = local
        self._weights = weights
        self._libraries: list[Any] = []
        self._cache_tag: str | None = None
        self._jit_autocast: bool | None = None

    def register(self, kernels: Iterable[Kernel]) -> None:
        """Put kernels in. torch warns once a process of an override: not the script's business."""
        kernels = list(kernels)
        if not kernels:
            return
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self._libraries.append(library)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for kernel in kernels:
                library.impl(
                    kernel.op,
                    implementation(kernel, self._local, self._weights),
                    autocast_key(kernel.device),
                    with_keyset=True,
                )
                self.registered.append(kernel)
                family, _, form = kernel.op.partition(".")
                if form in ("", "input"):
                    self.families.add((family, kernel.device))
        self._tag_compiled_code()
        if self._jit_autocast is None and any(kernel.torchs for kernel in kernels):
            # TorchScript casts by a list of its own before an op is called. Without that pass it
            # meets the kernels, like everybody.
            self._jit_autocast = torch._C._jit_set_autocast_mode(False)

    def remove(self) -> None:
        """Take all of them out again."""
        while self._libraries:
            self._libraries.pop()._destroy()
        self.registered.clear()
        self.families.clear()
        if self._cache_tag is not None:
            torch.compiler.config.cache_key_tag = self._cache_tag
            self._cache_tag = None
        if self._jit_autocast is not None:
            torch._C._jit_set_autocast_mode(self._jit_autocast)
            self._jit_autocast = None

    def _tag_compiled_code(self) -> None:
        """Let torch.compile's caches on disk tell code traced with these kernels from other code.

        Their keys hold the autocast dtype, not the kernels on its dispatch key.
        """
        config: Any = getattr(torch.compiler, "config", None)
        if hasattr(config, "cache_key_tag"):
            if self._cache_tag is None:
                self._cache_tag = config.cache_key_tag
            said = repr([kernel.fingerprint for kernel in self.registered])
            digest = hashlib.sha256(said.encode()).hexdigest()[:16]
            config.cache_key_tag = f"{self._cache_tag}autoamp-{digest}"


def implementation(
    kernel: Kernel, local: Local, weights: WeightCasts | None = None
) -> Callable[..., Any]:
    """The function behind a kernel: ``f(keyset, *args, **kwargs)``.

    What it does is worked out at its first call: of hundreds of kernels few are ever called.
    """
    torchs = ours = None

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal torchs, ours
        if torchs is None or ours is None:
            torchs, ours = _call(kernel, kernel.torchs, is_torchs=True), _ours(kernel, weights)
        if local.region is None and not is_in_traced_region() and _current_graph_task_id() == -1:
            return torchs(keyset, args, kwargs)
        # In a backward autocast is on only where a checkpoint runs a region's forward again.
        return ours(keyset, args, kwargs)

    return run


def _ours(kernel: Kernel, weights: WeightCasts | None) -> Call:
    ours = _call(kernel, kernel.category, weights)
    if kernel.only_with is not None or kernel.never_with is not None:
        ours = _by_operands(kernel, ours, _call(kernel, FLOAT32))
    if kernel.conditions:
        choices = [
            (c.values, _call(kernel, c.category, weights)) for c in reversed(kernel.conditions)
        ]
        ours = _by_values(choices, ours)
    return ours if kernel.adjust is None else _adjusted(kernel, ours)


Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""A call of an op: (keyset, args, kwargs)."""


def _call(
    kernel: Kernel, category: str, weights: WeightCasts | None = None, is_torchs: bool = False
) -> Call:
    """How the op is called in one list."""
    op, key = overload(kernel.op), getattr(torch._C.DispatchKey, autocast_key(kernel.device))
    if category == AS_GIVEN:
        return _as_given(op, key)
    if category == REFUSED:

        def refused(keyset: Any, args: Any, kwargs: Any) -> Any:
            raise RuntimeError(
                f"torch.autocast refuses {kernel.op} on {kernel.device}: its result leaves the "
                "range of half precision; use the form that takes logits, or float32."
            )

        return refused
    find_dtype = _DTYPES[category](op, kernel.device)
    written = [
        a for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    if any(a.kwarg_only for a in written):
        invoke = _into_out(op, kernel.device, [a.name for a in written])
    elif written and op._schema.arguments[0].name == written[0].name:
        invoke = _in_place(op, kernel.device)
    else:
        to_float32 = kernel.float32_results and category == LOWER and not is_torchs
        invoke = _plain(op, kernel.device, to_float32, weights if category == LOWER else None)
    excluded = torch._C.DispatchKeySet(key)
    guard = torch._C._ExcludeDispatchKeyGuard

    def cast_call(keyset: Any, args: Any, kwargs: Any) -> Any:
        dtype = find_dtype(args, kwargs)
        with guard(excluded):
            return op(*args, **kwargs) if dtype is None else invoke(dtype, args, kwargs)

    return cast_call


def _as_given(op: Any, key: Any) -> Call:
    """As if there were no kernel: what the op calls still meets autocast."""
    below = torch._C._dispatch_keyset_full_after(key)
    excluded = torch._C.DispatchKeySet(key)
    places = [i for i, a in enumerate(op._schema.arguments) if str(a.type) == "Tensor"]

    def as_given(keyset: Any, args: Any, kwargs: Any) -> Any:
        for place in places:
            if place < len(args) and not isinstance(args[place], torch.Tensor):
                # `x - 2` comes as a number, which only a call takes; such ops call no others.
                with torch._C._ExcludeDispatchKeyGuard(excluded):
                    return op(*args, **kwargs)
        return op.redispatch(keyset & below, *args, **kwargs)

    return as_given


FindDtype = Callable[[tuple[Any, ...], dict[str, Any]], "torch.dtype | None"]
"""The dtype that the operands of a call are cast to; None: they are left as they are."""


def _written(op: Any) -> list[Any]:
    """The arguments that an op writes to: the one that it works on in place, or ``out``."""
    arguments = op._schema.arguments
    return [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _lower_dtype(op: Any, device: str) -> FindDtype:
    lower = torch.get_autocast_dtype
    return _unless_asked(op, lambda args, kwargs: lower(device))


def _float32_dtype(op: Any, device: str) -> FindDtype:
    return _unless_asked(op, lambda args, kwargs: torch.float32)


def _unless_asked(op: Any, find: FindDtype) -> FindDtype:
    """As torch has it: where the caller names a dtype, it wins."""
    names = [argument.name for argument in op._schema.arguments]
    name = next((name for name in ("dtype", "out_dtype") if name in names), None)
    if name is None:
        return find
    index = names.index(name)

    def unless_asked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
        return find(args, kwargs) if _argument(index, name, None, args, kwargs) is None else None

    return unless_asked


def _widest_dtype(op: Any, device: str) -> FindDtype:
    written = {a.name for a in _written(op) if a.kwarg_only}

    def widest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
        operands = (*args, *(value for name, value in kwargs.items() if name not in written))
        found = {tensor.dtype for tensor in _tensors(operands) if _is_castable(tensor, device)}
        return found.pop() if len(found) == 1 else torch.float32 if found else None

    return widest


_DTYPES = {LOWER: _lower_dtype, FLOAT32: _float32_dtype, WIDEST: _widest_dtype}
Invoke = Callable[[torch.dtype, tuple[Any, ...], dict[str, Any]], Any]

CASTABLE = frozenset((torch.float32, torch.float16, torch.bfloat16))
INPUT_ONLY = frozenset(("batch_norm", "instance_norm"))
"""Ops that keep their other operands: updates of copied running statistics would be lost."""


def _plain(op: Any, device: str, to_float32: bool, weights: WeightCasts | None) -> Invoke:
    input_only = op._schema.name.removeprefix("aten::") in INPUT_ONLY

    def invoke(dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if input_only:
            result = op(_cast(args[0], dtype, device), *args[1:], **kwargs)
        else:
            result = op(
                *[_cast(value, dtype, device, weights) for value in args],
                **{name: _cast(value, dtype, device, weights) for name, value in kwargs.items()},
            )
        return _cast(result, torch.float32, device) if to_float32 else result

    return invoke


def _in_place(op: Any, device: str) -> Invoke:
    """The destination keeps its dtype; what is computed in another one is written back."""

    def invoke(dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        destination, *others = args
        others = [_cast(value, dtype, device) for value in others]
        kwargs = {name: _cast(value, dtype, device) for name, value in kwargs.items()}
        if destination.dtype is dtype or not _is_castable(destination, device):
            return op(destination, *others, **kwargs)
        return destination.copy_(op(destination.to(dtype), *others, **kwargs))

    return invoke


def _into_out(op: Any, device: str, names: list[str]) -> Invoke:
    """As `_in_place`, for ``out=``, which is resized where it does not fit."""

    def invoke(dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cast = {name: _cast(v, dtype, device) for name, v in kwargs.items() if name not in names}
        outs = {name: kwargs[name] for name in names}
        fresh = {
            name: torch.empty_like(out, dtype=dtype)
            for name, out in outs.items()
            if out.dtype is not dtype and _is_castable(out, device)
        }
        result = op(*[_cast(value, dtype, device) for value in args], **cast, **{**outs, **fresh})
        for name, computed in fresh.items():
            if outs[name].shape != computed.shape:
                outs[name].resize_(computed.shape)
            outs[name].copy_(computed)
        if not fresh:
            return result
        return tuple(outs.values()) if len(outs) > 1 else next(iter(outs.values()))

    return invoke


def _is_castable(tensor: torch.Tensor, device: str) -> bool:
    return tensor.dtype in CASTABLE and tensor.device.type == device


def _cast(value: Any, dtype: torch.dtype, device: str, weights: WeightCasts | None = None) -> Any:
    """A tensor, or those in a list, in `dtype` where autocast would cast it: double is left."""
    if isinstance(value, torch.Tensor):
        if value.dtype is dtype or not _is_castable(value, device):
            return value
        value = weights.of(value, dtype) if weights is not None else value
        return value.to(dtype)
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype, device, weights) for item in value]
    return value


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _adjusted(kernel: Kernel, inner: Call) -> Call:
    op, key = overload(kernel.op), getattr(torch._C.DispatchKey, autocast_key(kernel.device))
    adjust = kernel.adjust(op)  # type: ignore[misc]  # there is one
    excluded = torch._C.DispatchKeySet(key)
    guard = torch._C._ExcludeDispatchKeyGuard

    def call(keyset: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = adjust(args, kwargs)
        return inner(keyset, args, kwargs)

    def call_alone(keyset: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = adjust(args, kwargs)
        with guard(excluded):
            return op(*args, **kwargs)

    # What an op in no list calls here would only be adjusted once more: autocast is passed by.
    return call_alone if kernel.category == AS_GIVEN and not kernel.conditions else call


def _by_operands(kernel: Kernel, lower: Call, float32: Call) -> Call:
    only_with, never_with = kernel.only_with, kernel.never_with

    def call(keyset: Any, args: Any, kwargs: Any) -> Any:
        operands = list(_tensors((*args, *kwargs.values())))
        may = (only_with is None or any(map(only_with, operands))) and not (
            never_with is not None and any(map(never_with, operands))
        )
        return (lower if may else float32)(keyset, args, kwargs)

    return call


def _by_values(choices: list[tuple[Values, Call]], otherwise: Call) -> Call:
    def call(keyset: Any, args: Any, kwargs: Any) -> Any:
        for values, chosen in choices:
            if all(
                _argument(index, name, default, args, kwargs) == value
                for index, name, default, value in values
            ):
                return chosen(keyset, args, kwargs)
        return otherwise(keyset, args, kwargs)

    return call


def _argument(index: int, name: str, default: Any, args: Any, kwargs: Any) -> Any:
    return args[index] if index < len(args) else kwargs.get(name, default)


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one, also while torch.compile traces."""
    return _is_parameter(tensor) or (tensor._base is not None and _is_parameter(tensor._base))


def _is_parameter(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, FunctionalTensor):
        tensor = torch._from_functional_tensor(tensor.elem)
    return isinstance(tensor, torch.nn.Parameter)
