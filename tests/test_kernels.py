"""Kernels of our own on the Autocast key: what a call becomes, and that nothing stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from regions import inside
from torch import nn

import autoamp
from autoamp import categories

Mixed = Callable[..., Any]
BF16, FP32 = torch.bfloat16, torch.float32
X = torch.linspace(-2, 2, 16).reshape(4, 4)
HALF = X.bfloat16()


@pytest.fixture
def policy(mixed: Mixed, tmp_path: Path) -> Callable[[str], Any]:
    """`policy(ops)` activates torch's lists with this section `ops`, in bfloat16."""

    def activate(ops: str, rest: str = "") -> Any:
        path = tmp_path / "mine.yaml"
        path.write_text(f"ops: {ops}\n{rest}\n")
        return mixed(str(path), dtype="bfloat16")

    return activate


# --- what a call becomes -------------------------------------------------------------------------


def test_a_moved_op_computes_where_the_policy_says(policy: Any) -> None:
    policy("{float32: {add: [mm, gelu]}, lower: {add: [layer_norm]}, widest: {add: [mul]}}")
    assert torch.equal(inside(torch.mm, HALF, HALF), HALF.float() @ HALF.float())
    assert torch.equal(inside(F.gelu, HALF), F.gelu(HALF.float()))
    assert torch.equal(inside(F.layer_norm, X, (4,)), F.layer_norm(HALF, (4,)))
    assert inside(torch.mul, HALF, X).dtype is FP32
    assert inside(torch.mul, HALF, HALF).dtype is BF16


def test_an_op_taken_out_of_a_list_runs_as_it_is_given_and_its_parts_as_ever(policy: Any) -> None:
    policy("{lower: {remove: [mm, linear]}}")
    assert inside(torch.mm, X, X).dtype is FP32
    # What `linear` calls is in torch's list still: addmm, for one.
    assert inside(F.linear, X, X, torch.ones(4)).dtype is BF16


def test_removing_from_one_list_leaves_an_op_in_another(policy: Any) -> None:
    session = policy("{float32: {remove: [mm]}}")
    assert inside(torch.mm, X, X).dtype is BF16
    assert "mm" not in {kernel.op for kernel in session.kernels.registered if kernel.category}


def test_double_and_integers_are_left_alone(policy: Any) -> None:
    policy("{lower: {add: [mul]}, float32: {add: [add]}}")
    assert inside(torch.mul, X.double(), X.double()).dtype is torch.float64
    assert inside(torch.add, torch.ones(2, dtype=torch.int64), 1).dtype is torch.int64


def test_a_dtype_that_the_caller_names_wins(policy: Any) -> None:
    policy("{float32: {add: [softmax]}, lower: {add: [sum]}}")
    assert inside(torch.softmax, HALF, 0).dtype is FP32
    assert inside(lambda x: torch.softmax(x, 0, dtype=BF16), X).dtype is BF16
    total = inside(lambda x: x.sum(dtype=torch.float32), X * 1.001)
    assert torch.equal(total, (X * 1.001).sum())


def test_lists_of_tensors_are_cast_too(policy: Any) -> None:
    policy("{float32: {add: [stack, einsum]}}")
    assert inside(lambda a, b: torch.stack([a, b]), HALF, HALF).dtype is FP32
    result = inside(lambda a, b: torch.einsum("ij,jk->ik", a, b), HALF, HALF)
    assert torch.equal(result, HALF.float() @ HALF.float())


def test_in_place_computes_in_the_list_s_dtype_and_keeps_the_destination(policy: Any) -> None:
    policy("{float32: {add: [addmm]}, lower: {add: [mul]}}")
    destination = HALF.clone()
    result = inside(lambda x, a: x.addmm_(a, a), destination, HALF)
    assert result is destination
    assert destination.dtype is BF16
    assert torch.equal(
        destination, torch.addmm(HALF.float(), HALF.float(), HALF.float()).bfloat16()
    )
    wide = X.clone()
    inside(lambda x, a: x.mul_(a), wide, X)
    assert torch.equal(wide, (X.bfloat16() * X.bfloat16()).float())


def test_in_place_gradients_flow_through_the_cast(policy: Any) -> None:
    policy("{float32: {add: [exp]}}")
    leaf = HALF.clone().requires_grad_()
    out = inside(lambda x: x.mul(1).exp_(), leaf)
    assert out.dtype is BF16
    out.sum().backward()
    torch.testing.assert_close(leaf.grad.float(), HALF.float().exp(), rtol=2**-7, atol=0)


def test_out_is_written_in_its_own_dtype_and_resized(policy: Any) -> None:
    policy("{float32: {add: [mm]}}")
    out = torch.empty(0, dtype=BF16)
    assert inside(lambda a: torch.mm(a, a, out=out), HALF) is out
    assert torch.equal(out, (HALF.float() @ HALF.float()).bfloat16())
    fits = torch.empty(4, 4)
    inside(lambda a: torch.mm(a, a, out=fits), HALF)
    assert torch.equal(fits, HALF.float() @ HALF.float())


