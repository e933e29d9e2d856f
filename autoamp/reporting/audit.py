"""One training step looked at op by op: what ran in which precision, and how well it fitted.

The step after the warm-up is looked at where a report is asked for; before and after that nothing
is. A dispatch mode counts the ops of module calls and of backwards. It changes no number: what it
computes for itself no mode, hook, graph or random state sees. Compiled code, scripted modules and
what captures or transforms are left alone.
"""

from __future__ import annotations

import bisect
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from ..casting import HALF
from ..graphs import COMPILED, AccumulateGrad, executed
from ..inspection import (
    Watcher,
    has_numbers,
    is_opaque,
    is_plain,
    is_unreal,
    quietly,
    tensors_in,
    to_float32,
)
from ..naming import Named, all_below, collect_names

if TYPE_CHECKING:
    from ..session import Session

Module = torch.nn.Module
Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]
WARM_UP = 3
"""Steps before the one that is looked at: first calls are inspected, and a scale is looked for."""
TRIES = 3
"""How many steps may be given up because nothing in them could be looked at."""
OTHERS = 16
"""How many steps of other optimizers a step may contain, as in adversarial training."""
MAX_MODULES = 1000
"""In a report: of larger models, what is further down is added to what is above it."""
MAX_ELEMENTS = 2**26
"""Results with more numbers are not computed again in float32 to see what was lost."""

_current_graph_task_id = torch._C._current_graph_task_id
_current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
_next_number: Callable[[], int] | None = getattr(torch._C._autograd, "_get_sequence_nr", None)
_CALL = torch.nn.Module._call_impl.__code__
_COPIES = {"aten::_to_copy": 0, "aten::copy_": 1}
"""Ops that move numbers between tensors, and which argument they move: casts if dtypes differ."""
_NO_WORK = {"aten::detach", "aten::alias", "aten::lift_fresh", "aten::_unsafe_view", "aten::empty"}
_NO_WORK |= {f"aten::{name}" for name in ("empty_like", "new_empty", "empty_strided")}
_NO_WORK |= {"aten::new_empty_strided", "aten::clone", "aten::resize_", "aten::set_"}
"""Ops that compute nothing; views do not either."""
FORWARD, BACKWARD = "forward", "backward"


def nothing(why: str) -> dict[str, Any]:
    """What a report says where no step was audited."""
    ops: dict[str, Any] = {FORWARD: {}, BACKWARD: {}}
    return {"step": None, "missing": why, "ops": ops, "names": [], "casts": {}, "modules": []}


class Audit:
    """Waits for the step, has it looked at, and keeps the `result` as plain data."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.is_open = False
        self.result = nothing(f"a step is audited after {WARM_UP} steps; there were fewer")
        self._steps = self._inside = self._tries = self._thread = 0
        self._optimizer: Callable[[], Any] = lambda: None
        self._look: Look | None = None

    def step_ended(self, optimizer: Any) -> None:
        """An optimizer has stepped, or skipped a step: one training step may begin or end here.

        It goes from the end of one step of an optimizer to the end of the next of the same one.
        """
        if not self.is_open:
            self._steps += 1
            if self._steps >= WARM_UP:
                self._open(optimizer)
            return
        self._inside += 1
        if self._thread == threading.get_ident() and (
            self._optimizer() is optimizer or self._inside >= OTHERS
        ):
            self._close(optimizer)

    def forward(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call of a root, (module, *its arguments), while a step is looked at."""
        look = self._look
        is_training = torch.is_grad_enabled()
        if look is None or not is_training or not self._may_look(look) or not look.takes(args[0]):
            return run(args, kwargs)
        look.border()
        with look:
            return run(args, kwargs)

    def backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What runs the engine, while a step is looked at."""

        def backward(*args: Any, **kwargs: Any) -> Any:
            look = self._look
            if look is None or not self._may_look(look) or not look.has_plain_graph(args[0]):
                return original(*args, **kwargs)
            return look.run_backward(original, args, kwargs)

        return backward

    def _may_look(self, look: Look) -> bool:
        if look.is_running or threading.get_ident() != self._thread or not is_plain():
            return False
        if torch._C._len_torch_dispatch_stack():
            look.obstacle = "a dispatch mode of the script was on"
            return False
        return True

    def _open(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._inside, self._thread = 0, threading.get_ident()
        self._look, self.is_open = Look(), True

    def _close(self, optimizer: Any) -> None:
        look, self._look, self.is_open = self._look, None, False
        assert look is not None
        self._tries += 1
        if look.has_seen_a_forward:
            self.result = look.told(self.session.modules.steps())
            self._retire()
        elif self._tries >= TRIES:
            self.result = nothing(look.obstacle or "no module ran in mixed precision in that step")
            self._retire()
        else:
            self._open(optimizer)

    def _retire(self) -> None:
        self.session.audit = None


class _Row:
    """What one module's own code did in one phase; numbers wait on the device."""

    def __init__(self) -> None:
        self.ops: Counter[str] = Counter()
        self.casts = 0
        self.largest: list[tuple[torch.Tensor, float]] = []
        self.lost: list[tuple[torch.Tensor, torch.Tensor]] = []


