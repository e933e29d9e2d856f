"""Losses and parameters that are not float32, and backwards that fail, with gradients scaled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoamp
from autoamp import backward, scaling

from .playing import MODES, by_hand, differences, mixed_by, plain

Mixed = Callable[..., Any]
EXACT = {"rtol": 0.0, "atol": 0.0}
HALF = {"float16": 2e-3, "bfloat16": 1e-2}
HIGH = (65536.0, 2.0**30)


def keeping(folder: Path, init: float = 65536.0) -> str:
    """A policy under which models return their half tensors as they are."""
    path = folder / "keep.yaml"
    path.write_text(f"outputs: keep\nloss_scale: {{init: {init}}}\n")
    return str(path)


def scaled_from_here(session: Any, scale: float) -> None:
    """FP16 is in use in this process, at this scale."""
    nn.Linear(1, 1)(torch.ones(1, 1))
    session.loss_scale.load({"scale": scale})
    assert session.scales


# Losses that are half.


def train_with_half_losses(
    region: Callable[[], Any] = contextlib.nullcontext, scaler: Any = None
) -> dict[str, Any]:
    """An unmodified script, unless the two arguments make it a hand-written one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(24, 10, 4)
    result: dict[str, Any] = {"loss": [], "dtypes": set()}
    for x in inputs:
        with region():
            out = model(x)
        loss = (out - x.sum(1, keepdim=True).sin().to(out.dtype)).pow(2).mean()
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        result["loss"].append(loss.item())
        result["dtypes"].add(loss.dtype)
    result["parameters"] = [p.detach() for p in model.parameters()]
    return result


@pytest.mark.parametrize("init", HIGH)
def test_half_losses_train_at_the_largest_scale_that_half_holds(
    mixed: Mixed, tmp_path: Path, init: float
) -> None:
    """By hand one has to know that: with 65536 the first step is lost, with 2^30 the first 15."""
    scaler = torch.amp.GradScaler("cpu", init_scale=32768.0)
    expected = train_with_half_losses(lambda: torch.autocast("cpu", torch.float16), scaler)
    session = mixed(keeping(tmp_path, init))
    found = train_with_half_losses()
    assert found["dtypes"] == {torch.float16}
    assert differences(found, expected) == []
    session.loss_scale.read_back()
    assert (session.loss_scale.taken, session.loss_scale.skipped) == (24, 0)


@pytest.mark.parametrize("dtype", HALF)
def test_half_losses_agree_with_float32(mixed: Mixed, tmp_path: Path, dtype: str) -> None:
    expected = train_with_half_losses()
    mixed(keeping(tmp_path), dtype)
    found = train_with_half_losses()
    tolerance = 4 * HALF[dtype]
    for key in ("loss", "parameters"):
        torch.testing.assert_close(found[key], expected[key], rtol=tolerance, atol=tolerance)


def test_a_half_loss_that_overflows_halves_the_scale_that_it_ran_with(
    mixed: Mixed, tmp_path: Path
) -> None:
    session = mixed(keeping(tmp_path))
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = []
    for _ in range(4):
        optimizer.zero_grad()
        (model(torch.full((1, 1), 3.0)) * 3).sum().backward()  # a gradient of 9 times the scale
        optimizer.step()
        scales.append(session.loss_scale.state()["scale"])
    assert scales == [16384.0, 8192.0, 4096.0, 4096.0]  # 9 * 4096 is the first that half holds
    assert model.weight.grad.item() == 9.0


ROOTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "half scalar": lambda w: w.half().sum().backward(),
    "bfloat16 scalar": lambda w: w.bfloat16().sum().backward(),
    "double scalar": lambda w: w.double().sum().backward(),
    "half vector": lambda w: w.half().backward(torch.ones(3).half()),
    "half and float32 together": lambda w: torch.autograd.backward(
        [w.half().sum(), (2 * w).sum(), w.double().sum()]
    ),
    "half through grad": lambda w: setattr(w, "grad", torch.autograd.grad(w.half().sum(), w)[0]),
    "complex": lambda w: (w * 2j).backward(torch.full((3,), 1 + 1j)),
}


