"""Scaled backward: inside torch gradients carry the scale, inside user code they never do.

Each run of the autograd engine is a `Pass`. The scale enters with the seed gradient; before the
engine's caller gets control back, also on an exception, the gradients of every reached leaf are
checked and unscaled in place. On CUDA hooks and custom Functions run on the engine's own threads,
where a plain thread-local is empty: the pass travels in the thread-local state that torch hands to
them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .casting import HALF
from .region import is_functionalizing
from .scaling import any_of, check, inverse_of, multiply_, unscale_
from .session import Session

_KEY = "autoamp.pass"
_HALF_SEED_LIMIT = 32768.0
"""The largest power of two that float16 holds: a seed for a half root cannot be larger."""

_AccumulateGrad: Any = type(
    torch.autograd.graph.get_gradient_edge(torch.zeros((), requires_grad=True)).node
)


_NOTHING = contextlib.nullcontext()


class Pass:
    """One run of the engine: its gradients carry `scale`, and so does the ``.grad`` of `leaves`."""

    def __init__(self, scale: torch.Tensor, inverse: torch.Tensor, outer: Pass | None) -> None:
        self.scale = scale
        self.inverse = inverse
        self.outer = outer
        self.leaves: dict[int, torch.Tensor] = {}
        self.flags: list[torch.Tensor] = []

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether this pass or one around it has the tensor's gradient in scaled units already."""
        return id(tensor) in self.leaves or (self.outer is not None and self.outer.owns(tensor))

    def take(self, tensors: list[torch.Tensor]) -> None:
        """Make these tensors' gradients scaled ones: what they hold already is multiplied."""
        if self.leaves or self.outer is not None:
            tensors = [tensor for tensor in tensors if not self.owns(tensor)]
        self.leaves.update(zip(map(id, tensors), tensors, strict=True))
        grads = [grad for tensor in tensors if (grad := tensor.grad) is not None]
        if grads:
            grads = _plain(tensors, grads, self.scale)
            with torch.no_grad():
                multiply_(grads, self.scale)

    def settle(self, tensor: torch.Tensor | None = None) -> None:
        """Give this tensor its true gradient back, or all of them; note whether it is finite."""
        tensors = list(self.leaves.values())
        if tensor is not None:
            tensors = [self.leaves.pop(id(tensor))] if id(tensor) in self.leaves else []
        else:
            self.leaves.clear()
        grads = [grad for tensor in tensors if (grad := tensor.grad) is not None]
        if grads:
            grads = _plain(tensors, grads, self.inverse, self.flags)
            with torch.no_grad():
                self.flags += unscale_(grads, self.inverse)

    def to_true(self, value: Any) -> Any:
        """Gradients as user code sees them: unscaled, half ones as float32."""
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            value = value.float() if value.dtype in HALF else value
            return value * self.inverse.to(value.device, non_blocking=True)
        if isinstance(value, (tuple, list)):
            return type(value)(self.to_true(item) for item in value)
        return value

    def to_scaled(self, value: Any, like: Any = None) -> Any:
        """What user code returned, for the engine: scaled, in the dtypes of `like` if given."""
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            scaled = value * self.scale.to(value.device, non_blocking=True)
            return scaled.to(like.dtype) if isinstance(like, torch.Tensor) else scaled
        if isinstance(value, (tuple, list)):
            known = isinstance(like, (tuple, list)) and len(like) == len(value)
            return type(value)(map(self.to_scaled, value, like if known else [None] * len(value)))
        return value


