"""The shipped policies say what the systems say that they are named after, and do it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoamp import opnames, plan, policyfile
from autoamp.policy import DEVICES, LossScaleRule

NAMES = sorted(policyfile.shipped())
SYSTEMS = ("apex-o1", "mxnet", "paddle", "tensorflow")
LOWER, FLOAT32, WIDEST, NONE = "lower", "float32", "widest", ""
HALVES = ("float16", "bfloat16")


def text(name: str) -> str:
    return Path(policyfile.shipped()[name]).read_text()


def aten(spellings: str) -> set[str]:
    """The ops of aten that names, with blanks between them, mean."""
    found = {spelling: opnames.resolve(spelling) for spelling in spellings.split()}
    assert all(found.values()), found
    return {op for ops in found.values() for op in ops}


def lists(name: str) -> dict[str, str]:
    """The list of each op of aten that a policy names; conditional rules apart."""
    found: dict[str, str] = {}
    for rule in policyfile.load(name).ops:
        for op in opnames.resolve(rule.op):
            if rule.into and not rule.when:
                found[op] = rule.into
            elif rule.leaves and found.get(op) == rule.leaves:
                found[op] = NONE
    return found


# --- the files -----------------------------------------------------------------------------------


def test_these_policies_are_shipped() -> None:
    expected = {"torch", "default", "fp16", "bf16", "safe", "fast", *SYSTEMS}
    assert set(NAMES) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_file_says_what_it_is_for_and_where_it_comes_from(name: str) -> None:
    header = text(name).split("\nextends:")[0].split("\ndevices:")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert len(header.splitlines()) >= 3
    source = re.search(r"^# Source: \S+", header, re.MULTILINE)
    assert source, header


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_systems_file_names_a_version_and_what_torch_does_not_have(name: str) -> None:
    assert re.search(r"@[0-9a-f]{7,}|\b3\.3\.1\b", text(name))
    assert "# Without a counterpart in torch" in text(name).split("\nloss_scale:")[1]


@pytest.mark.parametrize("name", NAMES)
def test_lines_fit(name: str) -> None:
    assert [line for line in text(name).splitlines() if len(line) > 100] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_op_is_one_that_there_is(name: str) -> None:
    rules = policyfile.load(name).ops
    assert [rule.op for rule in rules if not opnames.resolve(rule.op)] == []
    plan.check(policyfile.load(name))


@pytest.mark.parametrize("name", NAMES)
def test_every_condition_is_on_an_argument_that_there_is(name: str) -> None:
    conditions = [
        (rule.op, rule.when, rule.into) for rule in policyfile.load(name).ops if rule.when
    ]
    there_are = {"tensorflow": [("gelu", (("approximate", "tanh"),), FLOAT32)]}
    assert conditions == there_are.get(name, [])


# --- where they start from -----------------------------------------------------------------------

MIXED = {"cuda": "float16", "cpu": "bfloat16", "xpu": "bfloat16", "mps": "float16"}
DEVICE_LISTS = {"float16": "device", "bfloat16": "device"}
NO_LISTS = {"float16": "none", "bfloat16": "none"}
AS_ON_CUDA = {"float16": "cuda", "bfloat16": "device"}
STARTS = {
    "torch": (MIXED, DEVICE_LISTS),
    "default": (MIXED, AS_ON_CUDA),
    "fast": (MIXED, AS_ON_CUDA),
    "fp16": (dict.fromkeys(DEVICES, "float16"), AS_ON_CUDA),
    "bf16": (dict.fromkeys(DEVICES, "bfloat16"), AS_ON_CUDA),
    "safe": (MIXED, NO_LISTS),
    **dict.fromkeys(SYSTEMS, (MIXED, NO_LISTS)),
}


@pytest.mark.parametrize("name", NAMES)
def test_devices_and_the_lists_to_start_from(name: str) -> None:
    policy = policyfile.load(name)
    assert (dict(policy.devices), dict(policy.base)) == STARTS[name]
    assert policy.outputs == "float32"
    tensor_cores_only = ("parameter", "float32") if name == "safe" else ("any", "keep")
    assert (policy.lower_operands, policy.lower_results) == tensor_cores_only


def test_torchs_policy_has_no_rules_of_its_own() -> None:
    policy = policyfile.load("torch")
    assert policy.ops == policy.modules == policy.parameters == ()


INFINITY = float("inf")
SCALES = {
    # mode, init, growth, backoff, interval, hysteresis, min, max, hold_schedulers, repeat_first
    "torch": ("dynamic", 65536.0, 2.0, 0.5, 2000, 1, 0.0, INFINITY),
    "default": ("dynamic", 65536.0, 2.0, 0.5, 2000, 1, 1.0, 16777216.0, False, 10),
    "fp16": ("dynamic", 65536.0, 2.0, 0.5, 2000, 1, 1.0, 16777216.0, False, 10),
    "bf16": ("dynamic", 65536.0, 2.0, 0.5, 2000, 1, 1.0, 16777216.0, False, 10),
    "fast": ("dynamic", 65536.0, 2.0, 0.5, 2000, 1, 1.0, 16777216.0, False, 10),
    "safe": ("dynamic", 1024.0, 2.0, 0.5, 2000, 1, 1.0, 16777216.0, False, 10),
    "tensorflow": ("dynamic", 32768.0, 2.0, 0.5, 2000, 1, 1.0, INFINITY),
    "apex-o1": ("dynamic", 65536.0, 2.0, 0.5, 2000, 1, 0.0, 16777216.0),
    "mxnet": ("dynamic", 65536.0, 2.0, 0.5, 2000, 1, 0.0, 16777216.0),
    "paddle": ("dynamic", 65536.0, 2.0, 0.5, 2000, 1, 1.0, INFINITY),
}


@pytest.mark.parametrize("name", NAMES)
def test_constants_of_the_loss_scale(name: str) -> None:
    assert policyfile.load(name).loss_scale == LossScaleRule(*SCALES[name])


# --- the systems' lists --------------------------------------------------------------------------

FACTS: dict[str, dict[str, dict[str, str]]] = {
    # tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h
    "tensorflow": {
        LOWER: {
            "Conv2D": "conv1d conv2d",
            "Conv3D": "conv3d",
            "Conv2DBackpropInput": "conv_transpose1d conv_transpose2d",
            "Conv3DBackpropInputV2": "conv_transpose3d",
            "MatMul": "linear matmul mm addmm mv",
            "BatchMatMulV2": "bmm baddbmm",
            "Einsum": "einsum",
            "CudnnRNNV3": "lstm gru rnn",
            "LSTMBlockCell": "lstm_cell",
            "GRUBlockCell": "gru_cell",
            "Mha": "scaled_dot_product_attention",
        },
        FLOAT32: {
            "Exp": "exp",
            "Expm1": "expm1",
            "Pow": "pow",
            "Mean": "mean",
            "Sum": "sum",
            "SparseSoftmaxCrossEntropyWithLogits": "cross_entropy",
            # on no list: never converted
            "Rsqrt": "rsqrt",
            "Square": "square",
            "Cumsum": "cumsum",
            "CTCLossV2": "ctc_loss",
            "ResizeBilinear": "upsample_bilinear2d",
            "MatrixInverse": "inverse linalg_inv",
            "RFFT": "fft_rfft",
            # made of Mean and Rsqrt
            "LayerNormalization": "layer_norm",
        },
        NONE: {
            # infer
            "AddV2": "add",
            "AvgPool": "avg_pool2d",
            "Elu": "elu",
            "Erf": "erf",
            "FusedBatchNormV3": "batch_norm",
            "LeakyRelu": "leaky_relu",
            "Log": "log",
            "Log1p": "log1p",
            "LogSoftmax": "log_softmax",
            "Mul": "mul",
            "Prod": "prod",
            "RealDiv": "div",
            "Reciprocal": "reciprocal",
            "Selu": "selu",
            "Sigmoid": "sigmoid",
            "Softmax": "softmax",
            "Softplus": "softplus",
            "Sqrt": "sqrt",
            "Sub": "sub",
            "Tanh": "tanh",
            # clear
            "ConcatV2": "cat",
            "GatherV2": "index_select embedding",
            "MaxPool": "max_pool2d",
            "Relu": "relu",
            "Relu6": "relu6",
            "ResizeNearestNeighbor": "upsample_nearest2d",
            "SelectV2": "where",
            "TopKV2": "topk",
        },
    },
    # apex/amp/lists/*.py, apex/amp/rnn_compat.py
    "apex-o1": {
        LOWER: {
            "functional FP16_FUNCS": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
            "conv_transpose3d conv_tbc linear",
            "torch FP16_FUNCS": "conv1d prelu addmm addmv addr matmul mm mv addbmm baddbmm bmm",
            "RNN_NAMES": "rnn_relu rnn_tanh gru lstm rnn_relu_cell rnn_tanh_cell gru_cell "
            "lstm_cell",
        },
        FLOAT32: {
            "functional FP32_FUNCS": "interpolate grid_sample softplus log_softmax softmax gelu "
            "layer_norm group_norm cosine_similarity poisson_nll_loss cosine_embedding_loss "
            "cross_entropy hinge_embedding_loss kl_div l1_loss mse_loss margin_ranking_loss "
            "multilabel_margin_loss multi_margin_loss nll_loss binary_cross_entropy_with_logits "
            "smooth_l1_loss soft_margin_loss triplet_margin_loss ctc_loss",
            "torch FP32_FUNCS": "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt "
            "sinh tan pow cumprod cumsum dist norm prod std sum var renorm",
            "BANNED_FUNCS with allow_banned": "binary_cross_entropy",
        },
        WIDEST: {
            "CASTS": "addcdiv addcmul atan2 cross bilinear dot add div mul eq ge gt le lt ne",
            "CASTS of Tensor": "sub rsub",
            "SEQUENCE_CASTS": "cat stack",
        },
        NONE: {
            "nobody": "mean sigmoid relu tanh batch_norm dropout log1p sqrt square max_pool2d",
        },
    },
    # python/mxnet/amp/lists/symbol_fp16.py
    "mxnet": {
        LOWER: {
            "Convolution": "conv1d conv2d conv3d",
            "Deconvolution": "conv_transpose1d conv_transpose2d conv_transpose3d",
            "FullyConnected": "linear",
            "RNN": "lstm gru rnn",
            "_linalg_gemm": "addmm baddbmm",
            "_npi_matmul": "matmul",
            "_npi_einsum": "einsum",
        },
        FLOAT32: {
            "arccos": "acos",
            "arctanh": "atanh",
            "erfinv": "erfinv",
            "exp": "exp",
            "log1p": "log1p",
            "_power_scalar": "pow",
            "square": "square",
            "rsqrt": "rsqrt",
            "_npi_ldexp": "ldexp",
            "sum": "sum",
            "nansum": "nansum",
            "prod": "prod",
            "mean": "mean",
            "norm": "norm",
            "moments": "var_mean std_mean",
            "_npi_cumsum": "cumsum",
            "_npi_trace": "trace",
            "softmax": "softmax",
            "log_softmax": "log_softmax",
            "LayerNorm": "layer_norm",
            "GroupNorm": "group_norm",
            "InstanceNorm": "instance_norm",
            "softmax_cross_entropy": "cross_entropy",
            "LinearRegressionOutput": "mse_loss",
            "MAERegressionOutput": "l1_loss",
            "LogisticRegressionOutput": "binary_cross_entropy_with_logits",
            "SVMOutput": "multi_margin_loss",
            "smooth_l1": "smooth_l1_loss",
            "CTCLoss": "ctc_loss",
            "_linalg_inverse": "inverse linalg_inv",
            "_npi_svd": "svd linalg_svd",
            "gammaln": "lgamma",
            "digamma": "digamma",
            "topk": "topk",
            "argsort": "argsort",
            # conditional: by act_type
            "Activation softrelu": "softplus",
            "LeakyReLU elu": "elu",
            "LeakyReLU selu": "selu",
        },
        WIDEST: {
            "broadcast_add": "add",
            "broadcast_sub": "sub",
            "broadcast_mul": "mul",
            "broadcast_div": "div",
            "broadcast_maximum": "maximum",
            "broadcast_mod": "remainder",
            "broadcast_hypot": "hypot",
            "broadcast_equal": "eq",
            "broadcast_lesser": "lt",
            "_logical_and": "logical_and",
            "Concat": "cat",
            "stack": "stack",
            "dot": "dot mm mv",
            "batch_dot": "bmm",
            "where": "where",
            "_npi_tensordot": "tensordot",
            "_contrib_interleaved_matmul_selfatt_qk": "scaled_dot_product_attention",
        },
        NONE: {
            "LeakyReLU leaky": "leaky_relu",
            "Activation relu": "relu",
            "BatchNorm": "batch_norm",
            "Dropout": "dropout",
            "Embedding": "embedding",
            "Pooling": "max_pool2d avg_pool2d",
            "UpSampling": "upsample_nearest2d upsample_bilinear2d",
            "sigmoid": "sigmoid",
            "tanh": "tanh",
            "sqrt": "sqrt",
            "erf": "erf",
            "max": "max",
            "clip": "clamp",
        },
    },
    # paddle/amp/amp_lists.py
    "paddle": {
        LOWER: {
            "conv2d": "conv2d",
            "matmul_v2": "matmul mm",
            "linear_v2": "linear",
            "einsum": "einsum",
            "flash_attn": "scaled_dot_product_attention",
        },
        FLOAT32: {
            "FP16_BLACK_LIST": "tan acos asin sinh cosh atanh erfinv exp expm1 log log10 log2 "
            "reciprocal rsqrt pow square mean cumprod cumsum dist frobenius_norm renorm "
            "group_norm layer_norm softmax softplus log_softmax nll_loss huber_loss "
            "triplet_margin_loss",
            "reduce_sum": "sum",
            "reduce_prod": "prod",
            "pnorm": "linalg_vector_norm",
            "softmax_with_cross_entropy": "cross_entropy",
            "sigmoid_cross_entropy_with_logits": "binary_cross_entropy_with_logits",
            "bilinear_interp_v2": "upsample_bilinear2d",
            "nearest_interp_v2": "upsample_nearest2d",
            "lookup_table_v2": "embedding",
            "scatter": "scatter",
        },
        WIDEST: {
            "conv3d": "conv3d",
            "conv2d_transpose": "conv_transpose2d",
            "bmm": "bmm",
            "addmm": "addmm",
            "mv": "mv",
            "rnn": "lstm gru rnn",
            "prelu": "prelu",
            "rms_norm": "rms_norm",
        },
        NONE: {
            "elementwise_add": "add",
            "elementwise_mul": "mul",
            "batch_norm": "batch_norm",
            "tanh": "tanh",
            "sigmoid": "sigmoid",
            "relu": "relu",
            "leaky_relu": "leaky_relu",
            "pool2d": "max_pool2d avg_pool2d",
            "dropout": "dropout",
            "concat": "cat",
            "log1p": "log1p",
            "logsumexp": "logsumexp",
        },
    },
}


@pytest.mark.parametrize(
    ("name", "theirs", "torchs", "where"),
    [
        pytest.param(name, theirs, torchs, where, id=f"{name}-{theirs}")
        for name, by_list in FACTS.items()
        for where, facts in by_list.items()
        for theirs, torchs in facts.items()
    ],
)
def test_an_op_of_a_system_is_in_its_list(name: str, theirs: str, torchs: str, where: str) -> None:
    named = lists(name)
    ops = aten(torchs)
    assert {op: named.get(op, NONE) for op in ops} == dict.fromkeys(ops, where), theirs


@pytest.mark.parametrize("name", SYSTEMS)
def test_linear_algebra_and_spectra_have_no_half_kernels_and_run_in_float32(name: str) -> None:
    refuse_half = {
        op
        for op, by_device in opnames.table()["ops"].items()
        if by_device.get("cpu") == FLOAT32 and op.startswith(("linalg_", "fft_"))
    }
    assert len(refuse_half) > 30
    named = lists(name)
    assert {op for op in refuse_half if named.get(op) != FLOAT32} == set()


# --- the default ---------------------------------------------------------------------------------

ANTIALIASED = {"_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"}
WARNED_OF = {"rms_norm"}
"""On the CPU in bfloat16, where torch warns; on CUDA it is in torch's own list."""
FIXED = {"einsum", "lstm", "masked_fill", "mean", "where"}
"""Ops with a fix-up: of some of their overloads, or for some operands."""
HOT = (
    "add sub mul div neg relu relu6 leaky_relu gelu silu mish sigmoid tanh hardswish dropout "
    "layer_norm native_layer_norm rms_norm group_norm batch_norm instance_norm softmax "
    "log_softmax cat stack where masked_fill clamp linear matmul mm bmm addmm baddbmm einsum "
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "scaled_dot_product_attention mean max_pool2d avg_pool2d adaptive_avg_pool2d embedding lstm "
    "gru rnn lstm_cell gru_cell interpolate mse_loss "
    "binary_cross_entropy_with_logits exp log sqrt pow rsqrt"
)


