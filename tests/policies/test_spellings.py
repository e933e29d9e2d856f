"""An op that a policy moves follows it in every spelling, in a region and nowhere else."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch import softmax as early_softmax  # before any policy is loaded

import autoamp

from .observe import in_region, observe

Mixed = Callable[..., Any]
Call = Callable[..., torch.Tensor]
HALF = torch.bfloat16
HERE = Path(__file__)
early_gelu, early_matmul = F.gelu, torch.Tensor.__matmul__

POLICY = """
ops:
  base: none
  lower: {add: [softmax, layer_norm, addmm, einsum]}
  float32: {add: [gelu, mm, exp, sub, conv2d]}
  widest: {add: [mul]}
outputs: keep
"""


@dataclass(frozen=True)
class Moved:
    """An op that `POLICY` moves to `list`, and calls of it with the same operands.

    `operands` are in the precision that the op would run in if it were not moved; `by_hand` is what
    it gives where they are cast as the policy says.
    """

    list: str
    operands: tuple[torch.Tensor, ...]
    by_hand: Call
    spellings: dict[str, Call] = field(hash=False)


def _values(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(HALF).to(dtype)


def _float32(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


def _loaded(module: nn.Module, *parameters: torch.Tensor) -> nn.Module:
    """A module with these values as its parameters."""
    with torch.no_grad():
        for parameter, values in zip(module.parameters(), parameters, strict=True):
            parameter.copy_(values)
    return module


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return _loaded(nn.LayerNorm(4), weight, bias)(x)


def _conv2d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **how: Any) -> torch.Tensor:
    return _loaded(nn.Conv2d(2, 3, 2, **how).to(x.dtype), weight, bias)(x)


def _into(function: Call, dtype: torch.dtype) -> Call:
    """`function` with an `out` of this dtype."""

    def call(*operands: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(operands[0], dtype=dtype)
        assert function(*operands, out=out) is out
        return out

    return call


def _on_copy(function: Call) -> Call:
    """`function` changes its first operand: a copy of it, which it must return."""

    def call(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        copy = first.clone()
        assert function(copy, *others) is copy
        return copy

    return call


MOVED: dict[str, Moved] = {
    "softmax": Moved(
        "lower",
        (_float32(3, 4),),
        lambda x: x.to(HALF).softmax(-1),
        {
            "torch function": lambda x: torch.softmax(x, -1),
            "nn.functional": lambda x: F.softmax(x, -1),
            "method": lambda x: x.softmax(-1),
            "nn module": nn.Softmax(-1),
            "imported early": lambda x: early_softmax(x, -1),
            "partial": functools.partial(torch.softmax, dim=-1),
            "torch.special": lambda x: torch.special.softmax(x, -1),
            "aten": lambda x: torch.ops.aten.softmax.int(x, -1),
        },
    ),
    "softmax to out": Moved(
        "lower",
        (_float32(3, 4),),
        lambda x: x.to(HALF).softmax(-1).float(),
        {"torch function": _into(functools.partial(torch.softmax, dim=-1), torch.float32)},
    ),
    "layer_norm": Moved(
        "lower",
        (_float32(3, 4), _float32(4), _float32(2, 2).reshape(4)),
        lambda x, weight, bias: F.layer_norm(x.to(HALF), (4,), weight.to(HALF), bias.to(HALF)),
        {
            "torch function": lambda x, w, b: torch.layer_norm(x, (4,), w, b),
            "nn.functional": lambda x, w, b: F.layer_norm(x, (4,), w, b),
            "nn module": _layer_norm,
            "partial": lambda x, w, b: functools.partial(F.layer_norm, weight=w, bias=b)(x, (4,)),
        },
    ),
    "addmm": Moved(
        "lower",
        (_float32(3, 2), _float32(3, 4), _float32(4, 2)),
        lambda c, a, b: torch.addmm(c.to(HALF), a.to(HALF), b.to(HALF)),
        {
            "torch function": torch.addmm,
            "method": lambda c, a, b: c.addmm(a, b),
            "aten": torch.ops.aten.addmm.default,
        },
    ),
    "addmm_": Moved(
        "lower",
        (_float32(3, 2), _float32(3, 4), _float32(4, 2)),
        lambda c, a, b: torch.addmm(c.to(HALF), a.to(HALF), b.to(HALF)).float(),
        {
            "method in place": _on_copy(lambda c, a, b: c.addmm_(a, b)),
            "out": _into(torch.addmm, torch.float32),
        },
    ),
    "einsum": Moved(
        "lower",
        (_float32(3, 4), _float32(4, 2)),
        lambda a, b: torch.einsum("ij,jk->ik", a.to(HALF), b.to(HALF)),
        {
            "torch function": lambda a, b: torch.einsum("ij,jk->ik", a, b),
            "list of operands": lambda a, b: torch.einsum("ij,jk->ik", [a, b]),
            "sublists": lambda a, b: torch.einsum(a, [0, 1], b, [1, 2], [0, 2]),
            "imported early": lambda a, b: torch.functional.einsum("ij,jk->ik", a, b),
        },
    ),
    "gelu": Moved(
        "float32",
        (_values(3, 4),),
        lambda x: F.gelu(x.float()),
        {
            "nn.functional": F.gelu,
            "nn module": nn.GELU(),
            "imported early": lambda x: early_gelu(x),
            "partial": functools.partial(F.gelu, approximate="none"),
            "vmap": torch.vmap(F.gelu),
        },
    ),
    "mm": Moved(
        "float32",
        (_values(3, 4), _values(4, 2)),
        lambda a, b: a.float() @ b.float(),
        {
            "torch function": torch.mm,
            "method": lambda a, b: a.mm(b),
            "operator": operator.matmul,
            "matmul": torch.matmul,
            "imported early": lambda a, b: early_matmul(a, b),
            "nn.functional": lambda a, b: F.linear(a, b.T),
            "out": _into(lambda a, b, out: torch.mm(a, b, out=out.resize_(3, 2)), torch.float32),
        },
    ),
    "exp": Moved(
        "float32",
        (_values(3, 4),),
        lambda x: x.float().exp(),
        {
            "torch function": torch.exp,
            "method": lambda x: x.exp(),
            "partial": functools.partial(torch.exp),
            "out": _into(torch.exp, torch.float32),
        },
    ),
    "exp_": Moved(
        "float32",
        (_values(3, 4),),
        lambda x: x.float().exp().to(HALF),
        {
            "method in place": _on_copy(lambda x: x.exp_()),
            "function in place": _on_copy(torch.exp_),
            "out": _into(torch.exp, HALF),
        },
    ),
    "sub": Moved(
        "float32",
        (_values(3, 4),),
        lambda x: x.float() - 2.001,
        {
            "operator": lambda x: x - 2.001,
            "method": lambda x: x.sub(2.001),
            "torch function": lambda x: torch.sub(x, 2.001),
            "alias": lambda x: torch.subtract(x, 2.001),
            "operator module": lambda x: operator.sub(x, 2.001),
        },
    ),
    "sub_": Moved(
        "float32",
        (_values(3, 4),),
        lambda x: (x.float() - 2.001).to(HALF),
        {
            "method in place": _on_copy(lambda x: x.sub_(2.001)),
            "operator in place": _on_copy(lambda x: operator.isub(x, 2.001)),
        },
    ),
    "rsub": Moved(
        "float32",
        (_values(3, 4),),
        lambda x: 2.001 - x.float(),
        {
            "reflected operator": lambda x: 2.001 - x,
            "torch function": lambda x: torch.rsub(x, 2.001),
            "method": lambda x: x.__rsub__(2.001),
        },
    ),
    "conv2d": Moved(
        "float32",
        (_values(1, 2, 4, 4), _values(3, 2, 2, 2), _values(3)),
        lambda x, weight, bias: F.conv2d(x.float(), weight.float(), bias.float()),
        {
            "torch function": torch.conv2d,
            "nn.functional": F.conv2d,
            "nn module": _conv2d,
            "padding in words": lambda x, w, b: F.conv2d(x, w, b, padding="valid"),
            "nn module, padding in words": functools.partial(_conv2d, padding="valid"),
            "partial": lambda x, w, b: functools.partial(F.conv2d, bias=b)(x, w),
        },
    ),
    "mul": Moved(
        "widest",  # torch leaves a scalar tensor out of type promotion
        (_values(3, 4), torch.tensor(1.001)),
        lambda x, factor: x.float() * factor,
        {
            "operator": operator.mul,
            "reflected": lambda x, factor: factor * x,
            "method": lambda x, factor: x.mul(factor),
            "torch function": torch.mul,
            "alias": torch.multiply,
            "imported early": torch.Tensor.__mul__,
        },
    ),
    "mul_": Moved(
        "widest",
        (_values(3, 4), torch.tensor(1.001)),
        lambda x, factor: (x.float() * factor).to(HALF),
        {
            "method in place": _on_copy(lambda x, factor: x.mul_(factor)),
            "operator in place": _on_copy(operator.imul),
        },
    ),
}
CASES = [(op, spelling) for op, moved in MOVED.items() for spelling in moved.spellings]


@pytest.fixture
def policy(mixed: Mixed, tmp_path: Path) -> str:
    """`POLICY` is active; what it is to be asked for as."""
    path = tmp_path / "moved.yaml"
    path.write_text(POLICY)
    mixed(str(path), str(HALF).removeprefix("torch."))
    in_region("cpu", int)  # kernels come with the first region on a device
    return str(path)


def same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    return one.dtype is other.dtype and torch.equal(one, other)


@pytest.mark.usefixtures("policy")
@pytest.mark.parametrize(("op", "spelling"), CASES)
def test_every_spelling_follows_the_policy(op: str, spelling: str) -> None:
    moved = MOVED[op]
    call = functools.partial(moved.spellings[spelling], *moved.operands)
    seen = in_region("cpu", lambda: observe(call))
    assert seen.error == ""
    assert seen.compute == {HALF if moved.list == "lower" else torch.float32}
    with torch.no_grad():
        by_hand = moved.by_hand(*moved.operands)
        assert same(seen.result, by_hand)
        assert same(in_region("cpu", call), by_hand)  # and where nobody looks


@pytest.mark.parametrize("op", MOVED)
def test_the_policy_makes_a_difference_that_these_tests_can_see(op: str) -> None:
    moved = MOVED[op]
    plain = observe(functools.partial(next(iter(moved.spellings.values())), *moved.operands))
    assert plain.compute != {HALF if moved.list == "lower" else torch.float32}


@pytest.mark.usefixtures("policy")
def test_under_vmap_an_op_made_of_others_runs_as_those() -> None:
    """vmap takes such ops apart before autocast, torch's own too, sees them: a limit."""
    (x,) = MOVED["softmax"].operands
    with torch.no_grad():
        found = in_region("cpu", lambda: torch.vmap(lambda row: row.softmax(-1))(x))
        assert same(found, x.softmax(-1))


