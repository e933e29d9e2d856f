"""How ops can be spelled, and what is said about a spelling that means none."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.profiler import profile

from autoamp import opnames


@pytest.mark.parametrize(
    ("spelling", "ops"),
    [
        ("softmax", ("softmax",)),
        ("F.softmax", ("softmax",)),
        ("torch.softmax", ("softmax",)),
        ("aten::softmax", ("softmax",)),
        ("torch.nn.functional.softmax", ("softmax",)),
        ("torch.ops.aten.softmax", ("softmax",)),
        ("torch.Tensor.softmax", ("softmax",)),
        ("torch.special.softmax", ("special_softmax",)),
        ("torch.linalg.vecdot", ("linalg_vecdot",)),
        ("linalg_vecdot", ("linalg_vecdot",)),
        ("torch.fft.rfft", ("fft_rfft",)),
        ("torch.sub", ("sub", "rsub")),
        ("rsub", ("rsub",)),
        ("F.cross_entropy", ("cross_entropy_loss",)),
        ("F.nll_loss", ("nll_loss", "nll_loss2d")),
        ("torch.true_divide", ("div",)),
        ("F.upsample_nearest", ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")),
        ("sofmax", ()),
        ("softmax.int", ()),
        ("torch.nn.Softmax", ()),
        ("torch.linalg.softmax", ()),
        ("aten::", ()),
        ("", ()),
    ],
)
def test_a_spelling_means_these_ops(spelling, ops):
    assert opnames.resolve(spelling) == ops


def test_every_name_means_ops_that_the_table_has():
    known = opnames.table()["ops"]
    wrong = {
        name: ops for name, ops in opnames.spellings().items() if not ops or set(ops) - known.keys()
    }
    assert wrong == {}


def test_what_is_made_of_others_is_made_of_ops_that_can_be_named_and_is_none_itself():
    names = opnames.spellings()
    wrong = {
        name
        for name, others in opnames.MADE_OF_OTHERS.items()
        if name in names or any(other not in names for other in others)
    }
    assert wrong == set()


# Functions of Python around ops that have none: helpers, dtype conversions, products of numbers in
# eight bits, and integers.
NO_ARITHMETIC_IN_HALF = {
    *("assert_int_or_pair", "boolean_dispatch", "one_hot"),
    *("grouped_mm", "scaled_grouped_mm", "scaled_mm"),
}


def test_every_function_of_torch_nn_functional_can_be_named_or_comes_with_advice():
    silent = {
        name
        for name in dir(F)
        if name.islower()
        and callable(getattr(F, name))
        and not name.startswith("_")
        and "torch_function" not in name
        and opnames.complaint(name).startswith("unknown op")
        and not opnames.resolve(name)
    }
    assert silent <= NO_ARITHMETIC_IN_HALF


def called_by(call: Callable[[], object]) -> set[str]:
    """The ops of aten that the dispatcher is asked for, in-place forms under the op's name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # functions that torch would like to see less of
        with profile() as record:
            call()
    names = (event.name for event in record.function_events)
    return {name.removeprefix("aten::").removesuffix("_") for name in names if "aten::" in name}


ROW, MATRIX, SEQUENCE = torch.ones(4), torch.rand(4, 5) + 0.5, torch.rand(2, 3, 8)
IMAGE, VOLUME = torch.rand(2, 3, 8, 8), torch.rand(1, 2, 3, 8, 8)
CLASSES, PIXELS = torch.tensor([0, 1, 2, 3]), torch.zeros(2, 8, 8, dtype=torch.long)
ATTENTION = torch.nn.MultiheadAttention(8, 2)

MADE_OF = {
    "gaussian_nll_loss": [lambda: F.gaussian_nll_loss(MATRIX, MATRIX, MATRIX)],
    "gumbel_softmax": [lambda: F.gumbel_softmax(MATRIX)],
    "linear_cross_entropy": [lambda: F.linear_cross_entropy(MATRIX, MATRIX, CLASSES)],
    "local_response_norm": [
        lambda: F.local_response_norm(SEQUENCE, 2),
        lambda: F.local_response_norm(IMAGE, 2),
    ],
    "lp_pool1d": [lambda: F.lp_pool1d(SEQUENCE, 2, 2)],
    "lp_pool2d": [lambda: F.lp_pool2d(IMAGE, 2, 2)],
    "lp_pool3d": [lambda: F.lp_pool3d(VOLUME, 2, 2)],
    "multi_head_attention_forward": [
        lambda: ATTENTION(SEQUENCE, SEQUENCE, SEQUENCE),
        lambda: ATTENTION(SEQUENCE, SEQUENCE, SEQUENCE, attn_mask=torch.zeros(2, 2)),
        lambda: ATTENTION(SEQUENCE, SEQUENCE, SEQUENCE, need_weights=False),
    ],
    "multilabel_soft_margin_loss": [lambda: F.multilabel_soft_margin_loss(MATRIX, MATRIX)],
    "normalize": [lambda: F.normalize(MATRIX)],
    "softmin": [lambda: F.softmin(MATRIX, 1)],
    "softsign": [lambda: F.softsign(MATRIX)],
    "tanhshrink": [lambda: F.tanhshrink(MATRIX)],
    "triplet_margin_with_distance_loss": [
        lambda: F.triplet_margin_with_distance_loss(MATRIX, MATRIX, MATRIX)
    ],
}


