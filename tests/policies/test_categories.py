"""What autoamp believes of torch's autocast is what torch does when the ops are really called."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

from autoamp import fixups, opnames
from autoamp.categories import FLOAT32, LOWER, REFUSED, WIDEST, torchs_lists

from .children import Job, Seen, in_children, look
from .samples import OVERLOADS_WITHOUT, WITHOUT, Sample, samples

ROOT = Path(__file__).parents[2]
GIVEN = (("float32",), ("lower",), ("float32", "lower"), ("lower", "float32"))
PRECISIONS = [(device, lower) for device in ("cpu", "cuda") for lower in ("float16", "bfloat16")]

# --- torch's own test lists -----------------------------------------------------------------------

LISTS_OF_TORCH = {
    # attribute of torch's test lists: what is in there
    "cuda": {
        **dict.fromkeys(("torch_fp16", "nn_fp16", "linalg_fp16", "methods_fp16"), LOWER),
        **dict.fromkeys(("torch_fp32", "nn_fp32", "methods_fp32"), FLOAT32),
        "torch_need_autocast_promote": WIDEST,
        "torch_expect_builtin_promote": "",
        "methods_expect_builtin_promote": "",
        "banned": REFUSED,
    },
    "cpu": {
        **dict.fromkeys(("torch_16", "nn_16"), LOWER),
        **dict.fromkeys(("torch_fp32", "nn_fp32"), FLOAT32),
        "torch_need_autocast_promote": WIDEST,
        "torch_expect_builtin_promote": "",
        "methods_expect_builtin_promote": "",
    },
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_op_of_torchs_test_lists_is_in_that_list(device: str) -> None:
    tested = (AutocastCPUTestLists if device == "cpu" else AutocastTestLists)("cpu")
    assert set(vars(tested)) == LISTS_OF_TORCH[device].keys()
    for attribute, expected in LISTS_OF_TORCH[device].items():
        names = {
            entry[0].strip("_") if "methods" in attribute else entry[0]
            for entry in getattr(tested, attribute)
        }
        assert names
        assert {name: lists_of(device, name) for name in names} == {
            name: {expected} - {""} for name in names
        }


def lists_of(device: str, packet: str) -> set[str]:
    """The lists that the overloads of an op are in."""
    return {said for name, said in torchs_lists(device).items() if name.split(".")[0] == packet}


# --- called under torch's autocast ----------------------------------------------------------------

FLOAT32_INSIDE = {"scaled_dot_product_attention": "CUDA's fallback multiplies in float32 inside"}
STATISTICS = {"_scaled_dot_product_flash_attention": "logsumexp is float32 whatever the operands"}
MOVES_ONLY = {"view_as_complex"}
NOT_FAKED = {
    # the op needs a CUDA build; what its operands were cast to is seen all the same
    *("_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "gru_cell"),
    *("cudnn_convolution", "cudnn_convolution_transpose", "grid_sampler"),
}
NO_HALF_KERNEL = {
    ("cpu", dtype, "mkldnn_rnn_layer")
    for dtype in ("float16", "bfloat16")
    if fixups.lstm_is_missing(dtype)
}


@functools.cache
def by_overload(name: str) -> Sample | None:
    """The call of an overload."""
    return next((s for s in samples(name.partition(".")[0]) if s.overload == name), None)


@functools.cache
def seen_on_cuda(names: tuple[str, ...]) -> dict[tuple[str, str], list[Seen]]:
    """{(overload, lower): what was seen for each of GIVEN}, all from one child."""
    keys = [(name, lower) for name in names for lower in ("float16", "bfloat16")]
    jobs = [Job("cuda", lower, by_overload(name), given) for name, lower in keys for given in GIVEN]
    seen = iter(in_children(jobs))
    return {key: [next(seen) for _ in GIVEN] for key in keys}


def seen_of(device: str, lower: str, names: Iterable[str]) -> dict[str, list[Seen]]:
    if device == "cuda":
        found = seen_on_cuda((*torchs_lists("cuda"), *IN_NO_LIST))
        return {name: found[name, lower] for name in names}
    return {
        name: [look(Job(device, lower, by_overload(name), given)) for given in GIVEN]
        for name in names
    }


def expected(category: str, operands: set[str]) -> str:
    """The precision of a call by its list, from those of its operands."""
    if category in (LOWER, FLOAT32):
        return category
    return "lower" if operands == {"lower"} else "float32"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_op_in_a_list_is_called(device: str) -> None:
    assert [name for name in torchs_lists(device) if by_overload(name) is None] == []


@pytest.mark.parametrize(("device", "lower"), PRECISIONS)
def test_ops_run_under_autocast_as_their_list_says(device: str, lower: str) -> None:
    lists = torchs_lists(device)
    wrong = {}
    for name, seen in seen_of(device, lower, lists).items():
        for given, one in zip(GIVEN, seen, strict=True):
            operands = set(given[: len(by_overload(name).operands)])
            right = expected(lists[name], operands)
            compute = {"lower", "float32"} if name in FLOAT32_INSIDE else {right}
            outputs = one.outputs[:1] if name in STATISTICS else one.outputs
            fails = (device == "cuda" and name in NOT_FAKED) or (
                device,
                lower,
                name,
            ) in NO_HALF_KERNEL
            if lists[name] == REFUSED:
                good = "unsafe to autocast" in one.error and not one.compute
            else:
                good = (
                    bool(one.error) == fails
                    and (set(one.compute) <= compute)
                    and (bool(one.compute) or name in MOVES_ONLY)
                    and set(outputs) <= {right}
                )
            if not good:
                wrong[name, given] = one
    assert wrong == {}


IN_NO_LIST = (
    *("abs", "add.Tensor", "amax", "avg_pool2d", "clamp", "cos", "div.Tensor", "dropout", "elu"),
    *("embedding", "flip", "gelu", "glu", "hardswish", "leaky_relu", "masked_fill.Scalar"),
    *("maximum", "mean.dim", "mul.Tensor", "neg", "relu", "rsub.Scalar", "sigmoid", "silu"),
    *("sqrt", "sub.Tensor", "tanh", "tril", "var", "where.self"),
)


@pytest.mark.parametrize(("device", "lower"), PRECISIONS)
def test_ops_in_no_list_run_as_they_are_given(device: str, lower: str) -> None:
    assert not set(IN_NO_LIST) & set(torchs_lists(device))
    for name, seen in seen_of(device, lower, IN_NO_LIST).items():
        for given, one in zip(GIVEN[:2], seen, strict=False):
            assert (name, given, one) == (name, given, Seen(given, given))


# --- the table of ops -----------------------------------------------------------------------------


def test_every_op_that_a_policy_can_name_has_a_call_or_a_reason() -> None:
    ops = opnames.table()["ops"]
    assert {op for op in ops if not samples(op)} == WITHOUT.keys()
    uncalled = {
        name
        for op in ops.keys() - WITHOUT.keys()
        for name in overloads_that_make_tensors(op)
        if by_overload(name) is None
    }
    assert uncalled == OVERLOADS_WITHOUT.keys()


def overloads_that_make_tensors(op: str) -> Iterable[str]:
    packet = getattr(torch.ops.aten, op)
    for key in packet.overloads():
        schema = getattr(packet, key)._schema
        takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
        gives = any("Tensor" in str(result.type) for result in schema.returns)
        if (
            takes
            and gives
            and not any(a.alias_info and a.alias_info.is_write for a in schema.arguments)
        ):
            yield op if key == "default" else f"{op}.{key}"


def test_the_table_of_ops_is_what_the_installed_torch_says() -> None:
    table = opnames.table()
    script: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "ops"))
    generated = script["table"]()
    if generated["torch"] == table["torch"]:
        assert table == generated
    else:  # another torch: the ops that both know, in the lists of the devices that both know
        assert set(table["ops"]) & set(generated["ops"])