class Look(Watcher):
    """Sees each op of a forward or backward, and which module it belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.is_running = False
        self.has_seen_a_forward = False
        self.obstacle = ""
        self._roots: dict[int, Module] = {}
        self._modules: dict[int, Module] = {}
        self._rows: dict[tuple[int, str], _Row] = {}
        self.names: Counter[tuple[str, str, str, int]] = Counter()
        """By op, phase, dtype, and the id of the module whose own code ran it."""
        self._casts: Counter[str] = Counter()
        self._borders: list[tuple[int, int]] = []  # up to which node of the graph is whose
        self._thread = threading.get_ident()

    def __enter__(self) -> Any:
        self.is_running = True
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        self.is_running = False
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    # What is looked at

    def takes(self, root: Module) -> bool:
        """Whether the call of this root is looked at: it is made of plain modules."""
        if id(root) not in self._roots and any(map(is_opaque, all_below(root))):
            self.obstacle = "compiled and scripted modules are not looked into"
            return False
        self._roots[id(root)] = root
        return True

    def has_plain_graph(self, roots: Any) -> bool:
        """Whether no compiled code is in the graph that this backward starts from."""
        if any(type(node).__name__ == COMPILED for node in executed(roots, ())):
            self.obstacle = "compiled code is not looked into"
            return False
        return True

    def run_backward(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the engine; in stack traces this function is where the backward begins."""
        with self:
            return original(*args, **kwargs)

    def border(self, module: Module | None = None) -> None:
        """Nodes of the graph made since the last border are this module's, or nobody's.

        It comes with each op: a node is made before the op that it is for.
        """
        if _next_number is not None and threading.get_ident() == self._thread:
            self._borders.append((_next_number(), 0 if module is None else self._key(module)))

    # Ops

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload):
            try:
                self._note(func, args, kwargs or {}, result)
            except Exception as error:  # noqa: BLE001 - the program goes on as if nobody looked
                self.obstacle = f"the audit failed: {type(error).__name__}: {error}"
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        phase = BACKWARD if _current_graph_task_id() != -1 else FORWARD
        key = self._whose(phase)
        if any(map(is_unreal, tensors_in((args, kwargs, result)))):
            return
        name = func._schema.name
        found = [t for t in tensors_in(result) if t.is_floating_point()] or list(tensors_in(result))
        if func.is_view or name in _NO_WORK or not found:
            return
        self.has_seen_a_forward |= phase == FORWARD
        row = self._rows.setdefault((key, phase), _Row())
        if name in _COPIES:
            self._note_cast(row, args[_COPIES[name]], found[0])
        else:
            dtype = _word(found[0].dtype)
            row.ops[dtype] += 1
            self.names[name.removeprefix("aten::"), phase, dtype, key] += 1
        self._measure(row, phase, func, args, kwargs, result)

    def _note_cast(self, row: _Row, given: Any, made: torch.Tensor) -> None:
        is_cast = isinstance(given, torch.Tensor) and given.dtype is not made.dtype
        if is_cast and given.is_floating_point() and made.is_floating_point():
            row.casts += 1
            self._casts[f"{_word(given.dtype)} to {_word(made.dtype)}"] += 1

    def _measure(
        self, row: _Row, phase: str, func: Any, args: Any, kwargs: Any, result: Any
    ) -> None:
        """The largest finite number of results in half, and what became zero only because of it."""
        halves = [t for t in tensors_in(result) if t.dtype in HALF and has_numbers(t)]
        halves = [tensor for tensor in halves if tensor.numel()]
        with quietly():
            for half in halves:
                size = torch.where(half.isfinite(), half, 0).abs().amax()
                row.largest.append((size.float(), torch.finfo(half.dtype).max))
            if phase == BACKWARD and halves:
                exact = _in_float32(func, args, kwargs, halves)
                pairs = zip(halves, exact, strict=True) if exact else ()
                for half, full in pairs:
                    row.lost.append((((half == 0) & (full != 0)).sum(), (full != 0).sum()))

    # Whose they are

    def _whose(self, phase: str) -> int:
        """The id of the module whose own code runs, or made the node that runs; 0 for nobody's."""
        module = _innermost_module(_RUN_BACKWARD if phase == BACKWARD else None)
        if module is not None:
            self.border(module)
            return self._key(module)
        node = _current_node() if phase == BACKWARD else None
        if node is None or type(node) is AccumulateGrad:
            return 0
        at = bisect.bisect_right(self._borders, (node._sequence_nr(), sys.maxsize))
        return self._borders[at][1] if at < len(self._borders) else 0

    def _key(self, module: Module) -> int:
        self._modules[id(module)] = module
        return id(module)

    # What it comes to

    def told(self, step: int) -> dict[str, Any]:
        """The report's section; here the device is waited for."""
        with quietly():
            modules = _tree(self._roots, self._modules, self._read())
        ops: dict[str, Counter[str]] = {FORWARD: Counter(), BACKWARD: Counter()}
        for (_, phase), row in self._rows.items():
            ops[phase] += row.ops
        names: Counter[tuple[str, str, str]] = Counter()
        for (op, phase, dtype, _), count in self.names.items():
            names[op, phase, dtype] += count
        return {
            "step": step,
            "missing": self.obstacle,
            "ops": {phase: _sorted(counts) for phase, counts in ops.items()},
            "names": [
                {"op": op, "phase": phase, "dtype": dtype, "count": count}
                for (op, phase, dtype), count in names.most_common()
            ],
            "casts": _sorted(self._casts),
            "modules": modules,
        }

    def _read(self) -> dict[int, dict[str, Any]]:
        """By module: its ops, and its numbers off the device, one transfer for each kind of it."""
        found: dict[int, dict[str, Any]] = {}
        for (key, phase), row in self._rows.items():
            entry = found.setdefault(key, {"casts": 0})
            entry[phase] = row.ops
            entry["casts"] += row.casts
            sizes = _off_device([size for size, _ in row.largest])
            if sizes:
                entry[f"{phase} largest"] = max(sizes)
                rooms = zip(sizes, (limit for _, limit in row.largest), strict=True)
                entry[f"{phase} room"] = min(
                    limit / size if size else limit for size, limit in rooms
                )
            if row.lost:
                entry["lost"] = sum(_off_device([lost for lost, _ in row.lost]))
                entry["nonzero"] = sum(_off_device([of for _, of in row.lost]))
        return found