def test_several_outs_are_written_and_returned(policy: Any) -> None:
    policy("{float32: {add: [sort]}}")
    values, indices = torch.empty(0, dtype=BF16), torch.empty(0, dtype=torch.int64)
    result = inside(lambda x: torch.sort(x, out=(values, indices)), HALF.flip(1))
    assert result[0] is values
    assert torch.equal(values, HALF)
    assert torch.equal(indices, torch.tensor([[3, 2, 1, 0]] * 4))


@pytest.mark.parametrize("category", ["lower", "float32"])
def test_running_statistics_are_updated_in_place(policy: Any, category: str) -> None:
    policy(f"{{{category}: {{add: [batch_norm]}}}}")
    norm = nn.BatchNorm1d(4)
    inside(norm, HALF)
    torch.testing.assert_close(norm.running_mean, 0.1 * X.mean(0), rtol=2**-7, atol=1e-3)


def test_a_condition_on_argument_values_decides_call_by_call(policy: Any) -> None:
    policy("{when: [{op: leaky_relu, when: {negative_slope: 0.2}, precision: float32}]}")
    assert inside(F.leaky_relu, HALF, 0.2).dtype is FP32
    assert inside(lambda x: F.leaky_relu(x, negative_slope=0.2), HALF).dtype is FP32
    assert inside(F.leaky_relu, HALF, 0.1).dtype is BF16
    assert inside(F.leaky_relu, HALF).dtype is BF16  # the default is 0.01


def test_a_condition_holds_for_an_argument_left_to_its_default(policy: Any) -> None:
    policy("{when: [{op: gelu, when: {approximate: none}, precision: float32}]}")
    assert inside(F.gelu, HALF).dtype is FP32
    assert inside(lambda x: F.gelu(x, approximate="tanh"), HALF).dtype is BF16


def test_a_condition_on_an_argument_that_there_is_not_is_refused(policy: Any) -> None:
    expected = r"mine.yaml:1:\d+: leaky_relu has no argument 'slope'; it takes negative_slope\."
    with pytest.raises(AssertionError, match=expected):  # of the fixture: autoamp is off
        policy("{when: [{op: leaky_relu, when: {slope: 0.2}, precision: float32}]}")


def test_only_products_with_a_parameter_are_lowered_where_the_policy_says_so(policy: Any) -> None:
    policy("{base: none, lower: {add: [mm, matmul]}, operands: parameter, results: float32}")
    weight = nn.Parameter(X.clone())
    lowered = (HALF @ HALF).float()
    for operand in (weight, weight.t().t(), weight.view(4, 4)):
        assert torch.equal(inside(torch.mm, X, operand), lowered)
    assert torch.equal(inside(torch.mm, X, X), X @ X)


# --- where they do not act -----------------------------------------------------------------------


def test_a_script_s_own_autocast_is_torch_s(policy: Any) -> None:
    def all_kinds() -> list[torch.Tensor]:
        with torch.autocast("cpu", BF16):
            return [
                *(torch.mm(X, X), F.gelu(HALF), F.mse_loss(HALF, HALF), torch.stack([HALF, X])),
                *(HALF.clone().exp_(), torch.mm(HALF, HALF, out=HALF.clone()), F.linear(X, X)),
            ]

    plain = all_kinds()
    policy(
        "{float32: {add: [mm, gelu, exp]}, lower: {add: [mse_loss, stack], remove: [linear]}}",
    )
    for expected, result in zip(plain, all_kinds(), strict=True):
        assert expected.dtype is result.dtype
        assert torch.equal(expected, result)


def test_what_torch_refuses_it_refuses_in_a_script_s_own_autocast(mixed: Mixed) -> None:
    """On CUDA; fake tensors dispatch as real ones do."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    session = mixed("default", dtype="float16")
    torch.set_autocast_cache_enabled(False)
    try:
        with FakeTensorMode(), torch.no_grad():
            p = torch.rand(4, device="cuda")
            session.decide(p.device)
            torch.set_autocast_enabled("cuda", True)
            torch.set_autocast_cache_enabled(True)
            with pytest.raises(RuntimeError, match="binary_cross_entropy"):
                F.binary_cross_entropy(p, p)
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_cache_enabled(True)


# --- in and out ----------------------------------------------------------------------------------


def test_disable_leaves_the_dispatcher_as_it_was(policy: Any) -> None:
    def dump() -> dict[str, str]:
        return {
            op: torch._C._dispatch_dump(f"aten::{op}") for op in ("mm", "gelu", "exp_", "mm.out")
        }

    before = dump()
    policy("{float32: {add: [mm, gelu, exp]}}")
    inside(torch.mm, X, X)
    assert all(dump()[op] != text for op, text in before.items())
    autoamp.disable()
    assert dump() == before


def test_no_warning_even_where_warnings_are_errors(run_python: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("ops: {float32: {add: [mm]}, lower: {add: [softmax]}}\n")
    script = """