@pytest.mark.parametrize("scale", HIGH)
@pytest.mark.parametrize("name", ROOTS)
def test_roots_of_any_dtype_give_the_gradients_of_float32(
    mixed: Mixed, name: str, scale: float
) -> None:
    def run() -> torch.Tensor:
        weight = torch.ones(3, requires_grad=True)
        ROOTS[name](weight)
        assert weight.grad is not None
        return weight.grad

    expected = run()
    scaled_from_here(mixed(), scale)
    torch.testing.assert_close(run(), expected, **EXACT)


HALF_ROOTS: dict[str, Callable[[torch.Tensor], object]] = {
    "a seed above 1": lambda half: half.backward(torch.full((1, 1), 4.0).half()),
    "a gradient edge": lambda half: torch.autograd.backward(
        torch.autograd.graph.get_gradient_edge(half), torch.full((1, 1), 4.0).half()
    ),
}


@pytest.mark.parametrize("name", HALF_ROOTS)
def test_seeds_of_half_roots_stay_finite(mixed: Mixed, name: str) -> None:
    mixed()
    model = nn.Linear(3, 1, bias=False)
    halves: list[torch.Tensor] = []
    model.register_forward_hook(lambda m, i, out: halves.append(out))
    model(torch.ones(1, 3))
    HALF_ROOTS[name](halves[0])
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[4.0] * 3]


# Parameters that are not float32.


def test_odd_parameters_train_as_by_hand(mixed: Mixed, tmp_path: Path) -> None:
    for mode, tolerance in (("float16", 2e-3), ("overflows", None), ("bfloat16", 1e-2)):
        found = mixed_by(mixed, tmp_path, "g_odd_parameters", MODES[mode])
        assert differences(found, by_hand("g_odd_parameters", MODES[mode])) == []
        if tolerance is not None:
            expected = plain("g_odd_parameters")
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def leaves() -> Iterator[tuple[str, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]]:
    """(name, leaf, its loss): all computed outside models, hence exactly, at any power of two."""

    def cube(p: torch.Tensor) -> torch.Tensor:
        return p.abs().pow(3).sum()

    def embed(p: torch.Tensor) -> torch.Tensor:
        return F.embedding(torch.tensor([1, 2, 2]), p, sparse=True).pow(3).sum()

    def bag(p: torch.Tensor) -> torch.Tensor:
        ids, offsets = torch.tensor([1, 2, 2]), torch.tensor([0, 1])
        return F.embedding_bag(ids, p, offsets, mode="sum", sparse=True).pow(3).sum()

    def product(p: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(p, torch.ones(4, 3)).pow(3).sum()

    torch.manual_seed(0)
    table = torch.rand(5, 4)
    yield "float64", torch.rand(3, dtype=torch.float64), cube
    yield "complex64", torch.rand(3, dtype=torch.complex64), cube
    yield "complex128", torch.rand(3, dtype=torch.complex128), cube
    yield "conjugated", torch.rand(3, dtype=torch.complex64).conj(), cube
    yield "bfloat16", torch.rand(3).bfloat16(), cube
    yield "no dimensions", torch.rand(()), cube
    yield "no elements", torch.rand(0, 3), cube
    yield "channels last", torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last), cube
    yield "transposed", torch.rand(2, 3).t(), cube
    yield "sparse itself", torch.eye(4).to_sparse(), product
    yield "sparse gradient", table, embed
    yield "sparse gradient of a bag", table, bag
    yield "sparse gradient and a dense one", table, lambda p: embed(p) + cube(p)


LEAVES = {name: (leaf, loss) for name, leaf, loss in leaves()}


