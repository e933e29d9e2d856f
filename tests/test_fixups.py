"""Ops that half precision breaks: each row of the table, beside native autocast and float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from regions import inside
from torch import nn

import autoamp
from autoamp import activation, explain, fixups, plan, policyfile, report
from autoamp.fixups import FIXUPS, LIMITS

Mixed = Callable[..., Any]
Call = Callable[[torch.Tensor, torch.Tensor], Any]
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
BIG = {"float16": 1e9, "bfloat16": torch.finfo(torch.float32).max}
"""Constants that scripts write and that the half type cannot hold."""
INFINITY = float("inf")
ALONE = "extends: default\nfallback: {on_error: raise, on_overflow: keep, inspect: false}\n"
"""The default policy where nothing but fix-ups helps."""


@pytest.fixture
def fixed(mixed: Mixed, tmp_path: Path) -> Callable[[str], Any]:
    """`fixed(dtype)` activates the default policy without fallback."""

    def activate(dtype: str, more: str = "") -> Any:
        path = tmp_path / "alone.yaml"
        path.write_text(ALONE + more)
        return mixed(str(path), dtype=dtype)

    return activate


def operands(dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """An activation, as a half tensor, and float32 data, from 0.1 to 0.9."""
    generator = torch.Generator().manual_seed(0)
    half = (torch.rand(4, 4, generator=generator) * 0.8 + 0.1).to(HALVES[dtype])
    return half, torch.rand(4, 4, generator=generator) * 0.8 + 0.1


def is_broken_natively(call: Call, dtype: str) -> bool:
    """Whether torch's own autocast raises, warns, or is wrong."""
    half, data = operands(dtype)
    expected = reference(call, dtype)
    try:
        with warnings.catch_warnings(), torch.autocast("cpu", HALVES[dtype]):
            warnings.simplefilter("error")
            result = call(half, data)
    except (RuntimeError, NotImplementedError, UserWarning):  # refused, or warned of
        return True
    return not is_close(result, expected, dtype)


def reference(call: Call, dtype: str) -> torch.Tensor:
    """What the call is in float64, at most as large as the half type can say."""
    half, data = operands(dtype)
    expected = call(half.double(), data.double())
    if not expected.is_floating_point():
        return expected  # type: ignore[no-any-return]
    limit = LIMITS[HALVES[dtype]]
    return torch.where(expected.isinf(), expected, expected.clamp(-limit, limit))


def is_close(result: torch.Tensor, expected: torch.Tensor, dtype: str) -> bool:
    error = 2.0 ** (-9 if dtype == "float16" else -6)
    result = result.detach().to(expected.dtype)
    return torch.allclose(result, expected.detach(), rtol=error, atol=error, equal_nan=True)


MASK = torch.tensor([True, False, True, False])
FIRST = torch.tensor([0])
COLUMN = torch.zeros(4, 1, dtype=torch.int64)