@pytest.mark.parametrize("name", ["default", "fp16", "bf16"])
def test_the_default_does_not_name_what_models_are_made_of(name: str) -> None:
    assert aten(HOT) & set(lists(name)) == ANTIALIASED | WARNED_OF


@pytest.mark.parametrize(
    ("device", "dtype"), [("cuda", "float16"), ("cuda", "bfloat16"), ("cpu", "bfloat16")]
)
def test_in_typical_models_the_default_runs_torchs_kernels(device: str, dtype: str) -> None:
    kernels = plan.kernels(policyfile.load("default"), device, dtype)
    # Forms that write to an `out` are not what models are made of.
    ours = {op for op, _, which in (k.op.partition(".") for k in kernels) if "out" not in which}
    assert "square" in ours
    rare = ANTIALIASED | FIXED | (WARNED_OF if device == "cpu" else set())
    assert (aten(HOT) - rare) & ours == set()
    assert "mean.dim" not in {kernel.op for kernel in kernels}


def test_every_op_of_the_default_differs_from_torchs_list_somewhere() -> None:
    torchs = opnames.table()["ops"]

    def is_news(op: str, into: str) -> bool:
        said = torchs[op]
        starts = [said.get("cuda", NONE), *(said.get(device, NONE) for device in DEVICES)]
        return any(into != start for start in starts)

    rules = policyfile.load("default").ops
    assert len(rules) > 100
    idle = [r.op for r in rules if not any(is_news(op, r.into) for op in opnames.resolve(r.op))]
    assert idle == []