@pytest.mark.parametrize("scale", HIGH)
@pytest.mark.parametrize("name", LEAVES)
def test_gradients_of_odd_leaves_add_up_exactly(mixed: Mixed, name: str, scale: float) -> None:
    leaf, loss = LEAVES[name]

    def run() -> list[torch.Tensor]:
        parameter, found = leaf.detach().clone().requires_grad_(), []
        for _ in range(3):
            loss(parameter).backward()
            assert parameter.grad is not None
            found.append(parameter.grad.to_dense().clone())
        return found

    expected = run()
    scaled_from_here(mixed(), scale)
    torch.testing.assert_close(run(), expected, **EXACT)


@pytest.mark.parametrize("scale", HIGH)
@pytest.mark.parametrize("name", ["float64", "complex64", "sparse gradient", "bfloat16"])
def test_infinities_in_odd_gradients_skip_the_step(mixed: Mixed, name: str, scale: float) -> None:
    leaf, loss = LEAVES[name]
    parameter = nn.Parameter(leaf.detach().clone())
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    session = mixed()
    scaled_from_here(session, scale)
    for factor in (float("nan"), 1.0, float("inf")):
        before = parameter.detach().clone()
        optimizer.zero_grad()
        (loss(parameter) * factor).backward()
        optimizer.step()
        assert torch.equal(parameter, before) is (factor != 1.0)
    session.loss_scale.read_back()
    assert (session.loss_scale.taken, session.loss_scale.skipped) == (1, 2)


def train_double() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x in torch.randn(12, 10, 4, dtype=torch.float64):
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True).sin()).pow(2).sum().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("scale", HIGH)
def test_double_models_train_in_double_bit_for_bit(mixed: Mixed, scale: float) -> None:
    """Beside a model that runs in float16; their summed loss would overflow half at once."""
    expected = train_double()
    session = mixed()
    scaled_from_here(session, scale)
    assert differences(train_double(), expected) == []
    session.loss_scale.read_back()
    assert (session.loss_scale.taken, session.loss_scale.skipped) == (12, 0)


def train_half(dtype: torch.dtype) -> list[torch.Tensor]:
    """A model in half, with a loss scale that the script keeps for itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(12, 10, 4).to(dtype):
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).float().pow(2).sum()
        (loss * 16).backward()
        for p in model.parameters():
            p.grad /= 16
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_models_train_as_they_are_and_it_is_said_once(
    mixed: Mixed, capfd: pytest.CaptureFixture[str], dtype: torch.dtype
) -> None:
    expected = train_half(dtype)
    session = mixed()
    for _ in range(2):
        assert differences(train_half(dtype), expected) == []
    assert not session.scales
    assert autoamp.status()["steps"] == {"taken": 24, "skipped": 0}
    assert capfd.readouterr().err.splitlines() == [
        f"autoamp: a model with {dtype} parameters is left as it is"
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_half_models_beside_a_scaled_one_keep_their_gradients(
    mixed: Mixed, dtype: torch.dtype
) -> None:
    """A gradient of 8 is far beyond half when it is scaled. Losses of both dtypes."""

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1).half()
        for _ in range(2):
            model(torch.ones(4, 3).half()).to(dtype).sum().backward()
        return gradients(model)

    expected = run()
    scaled_from_here(mixed(), 65536.0)
    torch.testing.assert_close(run(), expected, **EXACT)


def train_adapter() -> list[torch.Tensor]:
    """A frozen model in half; what is trained beside it is float32."""
    torch.manual_seed(0)
    frozen = nn.Linear(6, 6).half().requires_grad_(False)
    adapter = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 6))
    optimizer = torch.optim.SGD(adapter.parameters(), lr=0.1)
    for x in torch.randn(20, 8, 6):
        optimizer.zero_grad()
        out = frozen(x.half()).float() + adapter(x)
        (0.1 * (out - x.flip(1)).pow(2).mean()).backward()
        optimizer.step()
    return [p.detach() for p in adapter.parameters()]


def test_a_frozen_half_model_is_no_obstacle_to_the_float32_part(mixed: Mixed) -> None:
    expected = train_adapter()
    session = mixed()
    found = train_adapter()
    assert session.scales
    assert differences(found, expected) != []
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_trainable_half_parameters_inside_a_float32_model_get_true_gradients(mixed: Mixed) -> None:
    """GradScaler refuses those. They are small enough here for the full scale."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.zeros(4).half())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.by.float()

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), Shift())
        x = torch.linspace(-1, 1, 20).reshape(5, 4)
        for _ in range(2):
            (model(x) - x).pow(2).mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = run()
    session = mixed()
    found = run()
    assert session.scales
    assert [grad.dtype for grad in found] == [torch.float32, torch.float32, torch.float16]
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