def _written(destination: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    destination = destination.clone()
    destination[index] = value
    return destination


def _constants(big: float) -> Mapping[str, Call]:
    tensor = torch.tensor(-big)
    return {
        "masked_fill": lambda h, x: h.masked_fill(MASK, -big),
        "masked_fill_": lambda h, x: h.clone().masked_fill_(MASK, -big),
        "masked_fill by a tensor": lambda h, x: h.masked_fill(MASK, tensor),
        "where": lambda h, x: torch.where(MASK, h, -big),
        "where, other way": lambda h, x: torch.where(MASK, big, h),
        "where of a tensor": lambda h, x: torch.where(MASK, h, tensor),
        "Tensor.where": lambda h, x: h.where(MASK, -big),
        "fill_": lambda h, x: h.clone().fill_(big),
        "fill_ by a tensor": lambda h, x: h.clone().fill_(tensor),
        "full_like": lambda h, x: torch.full_like(h, -big),
        "full": lambda h, x: torch.full((2,), -big, dtype=h.dtype),
        "new_full": lambda h, x: h.new_full((2,), -big),
        "index_fill": lambda h, x: h.index_fill(1, FIRST, -big),
        "index_fill by a tensor": lambda h, x: h.index_fill(1, FIRST, tensor),
        "scatter": lambda h, x: h.scatter(1, COLUMN, -big),
        "pad": lambda h, x: F.pad(h, (1, 1), value=-big),
        "nan_to_num": lambda h, x: (h * float("nan")).nan_to_num(nan=-big),
        "fill_diagonal_": lambda h, x: h.clone().fill_diagonal_(-big),
        "pad_sequence": lambda h, x: nn.utils.rnn.pad_sequence([h, h[:2]], padding_value=-big),
        "a column": lambda h, x: _written(h, (slice(None), 0), -big),
        "an index": lambda h, x: _written(h, (slice(None), FIRST), -big),
        "a mask": lambda h, x: _written(h, (slice(None), MASK), -big),
        "a mask by a tensor": lambda h, x: _written(h, (slice(None), MASK), tensor),
    }


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", _constants(1.0))
def test_a_constant_out_of_range_becomes_the_nearest_finite_number(
    fixed: Any, name: str, dtype: str
) -> None:
    call = _constants(BIG[dtype])[name]
    assert is_broken_natively(call, dtype)
    fixed(dtype)
    result = inside(call, *operands(dtype))
    assert result.dtype is HALVES[dtype]
    assert torch.isfinite(result).all()
    assert is_close(result, reference(call, dtype), dtype)


@pytest.mark.parametrize("name", _constants(1.0))
def test_infinity_stays_what_the_script_wrote(fixed: Any, name: str) -> None:
    call = _constants(INFINITY)[name]
    expected = reference(call, "float16")
    assert expected.isinf().any()
    fixed("float16")
    assert torch.equal(inside(call, *operands("float16")).double(), expected)


@pytest.mark.parametrize("name", _constants(1.0))
def test_a_constant_in_range_is_not_touched(fixed: Any, name: str) -> None:
    call = _constants(1000.0)[name]
    half, data = operands("float16")
    if name != "a mask by a tensor":  # refused natively, whatever the constant
        with torch.autocast("cpu", torch.float16):
            expected = call(half, data)
        fixed("float16")
        result = inside(call, half, data)
        assert result.dtype is expected.dtype
        assert torch.equal(result, expected)


def test_a_whole_number_is_a_constant_too(fixed: Any) -> None:
    fixed("float16")
    half, _ = operands("float16")
    assert inside(lambda h: _written(h, 0, 10**9), half)[0].eq(65504).all()
    assert inside(lambda h: h.masked_fill(MASK, -(10**9)), half).min() == -65504


def test_a_fill_is_found_by_comparing_with_its_constant(fixed: Any) -> None:
    def call(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        low, high = h.masked_fill(MASK, -1e9), h.masked_fill(MASK, 1e9)
        compared = [low > -1e9, low != -1e9, low > -1e8, low >= -1e8, high < 1e8, high <= 1e8]
        inverse = [low == -1e9, low <= -1e9, low < -1e8, low <= -1e8, high > 1e8, high >= 1e9]
        return torch.stack([*compared, *map(torch.logical_not, inverse)])

    fixed("float16")
    half, data = operands("float16")
    assert torch.equal(call(data, data), (~MASK).expand(12, 4, 4))
    assert torch.equal(inside(call, half, data), (~MASK).expand(12, 4, 4))


def test_a_banned_logit_times_zero_is_zero_in_training(fixed: Any) -> None:
    fixed("float16")
    leaf = operands("float16")[0].float().requires_grad_()

    def call(x: torch.Tensor) -> torch.Tensor:
        logits = x.half().masked_fill(MASK, -1e9)
        return torch.softmax(torch.where(MASK, logits, logits * 2), -1)

    weights = inside(call, leaf)
    (weights * torch.arange(4)).sum().backward()
    twin = operands("float16")[0].double().requires_grad_()
    expected = torch.softmax(twin.masked_fill(MASK, -1e9) * 2, -1)
    (expected * torch.arange(4)).sum().backward()
    torch.testing.assert_close(weights.double(), expected, rtol=2**-9, atol=2**-9)
    torch.testing.assert_close(leaf.grad.double(), twin.grad, rtol=2**-8, atol=2**-9)


# --- destinations --------------------------------------------------------------------------------


def _product(name: str, destination: tuple[int, ...], *shapes: tuple[int, ...]) -> Call:
    def call(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        into = torch.ones(destination, dtype=x.dtype)
        factors = [h.expand(s) if len(s) > 1 else h[0] for s in shapes]
        result: torch.Tensor = getattr(into, name)(*factors)
        assert result is into
        return result

    return call


def _out(function: Callable[..., torch.Tensor], *shape: int) -> Call:
    def call(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(shape, dtype=x.dtype)
        assert function(h, x, out=out) is out
        return out

    return call


DESTINATIONS: Mapping[str, tuple[str, Call]] = {
    # by name: which operand has the dtype of the destination, and the call
    "addmm_": ("data", _product("addmm_", (4, 4), (4, 4), (4, 4))),
    "addbmm_": ("data", _product("addbmm_", (4, 4), (2, 4, 4), (2, 4, 4))),
    "baddbmm_": ("data", _product("baddbmm_", (2, 4, 4), (2, 4, 4), (2, 4, 4))),
    "addmv_": ("data", _product("addmv_", (4,), (4, 4), (4,))),
    "mm out": ("data", _out(torch.mm, 4, 4)),
    "matmul out": ("data", _out(torch.matmul, 4, 4)),
    "bmm out": ("data", _out(lambda h, x, out: torch.bmm(h[None], x[None], out=out), 1, 4, 4)),
    "mv out": ("data", _out(lambda h, x, out: torch.mv(h, x[0], out=out), 4)),
    "x[mask] = h": ("data", lambda h, x: _written(x, MASK, h[:2])),
    "h[mask] = x": ("half", lambda h, x: _written(h, MASK, x[:2])),
    "h[mask] = 1e6": ("half", lambda h, x: _written(h, MASK, x[:2] * 1e6)),
    "masked_scatter_": ("data", lambda h, x: x.clone().masked_scatter_(MASK, h)),
    "masked_scatter": ("half", lambda h, x: h.masked_scatter(MASK, x)),
    "accumulated": (
        "half",
        lambda h, x: h.clone().index_put_((FIRST,), x[:1], accumulate=True),
    ),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", DESTINATIONS)
def test_a_destination_keeps_its_dtype_and_takes_any(fixed: Any, name: str, dtype: str) -> None:
    which, call = DESTINATIONS[name]
    assert is_broken_natively(call, dtype)
    fixed(dtype)
    half, data = operands(dtype)
    result = inside(call, half, data)
    assert result.dtype is (half if which == "half" else data).dtype
    assert is_close(result, reference(call, dtype), dtype)


FP32 = torch.float32


def test_gradients_reach_both_operands_of_a_product_in_place(fixed: Any) -> None:
    fixed("float16")
    half, data = operands("float16")
    leaves = [half.float().requires_grad_(), data.clone().requires_grad_()]
    twins = [half.double().requires_grad_(), data.double().requires_grad_()]

    def call(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        into = torch.zeros(4, 4, dtype=x.dtype)
        into[MASK] = h[:2]
        return into.addmm_(h, x)

    inside(lambda h, x: call(h.half(), x), *leaves).sum().backward()
    call(*twins).sum().backward()
    for leaf, twin in zip(leaves, twins, strict=True):
        torch.testing.assert_close(leaf.grad.double(), twin.grad, rtol=2**-9, atol=2**-9)


# --- ops that have no half kernel, or a wrong one ------------------------------------------------


def _quantized(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h = h.float() if h.dtype is torch.float64 else h
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantization is to move to another package
        return torch.quantize_per_tensor(h, 0.01, 0, torch.quint8).dequantize()


def _sparse(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such layouts are in beta state
        return torch.sparse.mm(torch.eye(4).to(x.dtype).to_sparse_csr(), h)


CALLS: Mapping[str, tuple[str, Call]] = {
    # by name: the dtypes in which native autocast is broken, and the call
    "allclose": ("float16 bfloat16", lambda h, x: torch.tensor(torch.allclose(h, x))),
    "einsum of positions": (
        "float16 bfloat16",
        lambda h, x: torch.einsum("ij,jk->ik", 1009 * x, x).cos(),
    ),
    "mean added up": (
        "float16 bfloat16",
        lambda h, x: sum(torch.ones_like(h).mean() for _ in range(3000)) / 3000,
    ),
    "sparse.mm": ("float16 bfloat16", _sparse),
    "sparse.softmax": (
        "float16 bfloat16",
        lambda h, x: torch.sparse.softmax(h.to_sparse(), 1).to_dense(),
    ),
    "complex": ("bfloat16", lambda h, x: torch.complex(h, h).abs()),
    "quantize": ("float16 bfloat16", _quantized),
    "rrelu": ("float16", lambda h, x: F.rrelu(h, training=True)),
    "rms_norm": ("bfloat16", lambda h, x: F.rms_norm(h, (4,), x[0])),
    "mv": ("bfloat16", lambda h, x: torch.mv(h, x[0])),
    "addmv": ("bfloat16", lambda h, x: torch.addmv(x[0], h, x[1])),
    "normalize 0": ("float16", lambda h, x: F.normalize(h * 0)),
    "vector_norm": ("float16", lambda h, x: torch.linalg.vector_norm(h * 60000) / 60000),
    "matrix_norm": ("float16", lambda h, x: torch.linalg.matrix_norm(h * 60000) / 60000),
    "gradient": (
        "float16",
        lambda h, x: (
            torch.gradient(h, spacing=(torch.arange(4.0).to(h.dtype) * 1e-4,), dim=0)[0] * 1e-4
        ),
    ),
    "vander": ("float16 bfloat16", lambda h, x: torch.linalg.vander(h[0])),
    "bessel_j0": ("float16 bfloat16", lambda h, x: torch.special.bessel_j0(h)),
    "airy_ai": ("float16 bfloat16", lambda h, x: torch.special.airy_ai(h)),
    "legendre": (
        "float16 bfloat16",
        lambda h, x: torch.special.legendre_polynomial_p(h, torch.tensor(2).to(h.dtype)),
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, d) for name, (dtypes, _) in CALLS.items() for d in dtypes.split()]
)
def test_what_half_precision_breaks_is_right(fixed: Any, name: str, dtype: str) -> None:
    call = CALLS[name][1]
    assert is_broken_natively(call, dtype)
    fixed(dtype)
    result = inside(call, *operands(dtype))
    assert is_close(result, reference(call, dtype), dtype)


def test_products_of_a_network_are_lowered_whatever_einsum_does_with_plain_data(fixed: Any) -> None:
    fixed("float16")
    half, data = operands("float16")
    product = "ij,jk->ik"
    for weight in (nn.Parameter(data), nn.Parameter(data, requires_grad=False), half):
        assert inside(torch.einsum, product, data, weight).dtype is torch.float16
    assert inside(torch.einsum, product, data, data).dtype is FP32


def test_the_mean_along_a_dimension_is_as_it_was(fixed: Any) -> None:
    fixed("float16")
    half, _ = operands("float16")
    assert inside(lambda h: h.mean(0), half).dtype is torch.float16
    assert inside(lambda h: h.mean(dtype=torch.float16), half).dtype is torch.float16


@pytest.mark.parametrize("dtype", HALVES)
def test_random_numbers_have_finite_logarithms(fixed: Any, dtype: str) -> None:
    def draws(h: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(0)
        like = h.new_zeros(100_000)
        return [torch.rand_like(like).log(), torch.empty_like(like).exponential_().float().log()]

    half, _ = operands(dtype)
    with torch.autocast("cpu", HALVES[dtype]):
        assert draws(half)[0].isinf().any()
    fixed(dtype)
    uniform, exponential = inside(draws, half)
    assert torch.isfinite(uniform).all()
    assert torch.isfinite(exponential).all()
    assert inside(lambda h: torch.rand_like(h, dtype=h.dtype), half).dtype is half.dtype


@pytest.mark.parametrize("dtype", HALVES)
def test_distributions_without_half_kernels_draw_and_differentiate(fixed: Any, dtype: str) -> None:
    fixed(dtype)
    leaf = operands(dtype)[0].float().requires_grad_()

    def draw(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        x = x.to(HALVES[dtype]) + 1
        return torch.distributions.Gamma(x, x).rsample() + torch.distributions.Chi2(x).rsample()

    drawn = inside(draw, leaf)
    drawn.float().sum().backward()
    assert torch.isfinite(drawn).all()
    assert torch.isfinite(leaf.grad).all()
    assert leaf.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", HALVES)
def test_an_lstm_that_onednn_does_not_have_runs_in_float32(fixed: Any, dtype: str) -> None:
    torch.manual_seed(0)
    lstm, x = nn.LSTM(4, 3), operands(dtype)[1][None]
    expected, _ = lstm(x)
    fixed(dtype)
    result, _ = inside(lstm, x)
    torch.testing.assert_close(result.float(), expected, rtol=2**-6, atol=2**-6)


# --- where they act ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_has_them_too(fixed: Any, backend: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layer(x)
            h = h.masked_fill(MASK, -1e9)
            h = torch.where(h > -1e8, h, -1e10)
            h[:, FIRST] = 1e9
            into = torch.zeros(4, 4)
            into[MASK] = h[:2]
            return into.addmm_(h * 1e-4, x), h

    fixed("float16")
    torch.manual_seed(0)
    model, x = Model(), operands("float16")[1]
    expected = model(x)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile's own
        result = torch.compile(model, backend=backend, fullgraph=True)(x)
    for one, other in zip(result, expected, strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other)


def test_outside_a_region_nothing_changes(fixed: Any) -> None:
    fixed("float16")
    half, data = operands("float16")
    inside(torch.mm, data, data)  # the kernels are in
    with pytest.raises(RuntimeError, match="overflow"):
        half.masked_fill(MASK, -1e9)
    written = half.clone()
    written[0] = -1e9
    assert written[0].isinf().all()
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(RuntimeError, match="overflow"),
    ):
        half.masked_fill(MASK, -1e9)
    assert torch.rand_like(half).dtype is torch.float16


def test_float32_tensors_take_any_constant(fixed: Any) -> None:
    fixed("float16")
    _, data = operands("float16")
    for name, call in _constants(1e9).items():
        if name not in ("a mask by a tensor", "full"):
            expected = call(data, data)
            assert torch.equal(inside(call, data, data), expected), name


def test_the_dispatcher_and_setitem_are_left_as_they_were(fixed: Any) -> None:
    ops = ("masked_fill.Scalar", "index_put_", "rand_like", "eq.Scalar", "einsum")

    def dump() -> list[str]:
        return [torch._C._dispatch_dump(f"aten::{op}") for op in ops]

    before = dump()
    fixed("float16")
    inside(torch.mm, operands("float16")[1], operands("float16")[1])
    assert all(one != other for one, other in zip(dump(), before, strict=True))
    assert "__setitem__" in vars(torch.Tensor)
    autoamp.disable()
    assert dump() == before
    assert "__setitem__" not in vars(torch.Tensor)


# --- who has them --------------------------------------------------------------------------------

WITH = ("default", "fp16", "bf16", "fast", "safe")


@pytest.mark.parametrize("name", sorted(policyfile.shipped()))
def test_the_policies_that_repair_have_them_and_those_that_imitate_have_none(name: str) -> None:
    policy = policyfile.load(name)
    assert policy.fixups == ("on" if name in WITH else "off")
    kernels = {kernel.op: kernel for kernel in plan.kernels(policy, "cuda", "float16")}
    said = kernels.get("masked_fill.Scalar")
    assert (said is not None and said.why.startswith("fix-up: ")) is (name in WITH)


def test_torch_s_policy_has_only_the_lstm_that_cannot_run_otherwise() -> None:
    policy = policyfile.load("torch")
    for device in ("cpu", "cuda"):
        for dtype in HALVES:
            ops = {kernel.op for kernel in plan.kernels(policy, device, dtype)}
            assert ops <= ({"lstm.input", "lstm.data"} if device == "cpu" else set())
            if dtype == "bfloat16":
                assert ops == set()


def test_a_policy_that_lists_an_op_has_the_last_word(mixed: Mixed, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: default\nops: {float32: {add: [masked_fill, einsum]}}\n")
    mixed(str(path), dtype="float16")
    half, _ = operands("float16")
    filled = inside(lambda h: h.masked_fill(MASK, -1e9), half)
    assert filled.dtype is FP32
    assert filled.min() == -1e9
    path.write_text("extends: default\nfixups: off\n")
    session = mixed(str(path), dtype="float16")
    inside(torch.mm, half, half)
    assert not any(
        kernel.why.startswith("fix-up: a constant") for kernel in session.kernels.registered
    )


def test_explanations_and_reports_say_what_is_done(fixed: Any) -> None:
    policy = policyfile.load("default")
    found = explain.facts(policy, "cpu", "float16", ["masked_fill", "index_put", "softmax"])
    assert found["fixups"] == "on"
    told = {entry["op"]: entry for entry in found["ops"]}
    assert told["masked_fill"]["origin"].startswith("fix-up: a constant beyond the half type's")
    assert told["masked_fill"]["kernel"] == "our kernel"
    assert "default.yaml" in told["index_put"]["origin"]
    assert told["index_put"]["fixup"].startswith("fix-up: values of another dtype")
    assert told["softmax"]["fixup"] == ""
    lines = "\n".join(explain.lines(found))
    assert "fix-up: values of another dtype" in lines
    fixed("float16")
    inside(torch.mm, torch.ones(2, 2), torch.ones(2, 2))
    kernels = {
        entry["op"]: entry["why"] for entry in report.describe(activation.session())["kernels"]
    }
    assert kernels["masked_fill.Scalar"].startswith("fix-up: ")
    assert "; fix-up: " in kernels["index_put"]


def test_each_row_is_complete_and_names_ops_that_there_are() -> None:
    for row in FIXUPS:
        assert all((row.wrong, row.done, row.source)), row.ops
        assert row.ops.split() == list(fixups._existing(row.ops.split()))
    ops = [(op, row.dtypes) for row in FIXUPS for op in row.ops.split()]
    assert len(ops) == len(set(ops))