def _plain(
    tensors: list[torch.Tensor],
    grads: list[torch.Tensor],
    factor: torch.Tensor,
    flags: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """The gradients that can be edited in place.

    One with a graph (``create_graph``) is multiplied, checked and replaced here instead, so that it
    can be differentiated again.
    """
    if not any(grad.requires_grad for grad in grads):
        return grads
    for tensor in tensors:
        if tensor.grad is not None and tensor.grad.requires_grad:
            tensor.grad = tensor.grad * factor
            if flags is not None:
                flags += check([tensor.grad])
    return [grad for grad in grads if not grad.requires_grad]


class UserCode:
    """Stands in a pass's place while a hook or Function of the user runs: gradients are true."""

    def __init__(self, outer: Pass) -> None:
        self.outer = outer


def current() -> Pass | UserCode | None:
    """What the engine is running on this thread, engine threads included."""
    if torch._C._is_key_in_tls(_KEY):
        return torch._C._get_obj_in_tls(_KEY)  # type: ignore[no-any-return]
    return None


def run_in(value: Pass | UserCode, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` while `value` is what runs, on this thread and on those of the engine."""
    before = current()
    torch._C._stash_obj_in_tls(_KEY, value)
    try:
        return function(*args, **kwargs)
    finally:
        if before is None:
            _forget(_KEY)
        else:
            torch._C._stash_obj_in_tls(_KEY, before)


def _overwrite(key: str) -> None:
    torch._C._stash_obj_in_tls(key, None)


# Erasing is safer at thread exit, says torch/autograd/graph.py; older versions can only overwrite.
_forget: Callable[[str], None] = getattr(torch._C, "_remove_obj_from_tls", _overwrite)


def engine_run_backward(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """What `torch.autograd.backward` and `grad` come down to, with their arguments in order."""

    def _engine_run_backward(
        roots: Any,
        seeds: Any,
        retain_graph: bool,
        create_graph: bool,
        inputs: Any,
        allow_unreachable: bool,
        accumulate_grad: bool,
    ) -> Any:
        def run(seeds: Any, retain_graph: bool = retain_graph) -> Any:
            return original(
                roots,
                seeds,
                retain_graph,
                create_graph,
                inputs,
                allow_unreachable,
                accumulate_grad=accumulate_grad,
            )

        in_region = getattr(session.local, "region", None) is not None
        with _autocast_off(session) if in_region else _NOTHING:
            if not session.scales or not session.active or _is_foreign():
                return run(seeds)
            if accumulate_grad:
                return _accumulate(session, run, roots, seeds, inputs)
            return _differentiate(session, run, roots, seeds)

    return _engine_run_backward


def _accumulate(
    session: Session, run: Callable[..., Any], roots: Any, seeds: Any, inputs: Any
) -> Any:
    around = current()
    if isinstance(around, Pass):  # torch itself, in the middle of a pass: reentrant checkpointing
        around.take(_leaves(session, roots, inputs))
        return run(seeds)
    running = _new_pass(session, roots, around)
    running.take(_leaves(session, roots, inputs))
    try:
        return run_in(running, run, running.to_scaled(seeds))
    finally:
        running.settle()
        if running.flags:
            session.backwards.append((running.scale, any_of(running.flags)))


def _differentiate(session: Session, run: Callable[..., Any], roots: Any, seeds: Any) -> Any:
    """`torch.autograd.grad`: nobody can skip what it returns, so the scale falls until finite."""
    around = current()
    if isinstance(around, Pass):
        return run(seeds)
    running = _new_pass(session, roots, around)
    while True:
        grads = run_in(running, run, running.to_scaled(seeds), retain_graph=True)
        flags = check([grad for grad in grads if grad is not None])
        if not flags or not any_of(flags).item() or float(running.scale) <= 1.0:
            return tuple(_unscaled(grad, running.inverse) for grad in grads)
        scale = running.scale / 2
        running = Pass(scale, inverse_of(scale), running.outer)


def _unscaled(grad: torch.Tensor | None, inverse: torch.Tensor) -> torch.Tensor | None:
    if grad is None:
        return None
    return (grad * inverse.to(grad.device, non_blocking=True)).to(grad.dtype)


def _new_pass(session: Session, roots: Any, around: UserCode | None) -> Pass:
    tensors = [root for root in roots if isinstance(root, torch.Tensor)]
    scale = session.loss_scale.current(tensors[0].device if tensors else torch.device("cpu"))
    for tensor in tensors:
        if tensor.dtype is torch.float16:
            scale = scale.clamp(max=_HALF_SEED_LIMIT)
            break
    outer = None if around is None else around.outer
    return Pass(scale, session.loss_scale.inverse(scale), outer)


def _leaves(session: Session, roots: Any, inputs: Any) -> list[torch.Tensor]:
    """The tensors into whose ``.grad`` the engine will accumulate."""
    if inputs:
        nodes = [edge.node for edge in inputs if not isinstance(edge, torch.Tensor)]
        return [tensor for tensor in inputs if isinstance(tensor, torch.Tensor)] + [
            node.variable for node in nodes if type(node) is _AccumulateGrad
        ]
    stack: list[Any] = [_node(root) for root in roots]
    leaves = [node.variable for node in stack if type(node) is _AccumulateGrad]
    seen = set(stack)
    while stack:  # a fifth of a millisecond for 500 nodes: nothing in here that need not be
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                if type(node) is _AccumulateGrad:
                    leaves.append(node.variable)
                else:
                    stack.append(node)
    leaves += [tensor for tensor in session.retained() if tensor.grad_fn in seen]
    return leaves


def _node(root: Any) -> Any:
    if isinstance(root, torch.Tensor):
        return root.grad_fn or torch.autograd.graph.get_gradient_edge(root).node
    return root.node


def _is_foreign() -> bool:
    """Whether this run is not the script's own: transforms, compilers, CUDA graph capture."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or (torch._C._len_torch_dispatch_stack() > 0 and is_functionalizing())
        or (_cuda_is_up() and torch.cuda.is_current_stream_capturing())
    )


_cuda_is_up: Callable[[], bool] = torch.cuda.is_initialized


@contextlib.contextmanager
def _autocast_off(session: Session) -> Iterator[None]:
    """A backward inside an open region (a training loop in a module) runs as it would outside.

    Weights are about to change there: casts made so far are dropped, and the rest of that region
    makes fresh ones.
    """
    device_type = session.local.region
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    torch.clear_autocast_cache()
    if torch.is_autocast_cache_enabled():
        torch.set_autocast_cache_enabled(False)
        session.local.uncached = True  # the region that ends puts it back
    torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, True)
