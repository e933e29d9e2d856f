"""Gradients flow through moved ops, as exact as the precision that the policy says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from .observe import HALVES, in_region

Mixed = Callable[..., Any]
Call = Callable[..., torch.Tensor]

POLICY = """
ops:
  lower: {add: [softmax, layer_norm, tanh, mul, logsumexp]}
  float32: {add: [mm, matmul, bmm, addmm, linear, conv2d, gelu, exp, sub, einsum]}
  widest: {add: [dot, cross, index_add, baddbmm]}
"""
EXACT = 2e-6
"""What float32 leaves of a gradient of these sizes, relative to its largest element."""


@dataclass(frozen=True)
class Kind:
    """Calls whose gradients are alike: `given` are the precisions of the operands, `list` the list
    of the ops, and `exact` tells the gradients that are float32 all the way."""

    list: str
    given: tuple[str, ...]
    exact: tuple[bool, ...]
    calls: dict[str, tuple[Call, tuple[tuple[int, ...], ...]]]


def _changed(x: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """`change` applied in place to a tensor that is no leaf."""
    copy = x * 1
    change(copy)
    return copy


PAIR = ((3, 4), (4, 2))
TRIPLE = ((3, 2), (3, 4), (4, 2))
IMAGE = ((1, 2, 4, 4), (3, 2, 2, 2), (3,))
INDEX = torch.tensor([0, 2, 2])
KINDS = {
    # torch lowers these: moved, they keep every bit of float32 operands
    "float32 from float32": Kind(
        "float32",
        ("float32",),
        (True, True, True),
        {
            "mm": (torch.mm, PAIR),
            "operator": (lambda a, b: a @ b, PAIR),
            "bmm": (torch.bmm, ((2, 3, 4), (2, 4, 2))),
            "addmm": (torch.addmm, TRIPLE),
            "addmm in place": (lambda c, a, b: _changed(c, lambda c: c.addmm_(a, b)), TRIPLE),
            "linear": (lambda x, w, b: F.linear(x, w, b), ((3, 4), (2, 4), (2,))),
            "conv2d": (F.conv2d, IMAGE),
            "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), PAIR),
        },
    ),
    "float32 from lower": Kind(
        "float32",
        ("lower",),
        (False, False, False),
        {
            "gelu": (F.gelu, ((3, 4),)),
            "exp": (torch.exp, ((3, 4),)),
            "exp in place": (lambda x: _changed(x, torch.exp_), ((3, 4),)),
            "sub": (lambda x, y: x - y, ((3, 4), (3, 4))),
            "reflected sub": (lambda x: 2 - x, ((3, 4),)),
            "mm": (torch.mm, PAIR),
            "conv2d": (F.conv2d, IMAGE),
        },
    ),
    "lower from float32": Kind(
        "lower",
        ("float32",),
        (False, False, False),
        {
            "softmax": (lambda x: x.softmax(-1), ((3, 4),)),
            "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), ((3, 4), (4,), (4,))),
            "tanh": (torch.tanh, ((3, 4),)),
            "tanh in place": (lambda x: _changed(x, torch.tanh_), ((3, 4),)),
            "mul": (torch.mul, ((3, 4), (3, 4))),
            "mul in place": (lambda x, y: _changed(x, lambda x: x.mul_(y)), ((3, 4), (4,))),
            "logsumexp": (lambda x: torch.logsumexp(x, -1), ((3, 4),)),
        },
    ),
    # torch refuses these operands: the float32 one keeps its bits
    "widest from mixed": Kind(
        "widest",
        ("lower", "float32"),
        (False, True, True),
        {
            "dot": (torch.dot, ((4,), (4,))),
            "cross": (lambda a, b: torch.cross(a, b, dim=-1), ((2, 3), (2, 3))),
            "index_add": (lambda x, y: x.index_add(0, INDEX, y), ((3, 4), (3, 4))),
            "baddbmm": (torch.baddbmm, ((2, 3, 2), (2, 3, 4), (2, 4, 2))),
        },
    ),
}
CASES = [(kind, name) for kind in KINDS for name in KINDS[kind].calls]


@pytest.fixture(params=list(HALVES))
def lower(request: pytest.FixtureRequest) -> torch.dtype:
    return HALVES[request.param]


@pytest.fixture
def policy(mixed: Mixed, tmp_path: Path, lower: torch.dtype) -> None:
    path = tmp_path / "moved.yaml"
    path.write_text(POLICY)
    mixed(str(path), str(lower).removeprefix("torch."), LOSS_SCALE="128")


def leaves(kind: Kind, name: str, lower: torch.dtype) -> list[torch.Tensor]:
    """Float32 values that `lower` can hold."""
    generator = torch.Generator().manual_seed(1)
    shapes = kind.calls[name][1]
    return [torch.randn(s, generator=generator).to(lower).float().requires_grad_() for s in shapes]


def run(kind: Kind, name: str, lower: torch.dtype, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The call with operands as given, for leaves that are float32 or double."""
    given = (*kind.given, *(kind.given[-1],) * len(tensors))
    lowered = [
        tensor.to(lower) if word == "lower" and tensor.dtype is torch.float32 else tensor
        for tensor, word in zip(tensors, given, strict=False)
    ]
    return kind.calls[name][0](*lowered)


def backward(result: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of a sum with weights that float16 and bfloat16 hold too."""
    weights = torch.linspace(-1, 1, result.numel()).to(torch.bfloat16).reshape(result.shape)
    (result * weights.to(result.dtype)).sum(dtype=torch.float64).backward()
    return [tensor.grad for tensor in tensors]


def error(gradient: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, relative to the largest element."""
    return float((gradient.double() - expected).abs().max() / expected.abs().max())


def reference(kind: Kind, name: str, lower: torch.dtype) -> list[torch.Tensor]:
    tensors = [t.detach().double().requires_grad_() for t in leaves(kind, name, lower)]
    return backward(run(kind, name, lower, tensors), tensors)


@pytest.mark.usefixtures("policy")
@pytest.mark.parametrize(("which", "name"), CASES)
def test_gradients_are_as_exact_as_the_precision_of_the_op(
    which: str, name: str, lower: torch.dtype
) -> None:
    kind = KINDS[which]
    tensors = leaves(kind, name, lower)
    result = in_region("cpu", lambda: run(kind, name, lower, tensors))
    if "in place" not in name:
        assert result.dtype is (lower if kind.list == "lower" else torch.float32)
    gradients = backward(result, tensors)
    assert all(gradient.dtype is torch.float32 for gradient in gradients)
    errors = list(map(error, gradients, reference(kind, name, lower)))
    rough = 4 * torch.finfo(lower).eps
    limits = [EXACT if exact else rough for exact in kind.exact]
    assert all(e <= limit for e, limit in zip(errors, limits, strict=False)), errors


@pytest.mark.parametrize(
    "name", [name for name in KINDS["float32 from float32"].calls if "in place" not in name]
)
def test_without_the_policy_torch_lowers_them(mixed: Mixed, name: str, lower: torch.dtype) -> None:
    """The limit for exact gradients tells float32 from half."""
    kind = KINDS["float32 from float32"]
    mixed("torch", str(lower).removeprefix("torch."), LOSS_SCALE="128")
    tensors = leaves(kind, name, lower)
    gradients = backward(in_region("cpu", lambda: run(kind, name, lower, tensors)), tensors)
    assert max(map(error, gradients, reference(kind, name, lower))) > 20 * EXACT