def test_there_is_a_call_of_each_function_that_is_made_of_others():
    assert MADE_OF.keys() == opnames.MADE_OF_OTHERS.keys()


@pytest.mark.parametrize("name", [name for name in MADE_OF if hasattr(F, name)])
def test_a_function_that_is_made_of_others_calls_each_of_them_and_no_op_of_its_name(name):
    called = set().union(*(called_by(call) for call in MADE_OF[name]))
    assert name not in called
    for other in opnames.MADE_OF_OTHERS[name]:
        assert called & {*opnames.resolve(other)}, other


MEANT = {
    "adaptive_max_pool1d_with_indices": lambda: F.adaptive_max_pool1d_with_indices(SEQUENCE, 2),
    "adaptive_max_pool2d_with_indices": lambda: F.adaptive_max_pool2d_with_indices(IMAGE, 2),
    "adaptive_max_pool3d_with_indices": lambda: F.adaptive_max_pool3d_with_indices(VOLUME, 2),
    "affine_grid": lambda: F.affine_grid(torch.rand(2, 2, 3), [2, 3, 4, 4]),
    "clip": lambda: MATRIX.clip(1),
    "concat": lambda: torch.concat([ROW, ROW]),
    "concatenate": lambda: torch.concatenate([ROW, ROW]),
    "cross_entropy": lambda: F.cross_entropy(MATRIX, CLASSES),
    "divide": lambda: MATRIX.divide(2),
    "dropout1d": lambda: F.dropout1d(SEQUENCE),
    "dropout2d": lambda: F.dropout2d(IMAGE),
    "dropout3d": lambda: F.dropout3d(VOLUME),
    "fold": lambda: F.fold(torch.rand(1, 12, 12), (4, 5), 2),
    "fractional_max_pool2d_with_indices": lambda: F.fractional_max_pool2d(IMAGE, 2, 3),
    "fractional_max_pool3d_with_indices": lambda: F.fractional_max_pool3d(VOLUME, 2, 1),
    "grid_sample": lambda: F.grid_sample(IMAGE, torch.rand(2, 4, 4, 2), align_corners=False),
    "interpolate": lambda: F.interpolate(IMAGE, 4, mode="bicubic", antialias=True),
    "logsigmoid": lambda: F.logsigmoid(MATRIX),
    "max_unpool1d": lambda: F.max_unpool1d(SEQUENCE, torch.arange(8).expand(2, 3, 8), 1),
    "multiply": lambda: MATRIX.multiply(2),
    "nll_loss": lambda: F.nll_loss(IMAGE, PIXELS),
    "norm": lambda: MATRIX.norm(3, 1),
    "rnn": lambda: torch.nn.RNN(5, 3)(MATRIX),
    "sub": lambda: 2 - MATRIX,
    "subtract": lambda: torch.subtract(MATRIX, MATRIX),
    "true_divide": lambda: MATRIX.true_divide(2),
    "unfold": lambda: F.unfold(IMAGE, 2),
    "upsample": lambda: F.upsample(SEQUENCE, 4),
    "upsample_bilinear": lambda: F.upsample_bilinear(IMAGE, 4),
    "upsample_nearest": lambda: F.upsample_nearest(IMAGE, 4),
}


def test_there_is_a_call_of_each_name_that_means_other_ops():
    assert MEANT.keys() == opnames.SPELLINGS.keys()


@pytest.mark.parametrize("name", MEANT)
def test_a_name_that_means_other_ops_calls_one_of_them(name):
    assert called_by(MEANT[name]) & {*opnames.resolve(name)}


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("sofmax", "unknown op 'sofmax' in x. Did you mean 'softmax'?"),
        ("F.layernorm", "unknown op 'F.layernorm' in x. Did you mean 'layer_norm'?"),
        ("Softmax", "unknown op 'Softmax' in x. Did you mean 'softmax'?"),
        ("torch.nn.BatchNorm", "unknown op 'torch.nn.BatchNorm' in x. Did you mean 'batch_norm'?"),
        (
            "torch.nn.modules.normalization.LayerNorm",
            "unknown op 'torch.nn.modules.normalization.LayerNorm' in x. "
            "Did you mean 'layer_norm'?",
        ),
        ("normalise", "unknown op 'normalise' in x. Did you mean 'normalize'?"),
        (
            "softmax.int",
            "'softmax.int' in x is an overload; name the op, for all of them: 'softmax'.",
        ),
        (
            "torch.ops.aten.sub.Tensor",
            "'torch.ops.aten.sub.Tensor' in x is an overload; name the op, for all of them: 'sub'.",
        ),
        ("torch.add_", "'torch.add_' in x is an in-place form; name the op: 'add'."),
        ("F.softmin", "'F.softmin' in x is made of other ops; name those: neg, softmax."),
        (
            "flurb",
            "unknown op 'flurb' in x. Use the name of a function in torch.nn.functional or torch, "
            "like softmax.",
        ),
        (
            "",
            "unknown op '' in x. Use the name of a function in torch.nn.functional or torch, "
            "like softmax.",
        ),
    ],
)
def test_what_is_said_about_a_spelling_that_means_no_op(spelling, message):
    assert opnames.resolve(spelling) == ()
    assert opnames.complaint(spelling, "x") == message
    assert opnames.complaint(spelling) == message.replace(" in x", "")