class Calling(nn.Module):
    """Calls a function inside its region, and owns the parameter that a region needs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.ones(()))
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def in_region(function: Callable[..., Any], *args: Any) -> Any:
    return Calling(function)(*args)


HALF_OPERAND: dict[str, tuple[Callable[[Any], torch.Tensor], float]] = {
    # op: (a call, given a maker of half tensors; what float32 gives)
    "square": (lambda h: h([300.0]).square(), 90000.0),
    "sum": (lambda h: h([1.0]).expand(70001).sum(), 70001.0),
    "nansum": (lambda h: h([1.0]).expand(70001).nansum(), 70001.0),
    "norm": (lambda h: torch.linalg.norm(h([1.0]).expand(90601)), 301.0),
    "dist": (lambda h: torch.dist(h([1.0]).expand(90601), h([0.0])), 301.0),
    "var": (lambda h: h([-400.0, 400.0]).var(), 320000.0),
    "var_mean": (lambda h: torch.var_mean(h([-400.0, 400.0]))[0], 320000.0),
    "std": (lambda h: h([-49152.0, 49152.0]).std(), 69511.425),
    "trace": (lambda h: h([[49152.0, 0.0], [0.0, 49152.0]]).trace(), 98304.0),
    "cumsum": (lambda h: h([1.0]).expand(3001).cumsum(0)[-1], 3001.0),
    "cumprod": (lambda h: h([16.0]).expand(5).cumprod(0)[-1], 1048576.0),
    "logcumsumexp": (lambda h: h([1000.0, 1000.0]).logcumsumexp(0)[-1], 1000.6931),
    "logsumexp": (lambda h: h([1000.0, 1000.0]).logsumexp(0), 1000.6931),
    "logaddexp": (lambda h: torch.logaddexp(h([1000.0]), h([1000.0])), 1000.6931),
    "logaddexp2": (lambda h: torch.logaddexp2(h([1000.0]), h([1001.0 - 1.0])), 1001.0),
    "exp2": (lambda h: h([17.0]).exp2(), 131072.0),
    "i0": (lambda h: torch.special.i0(h([14.0])), 129418.56),
    "logit": (lambda h: h([1.0]).logit(eps=1e-6), 13.8023),
    "lgamma": (lambda h: h([8192.0]).lgamma(), math.lgamma(8192)),
    "polygamma": (lambda h: torch.polygamma(1, h([1.0])), 1.6449341),
    "igamma": (lambda h: torch.igamma(h([1.0]), h([1.0])), 0.63212056),
    "inverse": (lambda h: torch.linalg.inv(h([[3.0]])), 1 / 3),
    "slogdet": (lambda h: torch.linalg.slogdet(h([[3.0, 0.0], [0.0, 3.0]]))[1], 2 * math.log(3)),
    "svd": (lambda h: torch.linalg.svdvals(h([[3.0, 0.0], [0.0, 0.0]]))[0], 3.0),
    "solve": (lambda h: torch.linalg.solve(h([[3.0]]), h([[1.0]])), 1 / 3),
    "cholesky": (lambda h: torch.linalg.cholesky(h([[3.0]])), math.sqrt(3)),
    "matrix_power": (lambda h: torch.linalg.matrix_power(h([[300.0]]), 2), 90000.0),
    "fft": (lambda h: torch.fft.rfft(h([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])).real[0], 21.0),
    "stft": (
        lambda h: torch.stft(
            h([1.0]).expand(12), 6, window=h([1.0]).expand(6), return_complex=True
        ).real[0, 0],
        6.0,
    ),
    "polar": (lambda h: torch.polar(h([3.0]), h([0.0])).real, 3.0),
    "quantile": (lambda h: torch.quantile(h([1.0, 2.0]), 0.3), 1.3),
    "histc": (lambda h: torch.histc(h([1.0]).expand(3001), 2, 0, 2)[1], 3001.0),
    "pdist": (lambda h: F.pdist(h([[0.0, 0.0], [3.0, 4.0]])), 5.0),
    "binary_cross_entropy": (
        lambda h: F.binary_cross_entropy(h([0.75]), h([1.0])),
        -math.log(0.75),
    ),
    "ctc_loss": (
        lambda h: F.ctc_loss(
            h([[-0.5, -1.0]]).expand(1, 1, 2),
            torch.tensor([[1]]),
            torch.tensor([1]),
            torch.tensor([1]),
        ),
        1.0,
    ),
    "antialiased": (
        lambda h: F.interpolate(
            h([[[[3.0]]]]).expand(1, 1, 4, 4), size=2, mode="bilinear", antialias=True
        ).amax(),
        3.0,
    ),
    "avg_pool3d": (lambda h: F.avg_pool3d(h([[[[1.0, 2.0]]]]), (1, 1, 2)).amax(), 1.5),
    "poisson": (lambda h: (torch.poisson(h([4096.0]).expand(99)) % 2).amax(), 1.0),
    "binomial": (lambda h: torch.binomial(h([3.0]), h([1.0])), 3.0),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", HALF_OPERAND)
def test_the_default_gives_float32s_number_for_half_operands(
    mixed: Any, op: str, dtype: str
) -> None:
    mixed("default", dtype)
    call, expected = HALF_OPERAND[op]

    def run() -> torch.Tensor:
        return call(lambda values: torch.tensor(values, dtype=getattr(torch, dtype)))

    result = in_region(run)
    assert float(result) == pytest.approx(expected, rel=1e-5, abs=0)


PRODUCT_INSIDE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cov": torch.cov,
    "corrcoef": torch.corrcoef,
    "matrix_power": lambda x: torch.linalg.matrix_power(x, 3),
    "matrix_exp": torch.linalg.matrix_exp,
    "pinv": torch.linalg.pinv,
    "affine_grid": lambda x: F.affine_grid(x[None, :2, :3], [1, 1, 9, 9], align_corners=False),
    "cdist": lambda x: torch.cdist(x, x + 1),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", PRODUCT_INSIDE)
def test_the_default_lowers_no_product_inside_these(mixed: Any, op: str, dtype: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    expected = PRODUCT_INSIDE[op](x)
    mixed("default", dtype)
    assert torch.equal(in_region(PRODUCT_INSIDE[op], x), expected)


ROWS = torch.tensor([0, 2])
TWO_DTYPES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    # op: a call with a 3x3 float32 tensor and a half one
    "bilinear": lambda f, h: F.bilinear(f, h, torch.ones(2, 3, 3)),
    "cross": lambda f, h: torch.linalg.cross(f, h),
    "dot": lambda f, h: torch.dot(f[0], h[1]),
    "embedding_bag": lambda f, h: F.embedding_bag(
        torch.tensor([[0, 1, 2]]), f, per_sample_weights=h[:1], mode="sum"
    ),
    "heaviside": torch.heaviside,
    "index_add": lambda f, h: f.index_add(0, ROWS, h[:2]),
    "index_add_": lambda f, h: f.clone().index_add_(0, ROWS, h[:2]),
    "index_copy": lambda f, h: f.index_copy(0, ROWS, h[:2]),
    "index_put": lambda f, h: f.index_put((ROWS,), h[:2]),
    "inner": torch.inner,
    "isclose": lambda f, h: torch.isclose(f, h, rtol=0.1) * 1.0,
    "lerp": lambda f, h: f.lerp(h, 0.5),
    "lerp_": lambda f, h: f.clone().lerp_(h, 0.5),
    "masked_scatter": lambda f, h: f.masked_scatter(f > 0, h),
    "meshgrid": lambda f, h: torch.meshgrid(f[0], h[0], indexing="ij")[0],
    "multi_dot": lambda f, h: torch.linalg.multi_dot([f, h, f]),
    "put": lambda f, h: f.put(ROWS, h[0, :2]),
    "scatter": lambda f, h: f.scatter(0, ROWS[None], h[:1]),
    "scatter_add": lambda f, h: f.scatter_add(0, ROWS[None], h[:1]),
    "scatter_reduce": lambda f, h: f.scatter_reduce(0, ROWS[None], h[:1], "mean"),
    "tensordot": lambda f, h: torch.tensordot(f, h, 1),
    "vdot": lambda f, h: torch.vdot(f[0], h[1]),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", TWO_DTYPES)
def test_the_default_lets_a_half_operand_meet_a_float32_one(
    mixed: Any, op: str, dtype: str
) -> None:
    torch.manual_seed(0)
    f, h = torch.randn(3, 3), torch.randn(3, 3).to(getattr(torch, dtype))
    expected = TWO_DTYPES[op](f, h.float())
    mixed("default", dtype)
    result = in_region(TWO_DTYPES[op], f, h)
    assert result.dtype is torch.float32
    lowered = 0.05 if op == "multi_dot" else 0.0
    assert torch.allclose(result, expected, rtol=lowered, atol=lowered)


# --- the others, at work -------------------------------------------------------------------------


def test_safe_shows_no_half_tensor_and_lowers_products_with_parameters_only(mixed: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    linear, conv, lstm = nn.Linear(8, 8), nn.Conv1d(5, 5, 1), nn.LSTM(8, 8)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    cell = nn.GRUCell(8, 8)
    pose, points = torch.randn(4, 4), torch.randn(4, 9)
    exact = {"linear": linear(x), "conv": conv(x), "lstm": lstm(x)[0], "pose": pose @ points}
    mixed("safe", "bfloat16")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([linear, conv, lstm, attention, cell])

        def forward(self) -> tuple[dict[str, torch.Tensor], set[torch.dtype]]:
            seen = {"linear": linear(x), "conv": conv(x), "lstm": lstm(x)[0], "pose": pose @ points}
            attended = attention(x, x, x)[0]
            rest = [attended, cell(x[0], x[1]), F.softmax(attended, -1), x @ x.mT, x.sum()]
            return seen, {tensor.dtype for tensor in (*seen.values(), *rest)}

    seen, dtypes = Model()()
    assert dtypes == {torch.float32}
    assert torch.equal(seen["pose"], exact["pose"])
    for name in ("linear", "conv", "lstm"):
        error = (seen[name] - exact[name]).abs().max()
        assert 0 < error < 0.02, name


W = torch.ones(4)
KERNEL = torch.ones(4, 4, 1, 1)
PARTS = torch.ones(4, 4, 1, 1, 1)
RESULTS: dict[str, dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]]] = {
    "fast": {
        "layer_norm": (lambda h: F.layer_norm(h, (4,), W, W), "float16"),
        "group_norm": (lambda h: F.group_norm(h, 2, W, W), "float16"),
        "rms_norm": (lambda h: F.rms_norm(h, (4,), W), "float16"),
        "softmax": (lambda h: F.softmax(h, -1), "float16"),
        "softmax of float32": (lambda h: F.softmax(h.float(), -1), "float32"),
        "interpolate": (lambda h: F.interpolate(h, scale_factor=2), "float16"),
        "log_softmax": (lambda h: F.log_softmax(h, -1), "float32"),
        "pow": (lambda h: h**2, "float32"),
        "mse_loss": (lambda h: F.mse_loss(h, h), "float32"),
    },
    "tensorflow": {
        "conv2d": (lambda h: F.conv2d(h.float(), KERNEL), "float16"),
        "softmax": (lambda h: F.softmax(h, -1), "float16"),
        "softmax of float32": (lambda h: F.softmax(h.float(), -1), "float32"),
        "batch_norm": (lambda h: F.batch_norm(h, None, None, W, W, training=True), "float16"),
        "layer_norm": (lambda h: F.layer_norm(h, (4,), W, W), "float32"),
        "log": (lambda h: h.log(), "float16"),
        "exp": (lambda h: h.exp(), "float32"),
        "mean": (lambda h: h.mean(), "float32"),
        "gelu": (F.gelu, "float16"),
        "gelu, tanh": (lambda h: F.gelu(h, approximate="tanh"), "float32"),
    },
    "apex-o1": {
        "linear": (lambda h: F.linear(h.float(), torch.ones(4, 4)), "float16"),
        "einsum": (lambda h: torch.einsum("bcij,bcjk->bcik", h.float(), h), "float16"),
        "mean": (lambda h: h.mean(), "float16"),
        "sum": (lambda h: h.sum(), "float32"),
        "gelu": (F.gelu, "float32"),
        "add a scalar tensor": (lambda h: h + torch.ones(()), "float32"),
        "add a number": (lambda h: h + 1.0, "float16"),
        "binary_cross_entropy": (lambda h: F.binary_cross_entropy(h * 0, h * 0), "float32"),
    },
    "mxnet": {
        "matmul": (lambda h: h.float() @ h.float(), "float16"),
        "dot of float32": (lambda h: torch.mm(h[0, 0].float(), h[0, 0].float()), "float32"),
        "batch_dot": (lambda h: torch.bmm(h[0], h[0]), "float16"),
        "leaky_relu": (F.leaky_relu, "float16"),
        "elu": (F.elu, "float32"),
        "selu": (F.selu, "float32"),
        "softplus": (F.softplus, "float32"),
        "mean": (lambda h: h.mean(), "float32"),
        "topk": (lambda h: h.topk(2)[0], "float32"),
        "concat": (lambda h: torch.cat([h, h.float()]), "float32"),
    },
    "paddle": {
        "conv2d": (lambda h: F.conv2d(h.float(), KERNEL), "float16"),
        "conv3d": (lambda h: F.conv3d(h[..., None], PARTS), "float32"),
        "bmm of half": (lambda h: torch.bmm(h[0], h[0]), "float16"),
        "bmm of both": (lambda h: torch.bmm(h[0], h[0].float()), "float32"),
        "sigmoid": (lambda h: h.sigmoid(), "float16"),
        "softmax": (lambda h: F.softmax(h, -1), "float32"),
        "square": (lambda h: h.square(), "float32"),
        "batch_norm": (lambda h: F.batch_norm(h, None, None, W, W, training=True), "float16"),
    },
}


@pytest.mark.parametrize("name", RESULTS)
def test_what_a_half_tensor_becomes_under_a_policy(mixed: Any, name: str) -> None:
    calls = RESULTS[name]
    half = torch.linspace(-1, 1, 64).reshape(1, 4, 4, 4).to(torch.float16)
    mixed(name, "float16")
    seen = in_region(lambda: {what: call(half).dtype for what, (call, _) in calls.items()})
    assert seen == {what: getattr(torch, dtype) for what, (_, dtype) in calls.items()}


def test_fast_and_paddle_exchange_gradients_in_half() -> None:
    """Paddle casts gradients back to float32 after they have been added up over all GPUs."""
    asked = {name for name in NAMES if policyfile.load(name).gradients == "half"}
    assert asked == {"fast", "paddle"}