_RUN_BACKWARD = Look.run_backward.__code__


def _innermost_module(outermost: Any) -> Module | None:
    """The module whose call is the innermost on this thread's stack, up to a frame of that code.

    Asking the stack leaves no hook on anything, and no number changes.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is _CALL:
            module = frame.f_locals.get("self")
            return module if isinstance(module, Module) else None
        if frame.f_code is outermost:
            return None
        frame = frame.f_back
    return None


def _in_float32(func: Any, args: Any, kwargs: Any, halves: list[Any]) -> list[torch.Tensor]:
    """The results of an op that are half, computed again in float32; nothing where that fails."""
    if func._schema.name == "aten::_to_copy":
        return [args[0]]
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    too_many = sum(half.numel() for half in halves) > MAX_ELEMENTS
    if is_random or too_many or func._schema.is_mutable:
        return []
    try:
        result = func(*to_float32(args), **to_float32(kwargs))
    except RuntimeError:  # kernels that know only half; no memory
        return []
    exact = [t for t in tensors_in(result) if t.is_floating_point() and t.numel()]
    fits = [e.shape for e in exact] == [h.shape for h in halves]
    return exact if fits else []


def _off_device(values: list[torch.Tensor]) -> list[float]:
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for value in values:
        by_device.setdefault(value.device, []).append(value)
    return [number for some in by_device.values() for number in torch.stack(some).tolist()]


def _tree(
    roots: dict[int, Module], modules: dict[int, Module], found: dict[int, dict[str, Any]]
) -> list[dict[str, Any]]:
    """A row for each module of each root, in the order of their names; others come last."""
    rows: list[dict[str, Any]] = []
    words: Counter[str] = Counter()
    told: set[int] = set()
    for root in roots.values():
        named: Named = {}
        collect_names(root, named)
        word = type(root).__name__
        words[word] += 1
        word = word if words[word] == 1 else f"{word} {words[word]}"
        entries = [
            (min(names), module) for module, names in named.values() if id(module) not in told
        ]
        told.update(id(module) for _, module in entries)
        rows += _folded(word, entries, found)
    strangers = {key: module for key, module in modules.items() if key not in told}
    counts: Counter[str] = Counter()
    for key, module in strangers.items():
        counts[type(module).__name__] += 1
        name = f"{type(module).__name__} {counts[type(module).__name__]}"
        rows.append(_row("in no tree", name, module, found.get(key, {})))
    if 0 in found:
        rows.append(_row("outside of modules", "", None, found[0]))
    return rows


def _folded(
    root: str, entries: list[tuple[str, Module]], found: dict[int, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The rows of one root; of too many modules the deep ones are added to those above them."""
    depth = max((name.count(".") for name, _ in entries), default=0)
    while depth and sum(name.count(".") <= depth for name, _ in entries) > MAX_MODULES:
        depth -= 1
    kept = {name: (module, dict(found.get(id(module), {}))) for name, module in entries}
    for name in [name for name in kept if name.count(".") > depth]:
        above = kept.get(".".join(name.split(".")[: depth + 1]))
        if above is not None:
            _add(above[1], kept.pop(name)[1])
    for name, (module, numbers) in kept.items():
        yield _row(root, name, module, numbers)