import warnings
warnings.simplefilter("error")
import torch, autoamp
layer = torch.nn.Linear(4, 4)
layer(torch.ones(2, 4))
assert {k.op for k in autoamp.activation.session().kernels.registered} >= {"mm", "softmax.int"}
autoamp.disable()
print("done")
"""
    done = run_python(
        script, AUTO_MIXED_PRECISION="./mine.yaml", AUTO_MIXED_PRECISION_DTYPE="bfloat16"
    )
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
    assert all(line.startswith("autoamp") for line in done.stderr.splitlines())


def test_policy_torch_needs_no_kernel(mixed: Mixed) -> None:
    session = mixed("torch", dtype="bfloat16")
    inside(torch.mm, X, X)
    assert session.kernels.registered == []


def test_code_compiled_under_one_policy_is_not_run_under_another(
    run_python: Any, tmp_path: Path
) -> None:
    """torch keeps compiled code on disk, under a key that knows nothing of kernels."""
    (tmp_path / "mine.yaml").write_text("ops: {float32: {add: [linear]}}\n")
    script = """
import torch
seen = []
torch.manual_seed(0)
layer = torch.nn.Linear(64, 64)
layer.register_forward_hook(lambda *a: None)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = layer
    def forward(self, x):
        y = self.layer(x)
        return y, torch.ones((), dtype=y.dtype).element_size() * torch.ones((), dtype=torch.int64)
print(int(torch.compile(Model())(torch.ones(2, 64))[1]))
"""
    cache = str(tmp_path / "cache")  # in a folder of its own: Python would import what it holds
    variables = {"AUTO_MIXED_PRECISION_DTYPE": "bfloat16", "TORCHINDUCTOR_CACHE_DIR": cache}
    for policy, size in (("torch", 2), ("./mine.yaml", 4), ("torch", 2)):
        done = run_python(script, AUTO_MIXED_PRECISION=policy, **variables)
        assert done.stdout == f"{size}\n", done.stderr


def test_torch_s_lists_are_asked_without_leaving_autocast_on() -> None:
    categories.torchs_lists.cache_clear()
    before = torch.is_autocast_cache_enabled()
    assert categories.torchs_lists("cuda")["mm"] == "lower"
    assert not torch.is_autocast_enabled("cuda")
    assert torch.is_autocast_cache_enabled() is before


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_runs_its_forward_again_as_it_ran_before(
    policy: Any, use_reentrant: bool
) -> None:
    from torch.utils.checkpoint import checkpoint

    policy("{float32: {add: [mm, gelu]}, lower: {add: [softmax]}}")
    seen: list[torch.dtype] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        product = torch.mm(x, x)
        seen.append(product.dtype)
        activated = F.gelu(product.bfloat16())
        seen.append(activated.dtype)
        return torch.softmax(activated, 0)

    x = X.clone().requires_grad_()
    out = inside(lambda x: checkpoint(body, x, use_reentrant=use_reentrant), x)
    assert out.dtype is BF16
    out.float().square().sum().backward()
    assert seen == [FP32, FP32] * 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("policy", ["default", "safe", "torch", "fast", "tensorflow", "mxnet"])
def test_what_torch_computes_in_one_go_is_in_one_dtype(mixed: Any, policy: str, dtype: str) -> None:
    """The fast path of `nn.TransformerEncoderLayer`, where float32 biases were read as half."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(4, 8, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(8)
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.in_proj_bias.normal_()  # torch starts with zeros
        expected = model(x, mask=mask, is_causal=True)
        mixed(policy, dtype)
        for _ in range(3):  # the first one is looked at
            found = model(x, mask=mask, is_causal=True)
            torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("policy", ["safe", "default", "fast"])
def test_a_process_whose_first_model_runs_in_inference_mode_has_the_same_kernels(
    run_script: Any, policy: str
) -> None:
    """There torch shows a dispatch mode other ops than elsewhere, and it is asked for its lists."""
    script = """
import sys, torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Softmax(-1), nn.Conv1d(3, 2, 1))
with torch.inference_mode() if sys.argv[1] == "inference" else torch.no_grad():
    result = net(torch.ones(2, 3, 4))
from autoamp import activation
kernels = activation.session().kernels.registered
print(result.tolist(), sorted((k.op, k.category, k.torchs) for k in kernels))
"""
    chosen = {"AUTO_MIXED_PRECISION": policy, "AUTO_MIXED_PRECISION_DTYPE": "bfloat16"}
    found = [run_script(script, mode, **chosen) for mode in ("plain", "inference")]
    assert [done.returncode for done in found] == [0, 0], found[1].stderr
    assert found[0].stdout == found[1].stdout
    assert "unknown" not in found[0].stdout
