"""Autograd graphs, read from outside: what a run of the engine executes, and how to let go of it.

The engine drops what a graph has saved while it runs, unless it is told to keep the graph. One that
was kept only so that it could run again is dropped here, by the hooks that torch has for it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import torch

AccumulateGrad: Any = type(
    torch.autograd.graph.get_gradient_edge(torch.zeros((), requires_grad=True)).node
)
COMPILED = "CompiledFunctionBackward"
"""What torch.compile makes of a backward: it may give its memory away, and runs once."""


def nodes_of(roots: Iterable[Any]) -> list[Any]:
    """The nodes that roots or inputs of the engine, tensors or `GradientEdge`, stand for.

    A tensor that needs no gradient has none: the engine has words for that.
    """
    edge = torch.autograd.graph.get_gradient_edge
    return [
        (root.grad_fn or edge(root).node) if isinstance(root, torch.Tensor) else root.node
        for root in roots
        if not isinstance(root, torch.Tensor) or root.requires_grad
    ]


def executed(roots: Iterable[Any], inputs: Iterable[Any]) -> set[Any]:
    """The nodes that the engine executes: all, or with `inputs` those on the way to them."""
    stack = nodes_of(roots)
    nodes = set(stack)
    above: dict[Any, list[Any]] = {}
    while stack:
        node = stack.pop()
        for below, _ in node.next_functions:
            if below is not None:
                above.setdefault(below, []).append(node)
                if below not in nodes:
                    nodes.add(below)
                    stack.append(below)
    if not inputs:
        return nodes
    stack = nodes_of(inputs)
    on_the_way: set[Any] = set()
    while stack:
        fresh = set(above.get(stack.pop(), ())) - on_the_way
        on_the_way |= fresh
        stack += fresh
    return on_the_way


def let_go(nodes: Iterable[Any]) -> None:
    """Drop the tensors that these nodes have saved, as a run that does not keep the graph does.

    What hooks have packed elsewhere (checkpointing, offloading) stays with them: it is small.
    """
    for node in nodes:
        kind: Any = type(node)
        for name in _saved_by(kind):
            with contextlib.suppress(RuntimeError):  # dropped already
                saved = getattr(node, name)
                for one in saved if isinstance(saved, (tuple, list)) else (saved,):
                    with contextlib.suppress(RuntimeError):  # nothing was saved, or by hooks
                        one.register_hooks(_drop, _is_gone)


@functools.lru_cache(maxsize=1024)
def _saved_by(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _drop(tensor: torch.Tensor) -> None:
    return None


def _is_gone(nothing: None) -> torch.Tensor:
    raise RuntimeError(
        "Trying to backward through the graph a second time (or directly access saved tensors "
        "after they have already been freed). Saved intermediate values of the graph are freed "
        "when you call .backward() or autograd.grad(). Specify retain_graph=True if you need to "
        "backward through the graph a second time or if you need to access saved tensors after "
        "calling backward."
    )