def test_gradients_on_several_devices_are_scaled_and_checked_where_they_are() -> None:
    """The scale lives where the loss is; what the CPU can show of that."""
    here, there = torch.tensor([1.0, 2.0]), torch.ones(2, device="meta")
    doubles, scale = torch.tensor([3.0], dtype=torch.float64), torch.tensor(1024.0)
    scaling.multiply_([there, here, doubles], scale)
    assert (here.tolist(), doubles.tolist()) == ([1024.0, 2048.0], [3072.0])
    here[0] = float("inf")
    flags = scaling.unscale_([there, here, doubles], scaling.inverse_of(scale))
    assert sorted(flag.device.type for flag in flags) == ["cpu", "cpu", "meta"]
    assert sorted(flag.item() for flag in flags if flag.device.type == "cpu") == [0.0, 1.0]
    assert (here.tolist(), doubles.tolist()) == ([float("inf"), 2.0], [3.0])


def test_the_scale_is_brought_to_each_device_once() -> None:
    asked: list[str] = []

    class Scale:
        def to(self, device: torch.device, non_blocking: bool) -> torch.Tensor:
            asked.append(device.type)
            assert non_blocking
            return torch.tensor(2.0, device=device)

    grads = [torch.ones(2, device=device) for device in ("cpu", "meta", "cpu", "meta")]
    scale: Any = Scale()
    scaling.multiply_(grads, scale)
    scaling.unscale_(grads, scale)
    assert sorted(asked) == ["cpu", "cpu", "meta", "meta"]
    assert grads[2].tolist() == [4.0, 4.0]


# Backwards that fail.


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.linspace(-1, 1, 20).reshape(5, 4)).pow(2).mean()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


class Broken(Exception):  # noqa: N818
    """What the hooks here raise."""


@contextlib.contextmanager
def breaking(model: Any, error: type[BaseException] = Broken) -> Iterator[None]:
    """A backward in here ends with `error`.

    The last layer has its gradients by then, the first one has not.
    """

    def fail(grad: torch.Tensor) -> None:
        raise error

    handle = model[2].weight.register_hook(fail)
    with pytest.raises(error):
        yield
    handle.remove()


def fails_in_the_middle(model: nn.Module) -> None:
    with breaking(model):
        loss_of(model).backward()


def is_interrupted(model: nn.Module) -> None:
    with breaking(model, KeyboardInterrupt):
        loss_of(model).backward()


