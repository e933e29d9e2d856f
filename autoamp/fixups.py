"""The table of ops that half precision breaks, and what is done about each.

Here are those that no list of a policy can put right, or that no policy can name; which ops run in
float32 or in the widest dtype of their operands is said in ``policies/default.yaml``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .categories import AS_GIVEN, FLOAT32, WIDEST, overload
from .kernels import Adjust, Arguments, Kernel, Operands, is_parameter

LIMITS: Mapping[torch.dtype, float] = {
    dtype: torch.finfo(dtype).max for dtype in (torch.float16, torch.bfloat16)
}
"""The largest finite number of each half type."""


@dataclass(frozen=True, slots=True)
class Fixup:
    """One kind of failure.

    `ops` are overloads with blanks between them; those that this torch does not have are left out.
    What is done is said in words, and by the list in which the ops run, by what becomes of their
    arguments, and by the operands without which they run in float32. `breaks` asks the installed
    torch, for a dtype. `always`: also where the policy has no fix-ups, because the call cannot work
    otherwise.
    """

    ops: str
    wrong: str
    done: str
    source: str
    category: str = AS_GIVEN
    adjust: Adjust | None = None
    only_with: Operands | None = None
    devices: tuple[str, ...] = ("cpu", "cuda", "xpu", "mps")
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    breaks: Callable[[str], bool] = lambda dtype: True
    always: bool = False

    @property
    def why(self) -> str:
        """What goes wrong and what is done, for explanations and reports."""
        return f"fix-up: {self.wrong}; {self.done}"


def limited(value: Any, limit: float) -> Any:
    """A number, or the numbers in a tensor, within the finite range; infinity and NaN stay."""
    if isinstance(value, torch.Tensor):
        return torch.where(value.isinf(), value, value.clamp(-limit, limit))
    if isinstance(value, (int, float)) and limit < abs(value) < math.inf:
        return math.copysign(limit, value)
    return value


def within_range(**bounds: str) -> Adjust:
    """Constants stay finite in a half type: `bounds` names each, and what tells the type.

    That is an argument, which is a tensor or a dtype; of several, with blanks between them, the
    first that is given.
    """

    def adjust_for(op: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], Arguments]:
        places = {argument.name: i for i, argument in enumerate(op._schema.arguments)}
        found = [
            (places[name], name, [(places[word], word) for word in told_by.split()])
            for name, told_by in bounds.items()
        ]

        def adjust(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            for place, name, told_by in found:
                value = _argument(place, name, args, kwargs)
                given = (_argument(at, word, args, kwargs) for at, word in told_by)
                like = next((one for one in given if one is not None), None)
                if isinstance(like, (list, tuple)):
                    like = like[0]
                limit = LIMITS.get(getattr(like, "dtype", like))  # type: ignore[arg-type]
                if limit is not None and _is_constant(value, like):
                    args, kwargs = _with(limited(value, limit), place, name, args, kwargs)
            return args, kwargs

        return adjust

    return adjust_for


def _argument(place: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[place] if place < len(args) else kwargs.get(name)


def _with(
    value: Any, place: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    if place < len(args):
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: value}


def _is_constant(value: Any, like: Any) -> bool:
    """Whether a value takes the dtype of `like`: a number, or a tensor without dimensions."""
    if not isinstance(value, torch.Tensor):
        return value is not None
    return value.dim() == 0 and value.dtype is not like.dtype and like.dim() > 0


def beside_the_fill(sign: int) -> Adjust:
    """For comparisons: constants out of range part what was filled with such a one from the rest.

    ``x > -1e8`` has to be false, and ``x >= -1e8`` too, where -1e9 was filled in and the largest
    number was taken. Constants of this `sign` become the largest number but one, the others the
    largest.
    """

    def adjust_for(op: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], Arguments]:
        def adjust(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            dtype, value = args[0].dtype, args[1]
            if dtype in LIMITS and isinstance(value, (int, float)):
                kept = limited(value, LIMITS[dtype])
                if kept is not value and kept * sign > 0:
                    kept *= 1 - _LAST_PLACE[dtype]
                args = (args[0], kept, *args[2:])
            return args, kwargs

        return adjust

    return adjust_for


_LAST_PLACE = {dtype: torch.finfo(dtype).eps / 2 for dtype in LIMITS}


def as_the_destination(name: str) -> Adjust:
    """What is written, argument `name`, takes the dtype of the half tensor it is written to."""

    def adjust_for(op: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], Arguments]:
        names = [argument.name for argument in op._schema.arguments]
        place = names.index(name)
        accumulates = names.index("accumulate") if "accumulate" in names else len(names)

        def adjust(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            destination, value = args[0], _argument(place, name, args, kwargs)
            limit = LIMITS.get(destination.dtype)
            if (
                limit is None
                or value.dtype not in (torch.float32, *LIMITS)
                or value.dtype is destination.dtype
                or _argument(accumulates, "accumulate", args, kwargs)
            ):
                return args, kwargs
            value = limited(value, limit).to(destination.dtype)
            return _with(value, place, name, args, kwargs)

        return adjust

    return adjust_for


def as_float32(op: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], Arguments]:
    """The first argument as float32, also where the call names the dtype of its result."""

    def adjust(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        return ((args[0].float(), *args[1:]), kwargs) if args[0].dtype in LIMITS else (args, kwargs)

    return adjust


def float32_result(op: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], Arguments]:
    """The result of a half tensor is float32 unless the caller names a dtype; nothing is copied."""

    def adjust(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        if args[0].dtype in LIMITS and kwargs.get("dtype") is None:
            return args, {**kwargs, "dtype": torch.float32}
        return args, kwargs

    return adjust


def is_of_a_network(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an activation or a weight; other float32 tensors are plain data."""
    return tensor.dtype in LIMITS or tensor.requires_grad or is_parameter(tensor)


