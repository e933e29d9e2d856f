"""Modules that the policy's module rules keep in a precision of their own, inside a region.

An island is the call of one module. It switches torch's autocast over and back without counting as
a context: the nesting still tells a region of ours from a context of the script's, which wins.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .casting import HALF, to_float32
from .devices import TORCH_DTYPES
from .fallback import Fallback
from .kernels import OWN, is_in_traced_region, nesting
from .modules import UNKNOWN, Candidates, Entry
from .ranks import has_ranks
from .session import Session

_current_graph_task_id = torch._C._current_graph_task_id
_DTYPES = {"float32": None, **TORCH_DTYPES}
_SIMPLE = (torch.Tensor, str, int, float, type(None))


def _constant_in_traces(function: Callable[..., Any]) -> Callable[..., Any]:
    """What `torch.compiler.assume_constant_result` sets: Dynamo calls it once, while it traces.

    It is given the real module then, and guards on it: compiled code that asked about one module
    is not used for another.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class _Traced(threading.local):
    """What Dynamo traces in one thread: a region on this device, and which trace it is."""

    device_type: str = ""

    def __init__(self) -> None:
        self.context: Callable[[], Any] = lambda: None


class Islands:
    """Calls modules as the rules of a session say; `original` is ``nn.Module.__call__``."""

    def __init__(self, session: Session, original: Callable[..., Any]) -> None:
        self.session = session
        self.rules = session.modules
        self.original = original
        self.fallback = Fallback(session, self)
        self._local = session.local
        self._traced = _Traced()
        self.has_rules = bool(session.policy.modules or session.policy.parameters)
        self.entry_of_strangers: Entry = UNKNOWN if self.has_rules else None

    def call_root(self, *args: Any, **kwargs: Any) -> Any:
        """The call that has opened a region, from inside of it: (module, *its arguments)."""
        local, fallback = self._local, self.fallback
        local.root, local.precision, local.failures = args[0], "lower", 0
        local.counts = fallback.is_on and has_ranks()
        try:
            if self.has_rules:
                self.rules.of_root(args[0])
            if fallback.is_new(args, kwargs):
                return fallback.watched(self._call_known, args, kwargs)
            audit = self.session.audit
            if audit is not None and audit.is_open:
                return audit.forward(self._call_helped, args, kwargs)
            return fallback.helped(self._call_known, args, kwargs)
        finally:
            local.root, local.precision, local.counts = None, "", False

    def call_demoted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call, in the region of this thread, of a module that has just become an island."""
        self.rules.last_region[id(args[0])] = self._local.region
        return self._call_known(args, kwargs)

    def call_own(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device_type: Any = None,
    ) -> Any:
        """Call a function in float32, in which modules run in the precision of the region.

        The region is that of this thread, or one on `device_type` that has ended (in a backward).
        """
        local, detours = self._local, self.session.detours
        region, precision = local.region, local.precision
        device_type = device_type or region
        was_enabled = torch.is_autocast_enabled(device_type)
        args, kwargs = to_float32((args, kwargs))
        detours.append(True)
        try:
            torch.set_autocast_enabled(device_type, False)
            local.region, local.precision = device_type, OWN
            return function(*args, **kwargs)
        finally:
            local.region, local.precision = region, precision
            torch.set_autocast_enabled(device_type, was_enabled)
            detours.pop()
            if region is None:
                local.forget_casts()

    def _call_helped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.fallback.helped(self._call_known, args, kwargs)

    def _call_known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entry = self.rules.table.get(id(args[0]))
        return self._call(entry, self._local.region, args, kwargs)

    def call_nested(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a module that has an entry or was never seen."""
        local, depth = self._local, nesting()
        if local.precision == OWN:
            return self._call(entry or "lower", local.region, args, kwargs)
        if _current_graph_task_id() != -1:
            return self._call_again(entry, depth, args, kwargs)
        if depth != 1 or local.region is None:
            self.rules.last_region.pop(id(args[0]), None)
            return self.original(*args, **kwargs)
        call = self.fallback.helped if local.watch is None else self.fallback.attempt
        return call(self._call_inside, args, kwargs)

    def _call_inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call directly in a region of ours."""
        module, rules, region = args[0], self.rules, self._local.region
        entry = rules.table.get(id(module), self.entry_of_strangers)
        if entry is UNKNOWN:
            entry = rules.of_stranger(module)
            rules.last_region[id(type(module))] = region
            if id(module) not in rules.table:
                return self._call(entry, region, args, kwargs)
        rules.last_region[id(module)] = region
        parts = rules.parts
        if parts.is_mixed and id(module) in parts.plain:
            parts.is_mixed, parts.inside = False, id(module)
            try:
                return self._call(entry, region, args, kwargs)
            finally:
                parts.is_mixed, parts.inside = True, 0
        return self._call(entry, region, args, kwargs)

    def _call_again(
        self, entry: Entry, depth: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Checkpointing runs a forward again in the backward, under the autocast state of then.

        It has to meet the islands of then: they are told by where the module last ran.
        """
        key = id(args[0])
        if entry is UNKNOWN:
            key = id(type(args[0]))
            entry = self.rules.of_unseen(type(args[0]))
        region = self.rules.last_region.get(key) if depth else None
        return self._call(entry if region else None, region, args, kwargs)

    def _call(
        self, entry: Entry, device_type: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a module in its precision; at the borders half tensors become float32.

        Torch keeps one cast of each weight, in whatever dtype was asked first: only islands of the
        region's own dtype may use those. They stay good while float32 runs.
        """
        precision = self.rules.in_force(entry) if isinstance(entry, tuple) else entry
        if not precision:
            return self.original(*args, **kwargs)
        lower = self.session.decisions[device_type].dtype
        dtype = lower if precision == "lower" else _DTYPES[precision]
        was_enabled = torch.is_autocast_enabled(device_type)
        previous = torch.get_autocast_dtype(device_type)
        if dtype is (previous if was_enabled else None):
            return self.original(*args, **kwargs)
        if dtype is torch.float16:
            self.session.start_scaling()
        local, was_cached = self._local, torch.is_autocast_cache_enabled()
        was_in_force = local.precision
        args, kwargs = _arguments_to_float32(args, kwargs)
        try:
            torch.set_autocast_enabled(device_type, dtype is not None)
            if dtype is not None:
                torch.set_autocast_dtype(device_type, dtype)
            torch.set_autocast_cache_enabled(dtype is lower and not local.uncached)
            local.precision = precision
            result = self.original(*args, **kwargs)
        finally:
            local.precision = was_in_force
            torch.set_autocast_enabled(device_type, was_enabled)
            torch.set_autocast_dtype(device_type, previous)
            torch.set_autocast_cache_enabled(was_cached and not local.uncached)
        return result if dtype is None else to_float32(result)

    # What Dynamo traces

    def call_traced_root(self, *args: Any, **kwargs: Any) -> Any:
        """The call for which traced code has just opened a region."""
        self.enter_in_trace(next(args[0].parameters()).device.type)
        if self.rules.ask_names:
            self.learn_in_trace(args[0])
        return self.call_traced(*args, **kwargs)

    def call_traced(self, *args: Any, **kwargs: Any) -> Any:
        """A call inside a region, opened by traced code or outside of it."""
        module, rules = args[0], self.rules
        if self.where_in_trace() == "eager":
            word = self.word_for_class(
                type(module), rules.parts.is_mixed, rules.phase, rules.parts.edition
            )
        else:
            word = self.word_for_class(type(module), True, rules.phase, "")
        if word == "each":
            word = self.word_for_module(module, rules.phase)
        if not word:
            return self.original(*args, **kwargs)
        device_type, _, precision = word.partition(" ")
        arguments, kwargs = half_to_float32((args[1:], kwargs))
        dtype = _DTYPES[precision]
        with torch.autocast(device_type, dtype, dtype is not None, cache_enabled=False):
            result = self.original(module, *arguments, **kwargs)
        return result if dtype is None else half_to_float32(result)

    @_constant_in_traces
    def where_in_trace(self) -> str:
        """Who opened the region around: "eager" code, "traced" code, or nobody ("").

        What eager code is in is looked at once more at the beginning of a trace: modules may have
        come since, and those that are traced do not tell.
        """
        if self._local.region is not None:
            context = torch._guards.TracingContext.get()
            if self._traced.context() is not context:
                self._traced.context = weakref.ref(context)
                self.rules.learn_again()
            return "eager"
        return "traced" if is_in_traced_region() else ""

    @_constant_in_traces
    def enter_in_trace(self, device_type: str) -> str:
        """Note what device the region that traced code opens is for."""
        self._traced.device_type = device_type
        self.rules.has_learned = True
        return ""

    @_constant_in_traces
    def learn_in_trace(self, root: torch.nn.Module) -> str:
        """Find the rules of a root; guarded, so that they hold for what is below as well."""
        self.rules.learn_traced(root)
        return ""

    @_constant_in_traces
    def word_for_class(self, cls: type, is_mixed: bool, phase: str, edition: str) -> str:
        """What a module of this class changes: "each" has to be asked, "cuda float32", nothing."""
        if is_mixed and self.rules.parts.are_told_apart(cls):
            return "each"
        return self._word(self.rules.of_class(cls))

    @_constant_in_traces
    def word_for_module(self, module: torch.nn.Module, phase: str) -> str:
        """What this module changes: "cuda float32", nothing."""
        return self._word(self.rules.of_traced(module))

    def _word(self, candidates: Candidates) -> str:
        precision = self.rules.in_force(candidates)
        if not precision:
            return ""
        device_type = self._local.region or self._traced.device_type
        lower = self.session.decisions[device_type].word
        precision = lower if precision == "lower" else precision
        dtype = _DTYPES[precision]
        is_enabled = torch.is_autocast_enabled(device_type)
        if dtype is (torch.get_autocast_dtype(device_type) if is_enabled else None):
            return ""
        if dtype is torch.float16:
            self.session.start_scaling()
        return f"{device_type} {precision}"


def _arguments_to_float32(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(module, *its arguments), and those by keyword; mostly a few tensors that stay as they are.

    A tensor that is passed twice (query and key) is one tensor still.
    """
    rest = args[1:]
    for value in rest:
        if not isinstance(value, _SIMPLE) or getattr(value, "dtype", None) in HALF:
            break
    else:
        if not kwargs:
            return args, kwargs
    rest, kwargs = to_float32((rest, kwargs))
    return (args[0], *rest), kwargs


def half_to_float32(value: Any) -> Any:
    """`value` with its half tensors as float32, for Dynamo to trace: what pytree knows."""
    done: list[tuple[torch.Tensor, torch.Tensor]] = []

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in HALF:
            return tensor
        for half, full in done:
            if half is tensor:
                return full
        done.append((tensor, tensor.float()))
        return done[-1][1]

    return torch.utils._pytree.tree_map_only(torch.Tensor, cast, value)
