"""A run without mixed precision that tells what it would have been: ``autoamp run --dry``.

The script gets the results of float32. Before the first calls of a root, by shapes and modes, the
same call is made aside in a region, under the probe of `fallback` and the look of the audit. What
it has changed is put back and what it has given is thrown away.
"""

from __future__ import annotations

import contextlib
import copy
import io
import threading
from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from . import contexts, plan, region
from .categories import torchs_lists
from .fallback import MAX_CLASSES, kind_of_call
from .inspection import is_opaque, is_plain, tensors_in
from .kernels import nesting
from .naming import Named, all_below, collect_names
from .policy import DEVICES
from .ranks import has_ranks
from .reporting.audit import FORWARD, Look
from .session import Session
from .snapshots import everything

Module = torch.nn.Module


class _Here(threading.local):
    """What this thread is in: the call of a root, and in that the same call aside; and whether the
    script records gradients.
    """

    in_call = aside = trains = False


def module_call(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`nn.Module.__call__` of a dry run: the original, and looks at first calls of roots."""
    mixed = region.module_call(original, session)
    session.dry = dry = DryRun(session, mixed)
    here = dry.here

    def call(*args: Any, **kwargs: Any) -> Any:  # (module, *its arguments), to be passed on as is
        if here.aside:
            return mixed(*args, **kwargs)
        if region.is_compiling() or here.in_call or not dry.would_open_region(args[0]):
            return original(*args, **kwargs)
        here.in_call, here.trains = True, torch.is_grad_enabled()
        try:
            here.aside = True
            try:
                dry.look(args, kwargs)
            finally:
                here.aside = False
            return original(*args, **kwargs)
        finally:
            here.in_call = False

    return call


def context_entered(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`torch.autocast.__enter__` of a dry run: what is in a model would be inside a region."""
    outside, dry = contexts.context_entered(original, session), session.dry
    assert dry is not None

    def __enter__(self: Any) -> Any:  # noqa: N807 - by its name it is known as no script's
        is_inside = dry.here.in_call and not dry.here.aside
        return original(self) if is_inside else outside(self)

    return __enter__


class DryRun:
    """What the dry run of one session has seen."""

    def __init__(self, session: Session, mixed: Callable[..., Any]) -> None:
        self.session = session
        self.here = _Here()
        self._mixed = mixed
        self._seen: dict[int, set[tuple[Any, ...]]] = session.modules.new_table()
        self._calls = 0
        self._ops: Counter[tuple[str, str, str, str]] = Counter()
        self._obstacles: dict[str, None] = {}

    def would_open_region(self, module: Module) -> bool:
        """Whether this call is outermost, and of a module that runs in lower precision."""
        parameter = region.first_parameter(module) if nesting() == 0 else None
        if parameter is None:
            return False
        if parameter.device.type in DEVICES:
            torchs_lists(parameter.device.type)  # asked before kernels of ours are among them
        return self.session.regions.precision_for(parameter) is not None

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the call of a root aside, if it is one of the first: (module, *its arguments)."""
        module = args[0]
        try:
            if not self._is_new(module, args, kwargs):
                return
            obstacle = _obstacle(module) or self._look(module, args, kwargs)
        except Exception as error:  # noqa: BLE001 - the script's own call says what is wrong
            obstacle = f"{type(error).__name__}: {error}"
        if obstacle:
            self._obstacles[f"{type(module).__name__}: {obstacle}"] = None

    def _look(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        parameter = region.first_parameter(module)
        assert parameter is not None
        restore, look = everything(module, parameter.device.type), Look()
        try:
            for mode in (contextlib.nullcontext(), look):  # once demoted, how it runs from then on
                self._call_aside(mode, args, kwargs)
                restore()
        finally:
            restore()
        self._calls += 1
        self._note(module, parameter.device.type, look)
        return look.obstacle

    def _call_aside(self, mode: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        copies = {id(t): t.detach().clone() for t in tensors_in((args[1:], kwargs))}
        given, named = copy.deepcopy((args[1:], kwargs), copies)
        with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()), mode:
            self._mixed(args[0], *given, **named)

    def _is_new(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        self.session.modules.remember(module)
        seen, kind = self._seen.setdefault(id(module), set()), kind_of_call(args, kwargs)
        if kind in seen or len(seen) >= MAX_CLASSES or any(map(is_lazy, module.parameters())):
            return False
        seen.add(kind)
        return True

    def _note(self, root: Module, device_type: str, look: Look) -> None:
        found: Named = {}
        collect_names(root, found)
        for (op, phase, dtype, key), count in look.names.items():
            module, names = found.get(key, (None, {""}))
            name = min(names) or type(root).__name__ if module is not None else "no module"
            if phase == FORWARD and "float" in dtype:
                self._ops[device_type, op, dtype, name] += count

    def told(self) -> dict[str, Any]:
        """The report's section."""
        where: dict[tuple[str, str, str], Counter[str]] = {}
        for (device, op, dtype, name), count in self._ops.items():
            where.setdefault((dtype, device, op), Counter())[name] += count
        lists = {device: self._lists(device) for _, device, _ in where}
        ops = [
            {
                "op": op,
                "list": lists[device].get(op),
                "device": device,
                "dtype": dtype,
                "count": counts.total(),
                "modules": list(counts),
            }
            for (dtype, device, op), counts in sorted(where.items(), key=_half_and_many_first)
        ]
        return {"calls": self._calls, "ops": ops, "not_looked_at": list(self._obstacles)}

    def _lists(self, device_type: str) -> dict[str, str]:
        """By op, the list of the policy that it is in."""
        word = self.session.decisions[device_type].word
        if word == "off":  # the script turned out to have mixed precision of its own
            return {}
        rows = plan.rows(self.session.policy, device_type, word)
        names = [(*row.op.partition(".")[::2], row.category) for row in rows if row.category]
        return {op: category for op, _, category in sorted(names, key=itemgetter(1), reverse=True)}


def _half_and_many_first(item: tuple[tuple[str, str, str], Counter[str]]) -> tuple[Any, ...]:
    (dtype, device, op), counts = item
    return dtype in ("float32", "float64"), dtype, -counts.total(), op, device


def _obstacle(module: Module) -> str:
    """Why a call cannot be made aside; empty if it can."""
    if has_ranks():
        return "the other ranks would have to take part"
    if any(map(is_opaque, all_below(module))):
        return "compiled and scripted modules are not looked into"
    if not is_plain() or torch._C._len_torch_dispatch_stack():
        return "a mode of the script, a transform or a capture was on"
    return ""