def set_item(original: Callable[..., Any], session: Any) -> Callable[..., Any]:
    """`Tensor.__setitem__`: a number is kept in range here; below it is a half infinity already."""
    local = session.local

    def __setitem__(self: torch.Tensor, index: Any, value: Any) -> None:  # noqa: N807
        if local.region is not None and isinstance(value, (int, float)):
            limit = LIMITS.get(self.dtype)
            if limit is not None:
                value = limited(value, limit)
        original(self, index, value)

    return __setitem__


@functools.cache
def lstm_is_missing(dtype: str) -> bool:
    """Whether torch has no LSTM for training in this dtype on this CPU."""
    x, weight = torch.zeros(1, 1, 1), torch.zeros(4, 1, requires_grad=True)
    bias = torch.zeros(4, requires_grad=True)
    weights = [weight, weight, bias, bias]
    try:
        with torch.autocast("cpu", getattr(torch, dtype)):
            torch.lstm(x, (x, x), weights, True, 1, 0.0, True, False, False)
    except RuntimeError:
        return True
    return False


LSTM = "lstm.input lstm.data"
_CONSTANT = "a constant beyond the half type's range is refused, or becomes infinite"
_COMPARED = "a half tensor that was filled with such a constant is compared with one"
_KEPT = "the nearest finite number is taken; infinities stay"
_NO_KERNEL = "there is no half kernel"
_IN_FLOAT32 = "it runs in float32"

