"""One small call of every op that a policy can name, for each of its overloads.

Arguments come from torch's own test database where that has the op, and from the table `BY_HAND`
where not. What has no call is in `WITHOUT`, with the reason.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_generator = torch.Generator().manual_seed(0)


def f(*shape: int) -> torch.Tensor:
    """Floats of both signs."""
    return torch.randn(shape, generator=_generator)


def p(*shape: int) -> torch.Tensor:
    """Floats between 0.1 and 0.9: in the domain of everything."""
    return torch.rand(shape, generator=_generator) * 0.8 + 0.1


def i(*shape: int, below: int = 2) -> torch.Tensor:
    """Indices."""
    return torch.randint(0, below, shape, generator=_generator)


def _rnn(chunks: int, hidden: Any = None) -> list[tuple[Any, ...]]:
    """Both overloads of a whole recurrent layer: of padded, and of packed sequences."""
    hidden = f(1, 2, 3) if hidden is None else hidden
    weights = [f(chunks * 3, 4), f(chunks * 3, 3), f(chunks * 3), f(chunks * 3)]
    padded = (f(5, 2, 4), hidden, weights, True, 1, 0.0, False, False, False)
    packed = (f(6, 4), torch.tensor([2, 2, 1, 1]), hidden, weights, True, 1, 0.0, False, False)
    return [padded, packed]


def _cell(chunks: int, hidden: Any = None) -> list[tuple[Any, ...]]:
    hidden = f(2, 3) if hidden is None else hidden
    return [(f(2, 4), hidden, f(chunks * 3, 4), f(chunks * 3, 3), f(chunks * 3), f(chunks * 3))]


def _convolution(*last: Any) -> list[Any]:
    return [f(1, 2, 4, 4), f(2, 2, 3, 3), f(2), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, *last]


_POLYNOMIALS = (
    *(f"{shifted}chebyshev_polynomial_{kind}" for shifted in ("", "shifted_") for kind in "tuvw"),
    *("hermite_polynomial_h", "hermite_polynomial_he"),
    *("laguerre_polynomial_l", "legendre_polynomial_p"),
)
_SPECIAL = (
    *("airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "spherical_bessel_j0"),
    *(f"{scaled}modified_bessel_k{n}" for scaled in ("", "scaled_") for n in "01"),
    *("modified_bessel_i0", "modified_bessel_i1"),
)
_image = f(1, 1, 4, 4)
_nc, _classes = f(3, 4), torch.tensor([0, 1, 3])
_attention = tuple(f(1, 2, 8, 8) for _ in range(3))

BY_HAND: Mapping[str, list[Any]] = {
    # An op, or one overload of it, and calls: positional arguments, last a dict of keywords if any.
    "_addmm_activation": [(f(2, 3), f(2, 4), f(4, 3))],
    "_convolution": [_convolution(False, True, True, True)],
    "_convolution.deprecated": [_convolution(False, True, True)],
    "_grid_sampler_2d_cpu_fallback": [(_image, f(1, 2, 2, 2), 0, 0, False)],
    "_lu_with_info": [(f(2, 2),)],
    "_native_multi_head_attention": [
        (*(f(1, 2, 4) for _ in range(3)), 4, 2, f(12, 4), f(12), f(4, 4), f(4))
    ],
    "_scaled_dot_product_flash_attention": [_attention],
    "_thnn_fused_gru_cell": [(f(2, 9), f(2, 9), f(2, 3))],
    "_thnn_fused_lstm_cell": [(f(2, 12), f(2, 12), f(2, 3))],
    **{
        f"{name}.{overload}" if overload else name: [(f(1, 1, *(4,) * n), [2] * n, *corners, *vec)]
        for name, n, corners in (
            *((f"upsample_nearest{n}d", n, ()) for n in (1, 2, 3)),
            *((f"_upsample_nearest_exact{n}d", n, ()) for n in (1, 2, 3)),
            ("upsample_linear1d", 1, (False,)),
            ("upsample_bilinear2d", 2, (False,)),
            ("upsample_trilinear3d", 3, (False,)),
            ("upsample_bicubic2d", 2, (False,)),
            ("_upsample_bilinear2d_aa", 2, (False,)),
            ("_upsample_bicubic2d_aa", 2, (False,)),
        )
        for overload, vec in (("default", ()), ("vec", (None,)))
    },
    **{f"adaptive_{kind}_pool1d": [(f(1, 2, 4), [2])] for kind in ("avg", "max")},
    **{f"adaptive_{kind}_pool2d": [(_image, [2, 2])] for kind in ("avg", "max")},
    **{f"adaptive_{kind}_pool3d": [(f(1, 1, 4, 4, 4), [2, 2, 2])] for kind in ("avg", "max")},
    "affine_grid_generator": [(f(1, 2, 3), [1, 1, 2, 2], False)],
    **{
        name: [(p(2, 3, 4), 0.5, True)]
        for name in ("alpha_dropout", "dropout", "feature_alpha_dropout", "feature_dropout")
    },
    "batch_norm": [(f(2, 3, 4), p(3), f(3), f(3), p(3), False, 0.1, 1e-5, False)],
    "bernoulli": [(p(3), 0.5), (p(3), p(3))],
    "bincount": [(i(4), p(4))],
    "binary_cross_entropy": [(p(3), p(3))],
    "binomial": [(torch.full((2,), 4.0), p(2))],
    "block_diag": [([f(2, 2), f(1, 2)],)],
    "broadcast_tensors": [([f(2, 1), f(1, 3)],)],
    "cartesian_prod": [([f(2), f(3)],)],
    "cdist": [(f(2, 3), f(4, 3))],
    "celu": [(f(3),)],
    "chain_matmul": [([f(2, 3), f(3, 4), f(4, 2)],)],
    **{name: [(f(3), -0.5, 0.5)] for name in ("clamp", "clip")},
    "channel_shuffle": [(f(1, 4, 2), 2)],
    "col2im": [(f(1, 4, 4), [3, 3], [2, 2], [1, 1], [0, 0], [1, 1])],
    "conv_depthwise3d": [
        (f(1, 2, 3, 3, 3), f(2, 1, 2, 2, 2), [2] * 3, f(2), [1] * 3, [0] * 3, [1] * 3)
    ],
    "conv_tbc": [(f(4, 2, 3), f(3, 3, 2), f(2), 1)],
    "convolution": [_convolution()],
    "conv2d.padding": [(f(1, 2, 4, 4), f(2, 2, 3, 3), f(2), [1, 1], "same")],
    "cosine_embedding_loss": [(f(2, 3), f(2, 3), torch.tensor([1, -1]))],
    "cross_entropy_loss": [(_nc, _classes)],
    "ctc_loss": [
        (f(5, 1, 4).log_softmax(-1), torch.tensor([[1, 2]]), [5], [2]),
        (f(5, 1, 4).log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2])),
    ],
    "cudnn_convolution": [
        (_image, f(1, 1, 3, 3), [0, 0], [1, 1], [1, 1], 1, False, True, True),
    ],
    "cudnn_convolution_transpose": [
        (_image, f(1, 1, 3, 3), [0, 0], [0, 0], [1, 1], [1, 1], 1, False, True, True),
    ],
    "diff": [(f(4),)],
    "einsum": [("ij,jk->ik", [f(2, 3), f(3, 4)])],
    "elu": [(f(3),)],
    "embedding": [(f(4, 3), i(2))],
    "embedding_bag": [(f(4, 3), i(4), torch.tensor([0, 2]))],
    "embedding_bag.padding_idx": [
        (f(4, 3), i(4), torch.tensor([0, 2]), False, 0, False, None, False, 0)
    ],
    "embedding_renorm": [(f(4, 3), i(2), 1.0, 2.0)],
    "fake_quantize_per_tensor_affine": [(f(3), 0.1, 0, 0, 255)],
    "fake_quantize_per_tensor_affine.tensor_qparams": [
        (f(3), p(1), torch.zeros(1, dtype=torch.int32), 0, 255)
    ],
    **{name: [(f(4),)] for name in ("fft_fftshift", "fft_ifftshift")},
    "fractional_max_pool2d": [(_image, [2, 2], [2, 2], p(1, 1, 2))],
    "fractional_max_pool3d": [(f(1, 1, 4, 4, 4), [2] * 3, [2] * 3, p(1, 1, 3))],
    "frobenius_norm": [(f(2, 3), [0, 1])],
    "geqrf": [(f(2, 2),)],
    **{
        name: [(_image, f(1, 2, 2, 2), 0, 0, False)] for name in ("grid_sampler", "grid_sampler_2d")
    },
    "grid_sampler_3d": [(f(1, 1, 2, 2, 2), f(1, 2, 2, 2, 3), 0, 0, False)],
    "gru": _rnn(3),
    "gru_cell": _cell(3),
    "hardsigmoid": [(f(3),)],
    "hinge_embedding_loss": [(f(2), torch.tensor([1, -1]))],
    "gradient.scalararray": [(f(4), {"spacing": 1.0, "dim": [0]})],
    "gradient.array": [(f(4), {"dim": [0]})],
    "gradient.tensorarrayint": [(f(4), {"spacing": [f(4)], "dim": 0})],
    "histogramdd": [(p(4, 2), [2, 2])],
    "histogramdd.int_bins": [(p(4, 2), 2)],
    "huber_loss": [(f(3), f(3))],
    **{f"index.{name}": [(f(3, 2), [i(2)])] for name in ("Tensor", "Tensor_hacked_twin")},
    "im2col": [(_image, [2, 2], [1, 1], [0, 0], [1, 1])],
    "index_put.hacked_twin": [(f(3), [torch.tensor([0, 2])], f(2))],
    "instance_norm": [(f(2, 3, 4), p(3), f(3), None, None, True, 0.1, 1e-5, False)],
    "kl_div": [(f(3), p(3))],
    "l1_loss": [(f(3), f(3))],
    "linalg_cond.p_str": [(f(2, 2), "fro")],
    "linalg_matrix_rank": [(f(2, 2), 0.1)],
    "linalg_matrix_rank.tol_tensor": [(f(2, 2), p(1))],
    "linalg_pinv": [(f(2, 3), 0.1)],
    "linalg_pinv.atol_rtol_tensor": [(f(2, 3), {"atol": p(1), "rtol": p(1)})],
    "linalg_tensorinv": [(f(2, 2, 4), 2)],
    "linalg_tensorsolve": [(f(2, 2, 4), f(2, 2))],
    "lstm": _rnn(4, [f(1, 2, 3), f(1, 2, 3)]),
    "lstm_cell": _cell(4, [f(2, 3), f(2, 3)]),
    "margin_ranking_loss": [(f(3), f(3), torch.ones(3))],
    **{
        f"max_pool{n}d{indices}": [(f(1, 1, *(4,) * n), [2] * n)]
        for n in (1, 2, 3)
        for indices in ("", "_with_indices")
    },
    "max_unpool2d": [(f(1, 1, 1, 2), torch.tensor([[[[0, 3]]]]), [2, 4])],
    "max_unpool3d": [(f(1, 1, 1, 1, 2), torch.tensor([[[[[0, 3]]]]]), [1, 2, 4], [1] * 3, [0] * 3)],
    "meshgrid.default": [([f(2), f(3)],)],
    "mish": [(f(3),)],
    "mkldnn_rnn_layer": [
        (
            *(f(2, 1, 4), f(12, 4), f(12, 3), f(12), f(12), f(1, 1, 3), f(1, 1, 3)),
            *(False, [], 2, 3, 1, True, False, False, False),
        )
    ],
    "mse_loss": [(f(3), f(3))],
    "multi_margin_loss": [(_nc, _classes)],
    "multilabel_margin_loss": [(f(2, 3), i(2, 3))],
    "multilabel_margin_loss_forward": [(f(2, 3), i(2, 3), 1)],
    "native_channel_shuffle": [(f(1, 4, 2), 2)],
    "native_dropout": [(f(3), 0.5, True)],
    **{name: [(f(2, 2),)] for name in ("nonzero", "nonzero_numpy")},
    "nll_loss": [(_nc, _classes)],
    "nll_loss2d": [(f(1, 3, 2, 2), i(1, 2, 2))],
    "nll_loss_nd": [(_nc, _classes)],
    "norm_except_dim": [(f(2, 3),)],
    "nuclear_norm": [(f(2, 3),), (f(2, 3), [0, 1])],
    "pad": [(f(3), [1, 1])],
    "pad_sequence": [([f(2), f(3)],)],
    "pairwise_distance": [(f(2, 3), f(2, 3))],
    "pdist": [(f(3, 2),)],
    "pixel_shuffle": [(f(1, 4, 2, 2), 2)],
    "pixel_unshuffle": [(_image, 2)],
    "poisson": [(p(3),)],
    "poisson_nll_loss": [(f(3), p(3), True, False, 1e-8, 1)],
    **{name: [(1, p(3))] for name in ("polygamma", "special_polygamma")},
    "prelu": [(f(2, 3), f(3))],
    **{
        f"{kind}_pad{n}d": [(f(1, 1, *(3,) * n), [1, 1] * n)]
        for kind in ("reflection", "replication")
        for n in (1, 2, 3)
    },
    "rnn_relu": _rnn(1),
    "rnn_relu_cell": _cell(1),
    "rnn_tanh": _rnn(1),
    "rnn_tanh_cell": _cell(1),
    "rrelu": [(f(3), 0.1, 0.3, False)],
    "scaled_dot_product_attention": [_attention],
    "segment_reduce": [(f(4), "sum", {"lengths": torch.tensor([2, 2])})],
    "selu": [(f(3),)],
    "silu": [(f(3),)],
    "slogdet": [(f(2, 2),)],
    "smooth_l1_loss": [(f(3), f(3))],
    "soft_margin_loss": [(f(3), torch.tensor([1.0, -1.0, 1.0]))],
    "softplus": [(f(3),)],
    **{name: [(p(3), p(3))] for name in ("special_gammainc", "special_gammaincc")},
    **{f"special_{name}": [(p(3), p(3)), (0.5, p(3)), (p(3), 2)] for name in _POLYNOMIALS},
    **{f"special_{name}": [(p(3),)] for name in _SPECIAL},
    "tensordot": [(f(2, 3), f(3, 2), [1], [0])],
    "threshold": [(f(3), 0.1, 0.0)],
    "triplet_margin_loss": [(f(2, 3), f(2, 3), f(2, 3))],
    "kron": [(f(2, 2), f(1, 2))],
    "scatter": [(f(3), 0, i(2), f(2)), (f(3), 0, i(2), 1.0)],
    "slice_scatter": [(f(3, 2), f(1, 2), 0, 0, 1)],
    **{f"atleast_{n}d": [(f(2),)] for n in (1, 2, 3)},
    **{f"atleast_{n}d.Sequence": [([f(2), f(3)],)] for n in (1, 2, 3)},
    "where": [(torch.tensor([True, False, True]), f(3), f(3))],
    **{name: [(f(3, 2), 0)] for name in ("unique_dim", "unique_dim_consecutive")},
    "unsafe_split_with_sizes": [(f(3), [1, 2])],
    "vander": [(f(3),)],
}

IN_PLACE: Mapping[str, tuple[Any, ...]] = {
    "bernoulli_.float": (p(3), 0.5),
    "floor_divide_.Tensor": (f(3), p(3)),
    "ldexp_": (f(3), p(3)),
    "polygamma_": (p(3), 1),
    "pow_.Scalar": (p(3), 1.5),
    "pow_.Tensor": (p(3), p(3)),
}
"""In-place forms whose overload or arguments are other ones than those of the op."""

INTEGERS, SPARSE, DTYPE = "only integers", "only sparse matrices", "told the dtype of its result"
WITHOUT: Mapping[str, str] = {
    "_mps_convolution": "only on Apple's GPUs",
    "istft": "takes complex numbers",
    **{f"bitwise_{name}": INTEGERS for name in ("and", "not", "or", "xor")},
    **{f"bitwise_{side}_shift": INTEGERS for side in ("left", "right")},
    **dict.fromkeys(("gcd", "lcm"), INTEGERS),
    **dict.fromkeys(("hspmm", "smm", "sspaddmm"), SPARSE),
}
"""Ops that have no call here, and why."""

OVERLOADS_WITHOUT: Mapping[str, str] = {
    "_scaled_dot_product_flash_attention.quantized": "takes quantized tensors",
    "einsum.sublist": "has no fixed number of arguments",
    "repeat_interleave.Tensor": INTEGERS,
    "where": "gives indices",
    **{f"{op}.dtype": DTYPE for op in ("addmm", "baddbmm", "bmm", "mm")},
    **{f"norm.{name}": DTYPE for name in ("ScalarOpt_dtype", "ScalarOpt_dim_dtype")},
}
"""The same for overloads, where the op has another that is called."""

WRITING_WITHOUT: Mapping[str, str] = {
    **{f"{op}.dtype_out": DTYPE for op in ("addmm", "baddbmm", "bmm", "mm", "norm")},
    "norm.ScalarOpt_dtype_out": DTYPE,
    **{f"float_power_.{name}": "its destination is double" for name in ("Scalar", "Tensor")},
    "repeat_interleave.Tensor_out": INTEGERS,
    **{
        f"{op}.out": "no result on the CPU tells the shape of an `out`"
        for op in (
            *("_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "conv_depthwise3d"),
            *("cudnn_convolution", "cudnn_convolution_transpose", "mkldnn_rnn_layer"),
        )
    },
}
"""The same for forms that write in place or to an `out`."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One call of one overload; floating tensors are float32 and on the CPU.

    `writes` names the arguments, by position or keyword, that the call writes into.
    """

    overload: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    writes: tuple[int | str, ...] = ()

    @property
    def function(self) -> Any:
        packet, _, overload = self.overload.partition(".")
        return getattr(getattr(torch.ops.aten, packet), overload or "default")

    def call(self) -> Any:
        """Make the call."""
        return self.function(*self.args, **self.kwargs)

    @property
    def written(self) -> list[torch.Tensor]:
        """The tensors that the call writes into."""
        keys = self.writes
        return [self.args[key] if isinstance(key, int) else self.kwargs[key] for key in keys]

    @property
    def operands(self) -> list[torch.Tensor]:
        """The floating tensors that are read, in order."""
        read = {k: v for k, v in self.kwargs.items() if k not in self.writes}
        return floats((self.args, read))

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Sample:
        """The same call with other tensors."""
        return replace(self, args=_each(self.args, change), kwargs=_each(self.kwargs, change))


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a nested value."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _each(value, note)
    return found


def floats(value: Any) -> list[torch.Tensor]:
    """The real and complex floating tensors in a nested value."""
    return [t for t in tensors(value) if t.is_floating_point() or t.is_complex()]


def _each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)([_each(item, change) for item in value])
    if isinstance(value, dict):
        return {key: _each(item, change) for key, item in value.items()}
    return value


@functools.cache
def samples(op: str) -> tuple[Sample, ...]:
    """A call of every overload of `op` that makes new tensors, then those in place and to `out`."""
    made = [Sample(_named(op, key), *arguments) for key, arguments in _functional(op).items()]
    written = [variant for sample in made for variant in _writing(op, sample)]
    by_hand = [
        Sample(name, args, {}, writes=(0,))
        for name, args in IN_PLACE.items()
        if name.partition(".")[0] == f"{op}_"
    ]
    return (*made, *written, *by_hand)


def _named(packet: str, overload: str) -> str:
    return packet if overload == "default" else f"{packet}.{overload}"


def _functional(op: str) -> dict[str, Arguments]:
    packet = getattr(torch.ops.aten, op)
    wanted = [key for key in packet.overloads() if _makes_tensors(getattr(packet, key)._schema)]
    found: dict[str, Arguments] = {}
    for key, arguments in (*_by_hand(op), *_of_torch(op)):
        if key in wanted and floats(arguments):
            found.setdefault(key, arguments)
    for key in wanted:
        if key not in found and (arguments := _with_numbers(getattr(packet, key), found)):
            found[key] = arguments
    return {key: found[key] for key in wanted if key in found}


def _makes_tensors(schema: Any) -> bool:
    gives = any("Tensor" in str(r.type) for r in schema.returns)
    return gives and not any(a.alias_info and a.alias_info.is_write for a in schema.arguments)


def _by_hand(op: str) -> Iterator[tuple[str, Arguments]]:
    for name, rows in BY_HAND.items():
        packet, _, overload = name.partition(".")
        if packet == op:
            for row in rows:
                kwargs = row[-1] if isinstance(row[-1], dict) else {}
                args = tuple(row[: len(row) - bool(kwargs)])
                yield overload or _overload(op, args, kwargs), (args, kwargs)


def _of_torch(op: str) -> list[tuple[str, Arguments]]:
    """What torch tests `op` with, the handiest first."""
    found = []
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        for info in _database().get(op, ()):
            if torch.float32 not in info.dtypes:
                continue
            # Not `info.sample_inputs`, which looks at the stack of callers for each.
            made = info.sample_inputs_func(info, "cpu", torch.float32, requires_grad=False)
            for sample in itertools.islice(made, 40):
                args, kwargs = (sample.input, *sample.args), sample.kwargs
                overload = _overload(op, args, kwargs)
                if overload and (rank := _awkwardness(args, kwargs)) is not None:
                    found.append((rank, len(found), overload, (args, kwargs)))
    return [(k, (_each(a, _copied), _each(kw, _copied))) for *_, k, (a, kw) in sorted(found)]


@functools.cache
def _database() -> Mapping[str, list[Any]]:
    from torch.testing._internal.common_methods_invocations import op_db

    infos: dict[str, list[Any]] = {}
    for info in op_db:
        names = {info.aten_name, *(alias.name.replace(".", "_") for alias in info.aliases)}
        for name in names:
            infos.setdefault(name, []).append(info)
    return infos


def _overload(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The overload that these arguments mean, empty if they fit none."""
    try:
        return torch._C._jit_resolve_packet(f"aten::{op}", *args, **kwargs) or "default"
    except RuntimeError:
        return ""