def goes_twice_through_one_graph(model: nn.Module) -> None:
    held = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    for p, grad in zip(model.parameters(), held, strict=True):
        p.grad = grad
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def has_a_seed_of_another_shape(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        loss_of(model).backward(torch.ones(3))


@pytest.mark.parametrize("scale", HIGH)
@pytest.mark.parametrize(
    ("fail", "untouched"),
    [
        (fails_in_the_middle, 2),
        (is_interrupted, 2),
        (goes_twice_through_one_graph, 6),
        (has_a_seed_of_another_shape, 6),
    ],
)
def test_what_a_failed_backward_did_not_reach_is_as_before_bit_for_bit(
    mixed: Mixed, fail: Callable[[nn.Module], None], untouched: int, scale: float
) -> None:
    """Numbers of all sizes, some of them below what float32 can normalise."""
    session = mixed()
    model = deep()
    for p in model.parameters():
        p.grad = torch.logspace(-42, 25, p.numel()).view_as(p)
    before = gradients(model)
    scaled_from_here(session, scale)
    fail(model)
    torch.testing.assert_close(gradients(model)[:untouched], before[:untouched], **EXACT)
    assert backward.current() is None
    assert session.loss_scale.state()["scale"] == scale


def test_what_a_failed_backward_did_reach_is_what_it_is_by_hand(mixed: Mixed) -> None:
    """In plain torch, too, some leaves have the new gradient by then and others have not."""
    by_hand = deep()
    for breaks in (False, True):
        with torch.autocast("cpu", torch.float16):
            out = by_hand(torch.linspace(-1, 1, 20).reshape(5, 4))
        loss = 65536 * out.float().pow(2).mean()
        for p in by_hand.parameters():
            p.grad = None if p.grad is None else p.grad * 65536
        with breaking(by_hand) if breaks else contextlib.nullcontext():
            loss.backward()
        for p in by_hand.parameters():
            p.grad /= 65536

    mixed()
    model = deep()
    loss_of(model).backward()
    fresh = gradients(model)
    fails_in_the_middle(model)
    found = gradients(model)
    torch.testing.assert_close(found, gradients(by_hand), **EXACT)
    torch.testing.assert_close(found[:2] + found[4:], fresh[:2] + [2 * g for g in fresh[4:]])


def test_the_backward_after_a_failed_one_is_like_any_other(mixed: Mixed) -> None:
    session = mixed()
    other, model = deep(), deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(other).backward()
    fails_in_the_middle(model)
    optimizer.zero_grad()
    loss_of(model).backward()
    torch.testing.assert_close(gradients(model), gradients(other), **EXACT)
    optimizer.step()
    session.loss_scale.read_back()
    assert (session.loss_scale.taken, session.loss_scale.skipped) == (1, 0)


def test_an_overflow_in_a_failed_backward_is_not_forgotten(mixed: Mixed) -> None:
    """The last layer has its infinities already; the script goes on to step."""
    session = mixed()
    model = deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaled_from_here(session, 2.0**30)
    before = [p.detach().clone() for p in model.parameters()]
    fails_in_the_middle(model)
    assert not gradients(model)[-1].isfinite().all()
    optimizer.step()
    torch.testing.assert_close([p.detach() for p in model.parameters()], before, **EXACT)
    assert session.loss_scale.state()["scale"] == 2.0**29


def test_gradients_before_are_kept_where_scaling_them_would_overflow_float32(mixed: Mixed) -> None:
    """1e31 times 2^30 is beyond float32."""
    scaled_from_here(mixed(), 2.0**30)
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.full((2,), 1e31)
    weight.sum().backward()
    torch.testing.assert_close(weight.grad, torch.full((2,), 1e31))


@pytest.mark.parametrize(
    "fail",
    [
        lambda model, loss: loss.backward(torch.ones(3)),
        lambda model, loss: torch.stack([loss, loss]).backward(),
        lambda model, loss: torch.autograd.grad(loss, torch.ones(2, requires_grad=True)),
        lambda model, loss: (loss.backward(), loss.backward()),
        lambda model, loss: (torch.autograd.grad(loss, [*model.parameters()]), loss.backward()),
    ],
)
def test_torch_s_own_complaints_are_the_same(mixed: Mixed, fail: Callable[..., Any]) -> None:
    def message() -> str:
        model = deep()
        with pytest.raises(RuntimeError) as caught:
            fail(model, loss_of(model))
        return str(caught.value)

    expected = message()
    mixed()
    assert message() == expected