FIXUPS = (
    Fixup(
        LSTM,
        "oneDNN has no float16 LSTM for this CPU",
        "the whole layer runs in float32",
        "torch 2.13, ATen/native/mkldnn/RNN.cpp",
        FLOAT32,
        devices=("cpu",),
        dtypes=("float16",),
        breaks=lstm_is_missing,
        always=True,
    ),
    Fixup(
        LSTM,
        "oneDNN has no bfloat16 LSTM for this CPU, and float32 inputs are sent there",
        "the whole layer runs in float32",
        "torch 2.13, ATen/native/RNN.cpp (use_mkldnn looks at the input, autocast comes after)",
        FLOAT32,
        devices=("cpu",),
        dtypes=("bfloat16",),
        breaks=lstm_is_missing,
    ),
    # Constants: masks of -1e9, sentinels, torch.finfo(torch.float32).min.
    Fixup(
        "masked_fill.Scalar masked_fill_.Scalar masked_fill.Tensor masked_fill_.Tensor "
        "index_fill.int_Scalar index_fill_.int_Scalar index_fill.int_Tensor index_fill_.int_Tensor "
        "scatter.value scatter_.value scatter.value_reduce scatter_.value_reduce "
        "fill.Scalar fill_.Scalar fill.Tensor fill_.Tensor constant_pad_nd",
        _CONSTANT,
        _KEPT,
        "NVIDIA/apex#93, pytorch/pytorch#7382",
        adjust=within_range(value="self"),
    ),
    Fixup(
        "full_like new_full",
        _CONSTANT,
        _KEPT,
        "QwenLM/Qwen#32",
        adjust=within_range(fill_value="dtype self"),
    ),
    Fixup(
        "fill_diagonal_",
        _CONSTANT,
        _KEPT,
        "pytorch/pytorch#7382",
        adjust=within_range(fill_value="self"),
    ),
    Fixup(
        "pad_sequence",
        _CONSTANT,
        _KEPT,
        "pytorch/pytorch#7382",
        adjust=within_range(padding_value="sequences"),
    ),
    Fixup(
        "where.self where.ScalarOther where.ScalarSelf",
        _CONSTANT,
        _KEPT,
        "pytorch/pytorch#7382",
        adjust=within_range(self="other", other="self"),
    ),
    Fixup(
        "nan_to_num nan_to_num_",
        _CONSTANT,
        _KEPT,
        "torch 2.13, ATen/native/cpu/UnaryOpsKernel.cpp",
        adjust=within_range(nan="self", posinf="self", neginf="self"),
    ),
    Fixup(
        "eq.Scalar eq_.Scalar ne.Scalar ne_.Scalar",
        _COMPARED,
        "the constant is taken as the fill took it",
        "follows from the rows above",
        adjust=within_range(other="self"),
    ),
    Fixup(
        "gt.Scalar gt_.Scalar le.Scalar le_.Scalar",
        _COMPARED,
        "the largest number counts as beyond every constant out of range",
        "follows from the rows above",
        adjust=beside_the_fill(1),
    ),
    Fixup(
        "ge.Scalar ge_.Scalar lt.Scalar lt_.Scalar",
        _COMPARED,
        "the largest number counts as beyond every constant out of range",
        "follows from the rows above",
        adjust=beside_the_fill(-1),
    ),
    # Destinations.
    Fixup(
        "index_put index_put_ index_put.hacked_twin index_put_.hacked_twin _index_put_impl_",
        "values of another dtype than the tensor they are written to are refused",
        "they take its dtype, and finite numbers stay finite",
        "pytorch/pytorch#81876, facebookresearch/advprompter#12",
        WIDEST,
        as_the_destination("values"),
    ),
    Fixup(
        "masked_scatter masked_scatter_",
        "values of another dtype than the tensor they are written to are refused",
        "they take its dtype, and finite numbers stay finite",
        "torch 2.13, ATen/native/TensorAdvancedIndexing.cpp",
        WIDEST,
        as_the_destination("source"),
    ),
    Fixup(
        "addbmm_ addmm_ addmv_ addr_ baddbmm_ addbmm.out addmm.out addmv.out addr.out baddbmm.out "
        "bmm.out linalg_vecdot.out linear.out matmul.out mm.out mv.out",
        "autocast leaves forms alone that write, and they refuse operands of several dtypes",
        "the product is computed in the widest dtype, and the destination keeps its own",
        "torch amp, op eligibility; pytorch/pytorch#35868",
        WIDEST,
    ),
    # Precision.
    Fixup(
        "einsum",
        "tables of positions and angles lose the digits that they are made for",
        "a product of plain float32 data runs in float32",
        "EleutherAI/gpt-neox#1003, huggingface/transformers#29285",
        only_with=is_of_a_network,
    ),
    Fixup(
        "mean",
        "means of losses that are added up stop at 2048 times their size (in bfloat16 256)",
        "the mean of all elements is float32; it widens no other tensor",
        "pytorch/pytorch#61523",
        adjust=float32_result,
    ),
    # Random numbers.
    Fixup(
        "rand_like",
        "one in 2048 half numbers is 0 (in bfloat16 one in 256), and its logarithm infinite",
        "the numbers are float32, unless a dtype is asked for",
        "torch 2.13, ATen/core/TransformationHelper.h",
        FLOAT32,
    ),
    Fixup(
        "exponential_",
        "half numbers that are 0 are drawn, and their logarithm is infinite",
        "they are drawn in float32",
        "torch 2.13, ATen/core/TransformationHelper.h; torch.nn.functional.gumbel_softmax",
        FLOAT32,
    ),
    Fixup(
        "_standard_gamma _standard_gamma_grad",
        _NO_KERNEL,
        _IN_FLOAT32,
        "torch 2.13, ATen/native/Distributions.cpp",
        FLOAT32,
    ),
    # What no policy can name.
    Fixup(
        "allclose",
        "operands of two dtypes are refused",
        "they take the widest of theirs",
        "torch 2.13, ATen/native/TensorCompare.cpp; torch.nn.utils.parametrizations.orthogonal",
        WIDEST,
    ),
    Fixup(
        "_sparse_mm _sparse_mm.reduce _sparse_addmm sparse_sampled_addmm _sparse_softmax "
        "_sparse_softmax.int _sparse_log_softmax _sparse_log_softmax.int",
        _NO_KERNEL,
        _IN_FLOAT32,
        "pytorch/pytorch#41069",
        FLOAT32,
    ),
    Fixup(
        "complex",
        "complex numbers of halves hardly compute, and bfloat16 has none",
        _IN_FLOAT32,
        "torch 2.13, ATen/native/TensorFactories.cpp",
        FLOAT32,
    ),
    Fixup(
        "quantize_per_channel quantize_per_tensor quantize_per_tensor_dynamic",
        "only float32 is quantized",
        "what is quantized is cast to float32",
        "torch 2.13, ATen/native/quantized/QTensor.cpp",
        adjust=as_float32,
    ),
    Fixup(
        "rrelu rrelu_",
        _NO_KERNEL,
        _IN_FLOAT32,
        "torch 2.13, ATen/native/Activation.cpp",
        FLOAT32,
        devices=("cpu",),
    ),
)


def kernels_for(device_type: str, dtype: str, wanted: bool = True) -> list[Kernel]:
    """The kernels that regions in `dtype` on a device need in this torch.

    `wanted`: the policy has fix-ups; else there are only those without which a call cannot work.
    """
    return [
        Kernel(
            op,
            device_type,
            fixup.category,
            fixup.why,
            only_with=fixup.only_with,
            adjust=fixup.adjust,
        )
        for fixup in FIXUPS
        if device_type in fixup.devices and dtype in fixup.dtypes
        if (wanted or fixup.always) and fixup.breaks(dtype)
        for op in _existing(fixup.ops.split())
    ]


def _existing(ops: Iterable[str]) -> Iterator[str]:
    for op in ops:
        try:
            overload(op)
        except AttributeError:
            continue
        yield op