# --- where the policy has no say ------------------------------------------------------------------


def everything(cases: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """What each call returns, or the error where torch refuses it."""
    found: dict[tuple[str, str], Any] = {}
    with torch.no_grad():
        for op, spelling in cases:
            try:
                found[op, spelling] = MOVED[op].spellings[spelling](*MOVED[op].operands)
            except RuntimeError as error:
                found[op, spelling] = str(error)
    return found


@pytest.mark.parametrize("cache_enabled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_script_s_own_autocast_is_torch_s(
    policy: str, dtype: torch.dtype, cache_enabled: bool
) -> None:
    def in_autocast() -> dict[tuple[str, str], Any]:
        with torch.autocast("cpu", dtype, cache_enabled=cache_enabled):
            return everything(CASES)

    ours = in_autocast()
    autoamp.disable()
    assert different(ours, in_autocast()) == []


def test_outside_regions_nothing_changes(policy: str) -> None:
    # Modules with parameters would open a region of their own.
    cases = [(op, how) for op, how in CASES if op == "softmax" or "module" not in how]
    ours = everything(cases)
    autoamp.disable()
    theirs = everything(cases)
    assert different(ours, theirs) == []
    assert [case for case in cases if not isinstance(theirs[case], torch.Tensor)] == [("mm", "out")]


def different(ours: dict[Any, Any], theirs: dict[Any, Any]) -> list[Any]:
    assert ours.keys() == theirs.keys()
    return [case for case in ours if not same(ours[case], theirs[case])]


def test_the_script_s_own_autocast_in_compiled_code_is_torch_s(policy: str) -> None:
    (x,) = MOVED["softmax"].operands

    @torch.compile(backend="aot_eager", fullgraph=True)
    def in_autocast() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", HALF):
            return torch.softmax(x, -1), torch.mm(x, x.T)

    ours = in_autocast()
    autoamp.disable()
    torch.compiler.reset()
    theirs = in_autocast()
    torch.compiler.reset()
    assert all(map(same, ours, theirs))


# --- TorchScript and torch.compile ----------------------------------------------------------------


def scripted(
    x: torch.Tensor, y: torch.Tensor, image: torch.Tensor, filters: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Every moved op as TorchScript and Dynamo can read it, in spellings that are syntax too."""
    c = torch.ones(3, 2, dtype=x.dtype)
    c.addmm_(x, y)
    d = x * 2.001
    d *= 1.001
    e = x.clone()
    e -= 2.001
    return {
        "softmax": torch.softmax(x, -1),
        "softmax, method": x.softmax(0),
        "softmax, nn.functional": F.softmax(x, dim=-1),
        "layer_norm": F.layer_norm(x, [4]),
        "addmm": torch.addmm(torch.ones(2, dtype=x.dtype), x, y),
        "addmm in place": c,
        "einsum": torch.einsum("ij,jk->ik", x, y),
        "gelu": F.gelu(x),
        "mm": torch.mm(x, y),
        "mm, operator": x @ y,
        "exp": torch.exp(x),
        "exp, method": x.exp(),
        "sub": x - 2.001,
        "sub, reflected": 2.001 - x,
        "sub in place": e,
        "conv2d": F.conv2d(image, filters),
        "mul": x * torch.tensor(1.001),
        "mul in place": d,
    }


TAKEN_APART = ("addmm", "addmm in place", "sub, reflected")
"""What TorchScript makes other ops of: products and sums, ``neg`` and ``add``. A limit."""


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    shapes = ((3, 4), (4, 2), (1, 2, 4, 4), (3, 2, 2, 2))
    return tuple(_float32(*shape).to(dtype) for shape in shapes)


@pytest.fixture
def fresh_scripts() -> None:
    """Scripts are kept by function: those of another test are forgotten."""
    torch.jit._state._clear_class_state()
    torch.jit._state._jit_caching_layer.clear()
    return


@pytest.mark.usefixtures("policy", "fresh_scripts")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_torchscript_follows_the_policy(dtype: torch.dtype) -> None:
    function, arguments = torch.jit.script(scripted), operands(dtype)
    with torch.no_grad():
        eager = in_region("cpu", lambda: scripted(*arguments))
        for _ in range(3):  # as it is, profiled, optimised
            found = in_region("cpu", lambda: function(*arguments))
            assert {k for k in eager if not same(found[k], eager[k])} <= set(TAKEN_APART)
        plain = scripted(*arguments)
    assert sum(not same(eager[k], plain[k]) for k in eager) >= 5


SCRIPT = """
import sys
import torch
from torch import nn
from policies.test_spellings import HALF, operands, scripted


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.parameter = nn.Parameter(torch.empty(1))

    def forward(self, *arguments):
        return scripted(*arguments)


model, backend = Model(), sys.argv[1]
compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
tolerance = dict(rtol=0, atol=0) if backend != "inductor" else dict(rtol=2e-2, atol=2e-2)
with torch.no_grad():
    for dtype in (HALF,) if backend == "inductor" else (HALF, torch.float32):
        found, eager = compiled(*operands(dtype)), model(*operands(dtype))
        assert {k: v.dtype for k, v in found.items()} == {k: v.dtype for k, v in eager.items()}
        torch.testing.assert_close(found, eager, **tolerance)
print("as in eager")
"""


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_code_follows_the_policy(run_script: Any, tmp_path: Path, backend: str) -> None:
    (tmp_path / "moved.yaml").write_text(POLICY)
    found = run_script(
        SCRIPT,
        backend,
        pythonpath=(HERE.parents[1],),
        AUTO_MIXED_PRECISION=str(tmp_path / "moved.yaml"),
        AUTO_MIXED_PRECISION_DTYPE=str(HALF).removeprefix("torch."),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"),
    )
    assert found.stdout == "as in eager\n", found.stderr
