"""Where lower precision is on: from the outermost module call in to its results out.

torch counts autocast contexts in one thread-local number, the script's own and `enabled=False` ones
included. A region opens only where that number was zero, so the innermost explicit context always
wins and no counter of ours is needed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import formats, policy
from .casting import HALF, to_float32
from .devices import TORCH_DTYPES
from .islands import Islands, half_to_float32
from .kernels import MARK, nesting
from .ranks import collectives, has_own_precision, has_ranks
from .session import Session
from .standing import Standing

enter_nesting = torch.autocast_increment_nesting
leave_nesting = torch.autocast_decrement_nesting
# False, at the cost of one call; Dynamo knows it and reads True.
is_compiling = torch.compiler.is_dynamo_compiling
_current_graph_task_id = torch._C._current_graph_task_id
_tracing_state = torch._C._get_tracing_state
_open_modes = torch._C._len_torch_dispatch_stack

_NONE: dict[str, Any] = {}
STAYS_OUT = object()
FSDP = "torch.distributed.fsdp"
"""Loaded wherever models are sharded."""
_PARAMETER = torch.nn.Parameter
WITH_WEIGHT = (
    "linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "conv_tbc",
    "prelu",
)
"""The functions of `torch.nn.functional` whose second operand is a weight."""


class Regions:
    """Opens and closes the regions of one session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.standing: dict[int, Standing] = session.modules.new_table()
        """The roots that stay float32."""
        self._left: dict[int, bool] = session.modules.new_table()
        self._lays_out = session.policy.performance.memory_format != "keep"
        self._half_models_seen = self._traced_backward_seen = False

        def word_for_compiled(device_type: str) -> str:
            dtype = self._decide(torch.device(device_type))
            if dtype is None or (dtype is torch.float16 and self._is_backward_traced()):
                return "off"
            return str(dtype).removeprefix("torch.")

        # What torch.compiler.assume_constant_result sets: Dynamo calls this once, while it traces,
        # and keeps the answer, instead of tracing how we announce and remember it.
        word_for_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]
        self.word_for_compiled = word_for_compiled

    def precision_for(self, tensor: torch.Tensor) -> torch.dtype | None:
        """The dtype of a region whose root is told by `tensor`, or None: stay out.

        Out stays what is not float32 work of its own: calls from inside the autograd engine
        (recomputation brings its context along, or says that there was none), tracing and export
        (they see the float32 program), models that are half already.
        """
        session = self.session
        if _current_graph_task_id() != -1 and not session.local.recomputes:
            return None
        if not session.active or _is_tracing():
            return None
        if tensor.dtype is not torch.float32 and tensor.dtype in HALF:
            self._note_half_model(tensor)
            return None
        device_type = tensor.device.type
        if device_type == "meta" or torch.is_autocast_enabled(device_type):
            return None
        decision = session.decisions.get(device_type)
        return self._decide(tensor.device) if decision is None else decision.dtype

    def run_root(
        self,
        call_root: Callable[..., Any],
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The outermost call of a module. `STAYS_OUT`: it is none, or opens no region; nothing was
        called.
        """
        root = args[0]
        if enter_nesting() == 1 and (parameter := first_parameter(root)) is not None:
            device_type = parameter.device.type
            stands = None if self.session.local.repeats else self.standing.get(id(root))
            if stands is not None and stands.covers(device_type, args, kwargs):
                leave_nesting()
                return self._pass_by(original, args, kwargs)
            dtype = self.precision_for(parameter)
            if dtype is not None:
                run = self.run if FSDP not in sys.modules else self.run_or_leave
                return run(device_type, dtype, call_root, args, kwargs)
            self._note_declined(root, device_type)
        leave_nesting()
        return STAYS_OUT

    def _pass_by(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a root that stays float32: nothing that it calls is asked."""
        local = self.session.local
        local.stands = True
        try:
            return original(*args, **kwargs)
        finally:
            local.stands = False

    def stand(self, root: torch.nn.Module, stands: Standing) -> None:
        """Have a root stay out from now on."""
        self.session.modules.remember(root)
        self.standing[id(root)] = stands

    def _note_declined(self, root: torch.nn.Module, device_type: str) -> None:
        """Where a device gains nothing, what a root calls need not be asked one by one."""
        decision = self.session.decisions.get(device_type)
        if decision is not None and decision.dtype is None and id(root) not in self.standing:
            is_all_there = all(p.device.type == device_type for p in root.parameters())
            self.stand(root, Standing(device_type if is_all_there else ""))

    def run(
        self,
        device_type: str,
        dtype: torch.dtype,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call `function` in a region. The caller has counted the nesting up; it comes down here.

        The C-level switches of ``with torch.autocast``, without what it does around them. What is
        as it should be already is not set, and not set back.
        """
        local = self.session.local
        previous = torch.get_autocast_dtype(device_type)
        weights = self.session.weights
        if weights.is_on:
            weights.has_ranks = has_ranks()
            if weights.evaluates and torch.is_grad_enabled():
                weights.end_evaluation()
        try:
            torch.set_autocast_enabled(device_type, True)
            if previous is not dtype:
                torch.set_autocast_dtype(device_type, dtype)
            local.region = device_type
            result = function(*args, **kwargs)
        finally:
            local.region = None
            torch.set_autocast_enabled(device_type, False)
            if previous is not dtype:
                torch.set_autocast_dtype(device_type, previous)
            leave_nesting()
            local.forget_casts()
            if getattr(local, "uncached", False):
                local.uncached = False
                torch.set_autocast_cache_enabled(True)
        self.session.counts.regions += 1
        if self.session.policy.outputs == "keep":
            return result
        came_in = (*args, *kwargs.values())
        if self._lays_out and not formats.uses_channels_last(came_in):
            return to_float32(result, came_in, formats.full_and_contiguous)
        return to_float32(result, came_in)

    def _decide(self, device: torch.device) -> torch.dtype | None:
        """The decision at the first region of a device, which is told to the loss scale too."""
        dtype = self.session.decide(device).dtype
        if dtype is torch.float16:
            self.session.start_scaling()
        return dtype

    def _is_backward_traced(self) -> bool:
        """Whether Dynamo is told to put backwards into its graphs, where no loss is scaled."""
        config = sys.modules["torch._dynamo.config"]
        is_traced = self.session.may_scale and getattr(config, "trace_autograd_ops", False)
        if is_traced and not self._traced_backward_seen:
            self._traced_backward_seen = True
            self.session.speech.notice(
                "autoamp: torch._dynamo.config.trace_autograd_ops puts backwards into compiled "
                "graphs, where no loss is scaled: compiled code stays float32"
            )
        return is_traced

    def run_or_leave(
        self,
        device_type: str,
        dtype: torch.dtype,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """`run`, but where the module is sharded with mixed precision of its own: that wins."""
        if not self._is_left(args[0]):
            return self.run(device_type, dtype, function, args, kwargs)
        leave_nesting()
        with exempted():
            return self.session.islands.original(*args, **kwargs)

    def _is_left(self, module: torch.nn.Module) -> bool:
        answer = self._left.get(id(module))
        if answer is None:
            self.session.modules.remember(module)
            answer = self._left[id(module)] = has_own_precision(module)
            if answer:
                self.session.speech.notice(
                    f"autoamp: {type(module).__name__} is left to the mixed precision that it is "
                    "sharded with"
                )
        return answer

    def _note_half_model(self, tensor: torch.Tensor) -> None:
        if not self._half_models_seen:
            self._half_models_seen = True
            self.session.speech.notice(
                f"autoamp: a model with {tensor.dtype} parameters is left as it is"
            )


def module_call(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`nn.Module.__call__`: the outermost call of a module that owns a parameter is a region.

    Inside of it a module may be an island, by a rule or because half precision broke it.
    """
    islands = session.islands = Islands(session, original)
    regions, may_cure = session.regions, islands.fallback.may_cure
    entry_of, local, detours = session.modules.table.get, session.local, session.detours
    has_rules, entry_of_strangers = islands.has_rules, islands.entry_of_strangers
    call_root = _root_call(islands, session)
    traced_root = islands.call_traced_root if has_rules else original

    def call(*args: Any, **kwargs: Any) -> Any:  # (module, *its arguments), to be passed on as is
        if is_compiling():
            if has_rules and islands.where_in_trace():
                return islands.call_traced(*args, **kwargs)
            return _compiled_call(original, traced_root, regions, args, kwargs)
        if local.region is None:  # in one of ours no other opens
            if local.stands:
                return original(*args, **kwargs)
            result = regions.run_root(call_root, original, args, kwargs)
            if result is not STAYS_OUT:
                return result
        entry = entry_of(id(args[0]), entry_of_strangers)
        if detours or (entry is not None and entry != local.precision):
            return islands.call_nested(entry, args, kwargs)
        mark = collectives() if local.counts else 0
        try:
            return original(*args, **kwargs)
        except Exception as error:
            if not may_cure(error):
                raise
            trouble = error
        return islands.fallback.again(trouble, args, kwargs, mark)

    return call


def _root_call(islands: Islands, session: Session) -> Callable[..., Any]:
    """What is called where a region has been opened; looked at, where it was never called."""
    looks = islands.has_rules or islands.fallback.is_on or session.audit is not None
    call_root = islands.call_root if looks else islands.original
    stand_down = session.stand_down
    if stand_down is None:
        return call_root

    def call(*args: Any, **kwargs: Any) -> Any:
        if id(args[0]) in stand_down.decided or session.local.repeats:
            return call_root(*args, **kwargs)
        return stand_down.decide(call_root, args, kwargs)

    return call


def functional_call(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """An op of `torch.nn.functional`: outside any module, with float32, a region of one op.

    One that takes a weight is none where that is plain data: windows and fixed filters. Tensor
    subclasses, modes and `torch.fx` override what they see as this function, which is ours.
    """
    regions, local, inside = session.regions, session.local, original
    is_overridden = torch.overrides.has_torch_function
    override = torch.overrides.handle_torch_function
    takes_weight = original.__name__ in WITH_WEIGHT
    performance = session.policy.performance
    if takes_weight and (session.weights.is_on or performance.memory_format != "keep"):
        inside = _with_our_casts(original, session)

    def op(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        if is_overridden(args) or (kwargs and is_overridden(tuple(kwargs.values()))):
            return override(op, (*args, *kwargs.values()), *args, **kwargs)
        if local.region is not None:
            return inside(*args, **kwargs)
        if local.stands:
            return original(*args, **kwargs)
        if enter_nesting() == 1:
            first = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(first, torch.Tensor):
                dtype = regions.precision_for(first) if first.dtype is torch.float32 else None
                weight = args[1] if len(args) > 1 else kwargs.get("weight")
                is_plain = takes_weight and not getattr(weight, "requires_grad", True)
                if dtype is not None and (isinstance(weight, _PARAMETER) or not is_plain):
                    return regions.run(first.device.type, dtype, inside, args, kwargs)
        leave_nesting()
        return original(*args, **kwargs)

    session.stand_ins[op] = original
    return op


def _with_our_casts(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """The op as it is called directly in a region, where autoamp casts what torch would cast.

    A weight that gets no gradient is cast once; convolutions are laid out as the policy says. Where
    the policy has a kernel for the op, that does it: it wants to see the parameter. Inside of a
    script's own context torch casts.
    """
    local, weights, ours = session.local, session.weights, session.kernels.families
    name, gradients_are_on = original.__name__, torch.is_grad_enabled
    devices = formats.DEVICES[session.policy.performance.memory_format]
    devices = devices if name in formats.CONVOLUTIONS else ()

    def op(*args: Any, **kwargs: Any) -> Any:
        weight: Any = args[1] if len(args) > 1 else kwargs.get("weight")
        region = local.region
        has_layout = region in devices
        gets_gradient = type(weight) is not _PARAMETER or (
            weight.requires_grad and gradients_are_on()
        )
        if weight is None or (gets_gradient and not has_layout):
            return original(*args, **kwargs)
        is_there = weight.is_cpu if region == "cpu" else weight.device.type == region
        if not is_there or (name, region) in ours or not _is_directly_in(region):
            return original(*args, **kwargs)
        dtype = torch.get_autocast_dtype(region)
        layout = torch.preserve_format
        if has_layout and args:
            args, layout = (formats.laid_out(args[0], dtype), *args[1:]), formats.CHANNELS_LAST
        weight = weights.of(weight, dtype, layout)
        if len(args) < 2:
            return original(*args, **{**kwargs, "weight": weight})
        if len(args) < 3 or type(args[2]) is not _PARAMETER:
            return original(args[0], weight, *args[2:], **kwargs)
        return original(args[0], weight, weights.of(args[2], dtype), *args[3:], **kwargs)

    return op


def _is_directly_in(device_type: str) -> bool:
    """Whether the innermost autocast context is our region on such a device, and it is enabled."""
    return nesting() == 1 and torch.is_autocast_enabled(device_type)


def in_float32(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """A function that records a program (`torch.jit.trace`): it sees the float32 one."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        with exempted():
            return original(*args, **kwargs)

    return traced


def first_parameter(module: torch.nn.Module) -> torch.nn.Parameter | None:
    """The first parameter that `module` or a descendant owns, without slow generators."""
    parts = module.__dict__  # a module whose __init__ has not run yet has neither entry
    for parameter in parts.get("_parameters", _NONE).values():
        if parameter is not None:
            return parameter  # type: ignore[no-any-return]
    for child in parts.get("_modules", _NONE).values():
        if child is not None and (found := first_parameter(child)) is not None:
            return found
    return None


@contextlib.contextmanager
def exempted() -> Iterator[None]:
    """No region opens in here, an open one is interrupted: autocast disabled on every device."""
    enabled = {
        name: torch.is_autocast_enabled(name)
        for name in policy.DEVICES
        if torch.amp.is_autocast_available(name)
    }
    enter_nesting()
    for name in enabled:
        torch.set_autocast_enabled(name, False)
    try:
        yield
    finally:
        for name, was_enabled in enabled.items():
            torch.set_autocast_enabled(name, was_enabled)
        if leave_nesting() == 0:
            torch.clear_autocast_cache()


def _compiled_call(
    original: Callable[..., Any],
    inside: Callable[..., Any],
    regions: Regions,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A module call that Dynamo traces: the region becomes a part of the graph.

    Dynamo cannot see the nesting; autocast being on already is what tells an inner module from the
    outermost one. `inside` is what is called in the region, in the place of `original`.
    """
    parameter = next(args[0].parameters(), None)
    if parameter is None or _is_exporting() or torch.is_autocast_enabled(parameter.device.type):
        return original(*args, **kwargs)
    word = regions.word_for_compiled(parameter.device.type)
    if word == "off" or parameter.dtype in HALF:
        return original(*args, **kwargs)
    region = torch.autocast(parameter.device.type, TORCH_DTYPES[word], cache_enabled=False)
    with region, torch.autocast(*MARK, enabled=False):
        result = inside(*args, **kwargs)
    if regions.session.policy.outputs == "keep":
        return result
    return half_to_float32(result)


def is_functionalizing() -> bool:
    """Whether a compiler or `make_fx` is turning what runs here into a graph."""
    modes = torch._C._TorchDispatchModeKey
    return (
        torch._C._get_dispatch_mode(modes.PROXY) is not None
        or torch._C._get_dispatch_mode(modes.FUNCTIONAL) is not None
    )


def _is_tracing() -> bool:
    return (
        _tracing_state() is not None
        or _is_exporting()
        or (_open_modes() > 0 and is_functionalizing())
    )


def _is_exporting() -> bool:
    """What `torch.compiler.is_exporting` says, which Dynamo of torch 2.11 takes for always true."""
    return torch.compiler._is_exporting_flag