def _add(numbers: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if key not in numbers:
            numbers[key] = value
        elif key.endswith("largest"):
            numbers[key] = max(numbers[key], value)
        elif key.endswith("room"):
            numbers[key] = min(numbers[key], value)
        else:
            numbers[key] = numbers[key] + value


def _row(root: str, name: str, module: Module | None, numbers: dict[str, Any]) -> dict[str, Any]:
    forward = _sorted(numbers.get(FORWARD, {}))
    nonzero = numbers.get("nonzero", 0)
    own = [] if module is None else module.__dict__.get("_parameters", {}).values()
    return {
        "root": root,
        "name": name,
        "type": "" if module is None else type(module).__name__,
        "parameters": sum(_numel(p) for p in own if p is not None),
        "precision": " + ".join(word for word in forward if word in _FLOATS),
        "forward": forward,
        "backward": _sorted(numbers.get(BACKWARD, {})),
        "casts": numbers.get("casts", 0),
        "largest": numbers.get("forward largest"),
        "head_room": numbers.get("forward room"),
        "largest_gradient": numbers.get("backward largest"),
        "gradient_head_room": numbers.get("backward room"),
        "underflow": numbers.get("lost", 0) / nonzero if nonzero else None,
    }


_FLOATS = ("float16", "bfloat16", "float32", "float64")


def _numel(parameter: torch.Tensor) -> int:
    try:
        return parameter.numel()
    except Exception:  # noqa: BLE001 - lazy parameters have no size yet
        return 0


def _sorted(counts: dict[str, int]) -> dict[str, int]:
    """The largest first, and by name where two are equal."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