def _awkwardness(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, bool, bool, int] | None:
    """How little a sample says about precision; None where it says nothing."""
    if any(t.layout is not torch.strided or t.numel() == 0 for t in tensors((args, kwargs))):
        return None
    if any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
        return None
    operands = floats((args, kwargs))
    size = sum(t.numel() for t in operands)
    # Tensors without dimensions do not take part in type promotion; one operand cannot be mixed.
    return any(t.dim() == 0 for t in operands), len(operands) < 2, size < 4, size


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().clone()


def _with_numbers(overload: Any, found: Mapping[str, Arguments]) -> Arguments | None:
    """The arguments of another overload, with numbers for tensors where this one takes those."""
    kinds = [str(argument.type) for argument in overload._schema.arguments]
    for args, kwargs in found.values():
        changed = tuple(
            2.0 if kind == "number" and isinstance(value, torch.Tensor) else value
            for kind, value in zip(kinds, args, strict=False)
        )
        if any(new is not old for new, old in zip(changed, args, strict=False)):
            with contextlib.suppress(RuntimeError):
                overload(*changed, **kwargs)
                return changed, kwargs
    return None


def _writing(op: str, sample: Sample) -> Iterator[Sample]:
    """The same call in place, and to an `out` of the right shape, where aten has those."""
    results = _results(sample)
    key = sample.overload.partition(".")[2] or "default"
    in_place = getattr(getattr(torch.ops.aten, f"{op}_", None), key, None)
    if in_place is not None and (grown := _grown(sample.args[0], results)) is not None:
        args = (grown, *sample.args[1:])
        yield Sample(_named(f"{op}_", key), args, sample.kwargs, writes=(0,))
    made = results if isinstance(results, (tuple, list)) else (results,)
    if not made or not all(isinstance(result, torch.Tensor) for result in made):
        return
    reads = [(a.name, str(a.type)) for a in sample.function._schema.arguments]
    packet = getattr(torch.ops.aten, op)
    for other in packet.overloads():
        arguments = getattr(packet, other)._schema.arguments
        outs = tuple(a.name for a in arguments if a.alias_info and a.alias_info.is_write)
        others = [(a.name, str(a.type)) for a in arguments if a.name not in outs]
        if outs and others == reads and len(outs) == len(made):
            kwargs = dict(zip(outs, map(torch.zeros_like, made), strict=True))
            yield Sample(_named(op, other), sample.args, {**sample.kwargs, **kwargs}, outs)


def _results(sample: Sample) -> Any:
    with torch.no_grad():
        try:
            return sample.changed(torch.clone).call()
        except (RuntimeError, NotImplementedError):
            # The CPU has no such op. Its overloads with `out` need a place in OVERLOADS_WITHOUT.
            return ()


def _grown(first: Any, result: Any) -> torch.Tensor | None:
    """The first operand in the shape of the result, which can then be written into it."""
    if not isinstance(first, torch.Tensor) or not isinstance(result, torch.Tensor):
        return None
    if not first.is_floating_point() or result.dtype not in (first.dtype, torch.bool):
        return None
    try:
        return first.expand(result.shape).clone()
    except RuntimeError:
        return None
