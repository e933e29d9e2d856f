"""Scaled backward: user code sees true gradients, on whatever thread it runs, whatever happens."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoamp import passes

EXACT = {"rtol": 0.0, "atol": 0.0}
HALF = {"rtol": 5e-3, "atol": 1e-5}
Mixed = Callable[..., Any]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def data() -> torch.Tensor:
    return torch.linspace(-1, 1, 24).reshape(4, 6)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(data()).pow(2).mean()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def by_hand(scale: float = 65536.0) -> list[torch.Tensor]:
    """What hand-written torch.amp leaves in ``.grad`` after ``unscale_``."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    with torch.autocast("cpu", torch.float16):
        out = model(data())
    scaler.scale(out.float().pow(2).mean()).backward()
    scaler.unscale_(optimizer)
    return gradients(model)


def in_float32(run: Callable[[], Any]) -> Any:
    """`run` as it would be without autoamp."""
    import autoamp

    assert not autoamp.status()["active"]
    return run()


def test_gradients_equal_those_of_hand_written_code_bit_for_bit(mixed: Mixed) -> None:
    expected = by_hand()
    mixed()
    model = net()
    loss_of(model).backward()
    torch.testing.assert_close(gradients(model), expected, **EXACT)


def test_the_seed_carries_the_scale_and_nothing_else_does(mixed: Mixed) -> None:
    """A float16 gradient of 2^-26 is lost without scaling (half's smallest number is 2^-24)."""

    def tiny(model: nn.Module) -> float:
        (model(torch.ones(1, 1)) * 2.0**-26).sum().backward()
        return float(model.weight.grad)

    mixed(LOSS_SCALE="1")
    assert tiny(nn.Linear(1, 1)) == 0.0
    mixed()
    assert tiny(nn.Linear(1, 1)) == 2.0**-26


def test_accumulated_gradients_add_up_in_true_units(mixed: Mixed) -> None:
    mixed()
    once, twice = net(), net()
    loss_of(once).backward()
    for _ in range(2):
        loss_of(twice).backward()
    torch.testing.assert_close(gradients(twice), [2 * g for g in gradients(once)], **EXACT)


def test_gradients_that_were_there_before_keep_their_value(mixed: Mixed) -> None:
    mixed(LOSS_SCALE="1024")
    model = net()
    loss_of(model).backward()
    fresh = gradients(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    loss_of(model).backward()
    torch.testing.assert_close(gradients(model), [g + 1 for g in fresh], rtol=1e-6, atol=1e-6)


def test_an_exception_in_backward_leaves_nothing_scaled(mixed: Mixed) -> None:
    mixed()
    model = net()
    loss_of(model).backward()
    before = gradients(model)

    def fail(grad: torch.Tensor) -> None:
        raise ZeroDivisionError

    model[0].weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss_of(model).backward()
    after = gradients(model)
    torch.testing.assert_close(after[0], before[0], **EXACT)
    assert max(float(g.abs().max()) for g in after) < 2.0
    assert passes.current() is None


def test_tensor_hooks_see_true_gradients_and_may_change_them(mixed: Mixed) -> None:
    def run() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model, seen = net(), []

        def clamp(grad: torch.Tensor) -> torch.Tensor:
            seen.append(grad.clone())
            return grad.clamp(-1e-3, 1e-3)

        def double_in_place(grad: torch.Tensor) -> None:
            grad.mul_(2)

        model[0].weight.register_hook(clamp)
        model[2].bias.register_hook(double_in_place)
        model[1].register_forward_hook(lambda m, i, out: out.register_hook(clamp) and None)
        loss_of(model).backward()
        return [g.float() for g in seen], gradients(model)

    expected = in_float32(run)
    mixed()
    torch.testing.assert_close(run(), expected, **HALF)


def test_a_hook_that_returns_nothing_changes_nothing(mixed: Mixed) -> None:
    mixed()
    plain, hooked = net(), net()
    hooked[0].weight.register_hook(lambda grad: None)
    loss_of(plain).backward()
    loss_of(hooked).backward()
    torch.testing.assert_close(gradients(hooked), gradients(plain), **EXACT)


def test_module_backward_hooks_see_true_gradients(mixed: Mixed) -> None:
    def run() -> list[torch.Tensor]:
        model, seen = net(), []
        model[2].register_full_backward_pre_hook(lambda m, out: seen.append(out[0].float()))
        model[2].register_full_backward_hook(
            lambda m, into, out: seen.extend((into[0].float(), out[0].float()))
        )
        loss_of(model).backward()
        return [*seen, *gradients(model)]

    expected = in_float32(run)
    mixed()
    torch.testing.assert_close(run(), expected, **HALF)


def test_post_accumulate_hooks_find_true_gradients_and_may_step(mixed: Mixed) -> None:
    def run() -> list[torch.Tensor]:
        model, seen = net(), {}
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(parameter: torch.Tensor) -> None:
            seen[parameter] = parameter.grad.clone()
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        loss_of(model).backward()
        return [t for p in model.parameters() for t in (seen[p], p.detach())]

    expected = in_float32(run)
    mixed()
    torch.testing.assert_close(run(), expected, **HALF)


class Clamp(torch.autograd.Function):
    """A non-linear backward: right only in true units."""

    seen: list[torch.dtype] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Clamp.seen.append(grad.dtype)
        return grad.clamp(-1e-3, 1e-3)


class Clamped(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[2](Clamp.apply(self[1](self[0](x))))


def clamped() -> Clamped:
    return Clamped(*net())


def test_custom_functions_work_in_true_units_and_float32(mixed: Mixed) -> None:
    def run() -> list[torch.Tensor]:
        model = clamped()
        loss_of(model).backward()
        return gradients(model)

    expected = in_float32(run)
    mixed()
    Clamp.seen.clear()
    torch.testing.assert_close(run(), expected, **HALF)
    assert Clamp.seen == [torch.float32]


def test_functions_that_declare_custom_fwd_stay_in_scaled_units(mixed: Mixed) -> None:
    seen = []

    class Declared(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append(float(grad.abs().max()))
            return grad

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Declared.apply(super().forward(x))

    mixed(LOSS_SCALE="4096")
    Model(2, 1)(torch.ones(1, 2)).sum().backward()
    assert seen == [4096.0]


def test_a_function_that_runs_its_own_backward_gets_true_gradients(mixed: Mixed) -> None:
    """Home-made checkpointing: the inner run is a scaled backward of its own."""

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            ctx.layer, ctx.x = layer, x.detach()
            with torch.no_grad():
                return layer(x).float()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            with torch.enable_grad():
                x = ctx.x.requires_grad_()
                out = ctx.layer(x)
            torch.autograd.backward(out, grad)
            seen.append(ctx.layer.weight.grad.clone())
            return None, x.grad

    def run() -> list[torch.Tensor]:
        model = net()
        out = model[2](Recompute.apply(model[0], data().requires_grad_()))
        out.pow(2).mean().backward()
        return [*seen, *gradients(model)]

    seen: list[torch.Tensor] = []
    expected = in_float32(run)
    seen = []
    mixed()
    torch.testing.assert_close(run(), expected, **HALF)


def test_a_parameter_shared_with_the_inner_backward_is_unscaled_once(mixed: Mixed) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.weight = weight
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            with torch.enable_grad():
                (ctx.weight * 3).sum().backward()
            return grad, None

    mixed(LOSS_SCALE="1024")
    layer = nn.Linear(2, 1, bias=False)
    out = Twice.apply(layer(torch.ones(1, 2)), layer.weight)
    out.sum().backward()
    assert layer.weight.grad.tolist() == [[4.0, 4.0]]


def test_retained_gradients_of_activations_are_true(mixed: Mixed) -> None:
    def run() -> torch.Tensor:
        model = net()
        kept = []
        model[1].register_forward_hook(lambda m, i, out: (kept.append(out), out.retain_grad())[1])
        loss_of(model).backward()
        loss_of(model).backward()
        return kept[0].grad.float()

    expected = in_float32(run)
    mixed()
    torch.testing.assert_close(run(), expected, **HALF)


def test_autograd_grad_returns_true_gradients(mixed: Mixed) -> None:
    def run() -> list[torch.Tensor]:
        model = net()
        return list(torch.autograd.grad(loss_of(model), list(model.parameters())))

    expected = by_hand()
    mixed()
    torch.testing.assert_close(run(), expected, **EXACT)


def test_autograd_grad_lowers_the_scale_until_its_result_is_finite(mixed: Mixed) -> None:
    session = mixed(LOSS_SCALE="65536")
    layer = nn.Linear(1, 1, bias=False)
    (grad,) = torch.autograd.grad(layer(torch.full((1, 1), 3.0)).sum() * 7, layer.weight)
    assert float(grad) == 21.0
    assert session.loss_scale.state()["scale"] == 65536.0


def test_gradient_penalty_trains_as_in_float32(mixed: Mixed) -> None:
    def run() -> list[torch.Tensor]:
        model, x = net(), data().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (grad.norm(dim=1) - 1).pow(2).mean().backward()
        return gradients(model)

    expected = in_float32(run)
    mixed()
    torch.testing.assert_close(run(), expected, rtol=2e-2, atol=1e-4)


def test_create_graph_leaves_true_gradients_that_differentiate_again(mixed: Mixed) -> None:
    def run() -> list[torch.Tensor]:
        weight = torch.tensor([2.0, 3.0], requires_grad=True)
        layer = nn.Linear(1, 1)
        (layer(torch.ones(1, 1)).sum() * 0 + weight.pow(3).sum()).backward(create_graph=True)
        first = weight.grad
        (second,) = torch.autograd.grad(first.sum(), weight)
        weight.grad = None  # breaks the cycle that create_graph makes
        return [first.detach(), second]

    mixed(LOSS_SCALE="1024")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cycle that create_graph makes, once a process
        first, second = run()
    assert first.tolist() == [12.0, 27.0]
    assert second.tolist() == [12.0, 18.0]


def test_inputs_argument_reaches_only_those(mixed: Mixed) -> None:
    expected = by_hand()
    mixed()
    model = net()
    loss_of(model).backward(inputs=[model[0].weight])
    torch.testing.assert_close(model[0].weight.grad, expected[0], **EXACT)
    assert model[2].weight.grad is None


def test_a_half_root_does_not_overflow_at_the_full_scale(mixed: Mixed) -> None:
    mixed(LOSS_SCALE="65536")
    layer = nn.Linear(1, 1, bias=False)
    halves = []
    layer.register_forward_hook(lambda m, i, out: halves.append(out))
    layer(torch.ones(1, 1))
    assert halves[0].dtype is torch.float16
    halves[0].sum().backward()
    assert float(layer.weight.grad) == 1.0


def test_gradient_edges_are_roots_too(mixed: Mixed) -> None:
    mixed(LOSS_SCALE="1024")
    layer = nn.Linear(1, 1, bias=False)
    out = layer(torch.ones(1, 1))
    edge = torch.autograd.graph.get_gradient_edge(out)
    torch.autograd.backward(edge, torch.ones(1, 1))
    assert float(layer.weight.grad) == 1.0


class Deep(nn.Module):
    """Reentrant checkpoints nested deeper than torch's limit of 60, where its worker threads start.

    On CUDA hooks and Functions always run on such threads; on the CPU this is the only way there.
    """

    DEPTH = 70

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(self.DEPTH)])

    def step(self, index: int, x: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
        x = x + Clamp.apply(torch.tanh(self.layers[index](x))) * 0.1
        if index + 1 < self.DEPTH:
            return checkpoint(self.step, index + 1, x, live, use_reentrant=True)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(0, x, x)


def test_engine_threads_see_true_gradients_through_reentrant_checkpoints(mixed: Mixed) -> None:
    def run() -> tuple[set[int], list[torch.Tensor]]:
        model, threads, seen = Deep(), set(), []

        def note(grad: torch.Tensor) -> None:
            threads.add(threading.get_ident())
            seen.append(grad.clone())

        for layer in model.layers:
            layer.weight.register_hook(note)
        model(torch.ones(2, 3, requires_grad=True)).pow(2).mean().backward()
        return threads, [*seen, *gradients(model)]

    threads, expected = in_float32(run)
    assert len(threads) > 1, "torch no longer uses worker threads here: find another way there"
    mixed(LOSS_SCALE="1024")
    _, found = run()
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-5)


def test_the_pass_is_found_on_a_thread_that_torch_hands_its_state_to(mixed: Mixed) -> None:
    """What an engine thread does: torch stashes the caller's objects there, then calls the hook."""
    mixed(LOSS_SCALE="1024")
    inside: list[Any] = []
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.register_hook(lambda grad: inside.append(float(grad)))
    (wrapped,) = layer.weight._backward_hooks.values()
    running = passes.Pass(torch.tensor(1024.0), torch.tensor(1 / 1024), None)

    def engine_thread() -> None:
        assert passes.current() is None
        torch._C._stash_obj_in_tls(passes.KEY, running)
        wrapped(torch.tensor([[2048.0]]))
        inside.append(passes.current() is running)

    thread = threading.Thread(target=engine_thread)
    thread.start()
    thread.join()
    assert inside == [2.0, True]
    assert passes.current() is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_training_equals_hand_written_code(mixed: Mixed, reentrant: bool) -> None:
    class Model(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(self[0], x, use_reentrant=reentrant)
            return self[2](checkpoint(self[1], hidden, use_reentrant=reentrant))

    def loss(model: nn.Module, region: Any) -> torch.Tensor:
        with region:
            out = model(data().requires_grad_())
        return out.float().pow(2).mean()

    reference = Model(*net())
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    scaler.scale(loss(reference, torch.autocast("cpu", torch.float16))).backward()
    scaler.unscale_(optimizer)
    mixed()
    model = Model(*net())
    loss(model, contextlib.nullcontext()).backward()
    torch.testing.assert_close(gradients(model), gradients(reference), **EXACT)


def test_backward_inside_a_region_runs_without_autocast_and_sees_new_weights(mixed: Mixed) -> None:
    """A training loop inside the forward of an outer module: the cast cache must not go stale."""

    def run() -> list[float]:
        losses = []

        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = net()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                optimizer = torch.optim.SGD(self.inner.parameters(), lr=0.5)
                for _ in range(5):
                    optimizer.zero_grad()
                    loss = self.inner(x).float().pow(2).mean()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
                return self.inner(x)

        Outer()(data())
        return losses

    expected = in_float32(run)
    for dtype in ("float16", "bfloat16"):
        mixed(dtype=dtype)
        found = run()
        assert found[-1] < 0.9 * found[0]
        assert found == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("precision", ["float32", "other"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_backward_in_an_island_leaves_no_stale_casts_to_the_region(
    mixed: Mixed, tmp_path: Path, dtype: str, precision: str
) -> None:
    """Weights that change after a backward, at once or later in the region, are seen in it."""

    class Trainer(nn.Module):
        def forward(self, inner: nn.Module, x: torch.Tensor) -> None:
            inner.zero_grad()
            inner(x).float().pow(2).mean().backward()
            move(inner)

    def move(inner: nn.Module) -> None:
        with torch.no_grad():
            for p in inner.parameters():
                p -= 0.25 * p.grad

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.trainer = net(), Trainer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outputs = [self.inner(x)]
            for _ in range(2):
                self.trainer(self.inner, x)
                outputs += [self.inner(x)]
                move(self.inner)
                outputs += [self.inner(x)]
            return torch.stack([out.float() for out in outputs])

    model = Outer()
    expected = in_float32(lambda: model(data()))
    policy = tmp_path / "island.yaml"
    word = {"float16": "bfloat16", "bfloat16": "float16"}[dtype]
    word = word if precision == "other" else precision
    policy.write_text(f"modules: [{{name: trainer, precision: {word}}}]\n")
    mixed(str(policy), dtype=dtype)
    model.inner = net()
    found = model(data())
    assert all((a - b).abs().max() > 0.02 for a, b in itertools.pairwise(found))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.01)
    assert torch.is_autocast_cache_enabled()


def test_double_precision_and_complex_leaves_keep_their_dtype(mixed: Mixed) -> None:
    mixed(LOSS_SCALE="1024")
    double = torch.ones(2, dtype=torch.float64, requires_grad=True)
    complex_ = torch.ones(2, dtype=torch.complex64, requires_grad=True)
    out = nn.Linear(2, 1)(torch.ones(1, 2)).sum()
    (out.double() * double.sum() + (complex_ * complex_.conj()).real.sum().double()).backward()
    assert double.grad.dtype is torch.float64
    assert complex_.grad.tolist() == [2 + 0j, 2 + 0j]
    assert float(double.grad[0]) == pytest.approx(out.item(), rel=1e-3)


def test_bfloat16_gradients_are_never_scaled(mixed: Mixed) -> None:
    session = mixed(dtype="bfloat16")
    seeds = []
    layer = nn.Linear(1, 1)
    out = layer(torch.ones(1, 1))
    out.grad_fn.register_hook(lambda into, seed: seeds.append(float(seed[0])))
    out.sum().backward()
    assert seeds == [1.0]
    assert not session.scales
    assert session.backwards.count == 0


class LinearFunction(torch.autograd.Function):
    """After torch's documentation; what it saves is half in a region, its gradient is not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x.mm(weight.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        seen_by_functions.append((grad.dtype, x.dtype))
        return grad.mm(weight), grad.t().mm(x)


seen_by_functions: list[tuple[torch.dtype, torch.dtype]] = []


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.weight = nn.Linear(6, 8), nn.Parameter(torch.randn(1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return LinearFunction.apply(self.first(x), self.weight)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_functions_may_mix_their_gradient_with_what_they_saved(mixed: Mixed, dtype: str) -> None:
    """In float32, whatever they saved: a gradient of 2^-24 does not vanish."""

    def run() -> list[torch.Tensor]:
        model = Linear()
        (model(data()) * 2.0**-24).mean().backward()
        return gradients(model)

    expected = in_float32(run)
    mixed(dtype=dtype)
    seen_by_functions.clear()
    torch.testing.assert_close(run(), expected, rtol=2e-2, atol=1e-11)
    assert seen_by_functions == [(torch.float32, getattr(torch, dtype))]
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_hooks_may_multiply_gradients_and_activations(mixed: Mixed, dtype: str) -> None:
    """Second-order optimizers: curvature from what a layer got and what came back."""

    def run() -> torch.Tensor:
        model, kept = net(), []
        model[2].register_forward_pre_hook(lambda module, args: kept.append(args[0].detach()))
        model[2].register_full_backward_hook(
            lambda module, into, out: kept.append(out[0].t() @ kept[0])
        )
        loss_of(model).backward()
        return kept[1]

    expected = in_float32(run)
    mixed(dtype=dtype)
    found = run()
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-3)


def test_hooks_under_bfloat16_get_float32_and_may_change_it(mixed: Mixed) -> None:
    mixed(dtype="bfloat16")
    seen = []

    def clamp(grad: torch.Tensor) -> torch.Tensor:
        seen.append(grad.numpy().copy())
        return grad.clamp(max=0.5)

    def double_in_place(grad: torch.Tensor) -> None:
        grad.mul_(2)

    kept: list[torch.Tensor] = []
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    nn.init.ones_(model[1].weight)
    model[0].register_forward_hook(lambda module, args, out: kept.append(out))
    out = model(torch.ones(1, 2))
    assert kept[0].dtype is torch.bfloat16
    kept[0].register_hook(clamp)
    kept[0].register_hook(double_in_place)
    out.sum().backward()
    assert [value.tolist() for value in seen] == [[[1.0, 1.0]]]
    assert model[0].weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_post_accumulate_hooks_under_bfloat16_multiply_gradients_and_activations(
    mixed: Mixed,
) -> None:
    """And may step there, with no scale to be told."""

    def run() -> list[torch.Tensor]:
        model, kept = net(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(weight: torch.Tensor) -> None:
            found.append(weight.grad @ kept[0].t())
            optimizer.step()
            optimizer.zero_grad()

        found: list[torch.Tensor] = []
        model[2].register_forward_pre_hook(lambda module, args: kept.append(args[0].detach()))
        model[2].weight.register_post_accumulate_grad_hook(step)
        loss_of(model).backward()
        return [*found, model[2].weight.detach()]

    expected = in_float32(run)
    session = mixed(dtype="bfloat16")
    found = run()
    assert found[0].dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-3)
    assert session.counts.steps == 1
    assert session.backwards.count == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_backward_without_hooks_costs_nothing_for_them(mixed: Mixed, dtype: str) -> None:
    mixed(dtype=dtype)
    model = net()
    loss = loss_of(model)
    rooms: set[str] = set()

    def note(frame: Any, event: str, arg: Any) -> None:
        rooms.add(frame.f_globals.get("__name__", ""))

    sys.setprofile(note)
    try:
        loss.backward()
    finally:
        sys.setprofile(None)
    assert "autoamp.backward" in rooms
    assert "autoamp.hooks" not in rooms
    assert ("autoamp.passes" in rooms) or dtype == "bfloat16"


def test_functions_of_torch_serve_as_hooks_of_the_script(mixed: Mixed) -> None:
    """`register_multi_grad_hook` calls a script's hook, `hardtanh` is one: both in true units."""
    mixed(LOSS_SCALE="1024")
    model = nn.Linear(2, 1)
    seen: list[Any] = []
    torch.autograd.graph.register_multi_grad_hook(
        [model.weight, model.bias], lambda grads: seen.extend(grad.tolist() for grad in grads)
    )
    model.weight.register_hook(nn.functional.hardtanh)
    (model(torch.ones(1, 2)) * 3).sum().backward()
    assert seen == [[[3.0, 3.0]], [3.0]]
    assert model.weight.grad.tolist() == [[1.0, 1.0]]
    assert model.bias.grad.tolist() == [3.0]


def test_a_post_accumulate_hook_leaves_only_what_is_its_own(mixed: Mixed) -> None:
    """One entry a parameter, and a sum of one flag: not of all that came before."""
    session = mixed(LOSS_SCALE="1024")
    layers = [nn.Linear(1, 1, bias=False) for _ in range(3)]
    model = nn.Sequential(*layers)
    for one in layers:
        nn.init.ones_(one.weight)
        one.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    layers[2].weight.register_hook(lambda grad: grad * float("inf"))
    model(torch.ones(1, 1)).sum().backward()
    assert [flag.item() for _, flag in session.backwards.since(0)] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", ["grad", "inputs"])
def test_retained_gradients_are_true_where_only_some_are_asked_for(mixed: Mixed, kind: str) -> None:
    mixed(LOSS_SCALE="1024")
    model = nn.Linear(2, 1, bias=False)
    hidden = model(torch.ones(1, 2)).exp()
    hidden.retain_grad()
    for _ in range(2):
        loss = (hidden * 3).sum()
        if kind == "grad":
            torch.autograd.grad(loss, model.weight, retain_graph=True)
        else:
            loss.backward(inputs=[model.weight], retain_graph=True)
    assert hidden.grad.item() == 6.0


def test_an_input_that_is_named_twice_is_scaled_once(mixed: Mixed) -> None:
    def run() -> list[float]:
        model = nn.Linear(2, 1, bias=False)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward(inputs=[model.weight, model.weight])
        return model.weight.grad.tolist()

    expected = in_float32(run)
    mixed(LOSS_SCALE="1024")
    assert run() == expected


def test_units_agree_where_a_pass_inside_runs_at_another_scale(mixed: Mixed) -> None:
    """A half root holds 32768 at most: what both passes add to one parameter is added up right."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.weight = weight
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            with torch.enable_grad():
                (ctx.weight * 3).half().sum().backward()
            seen.append(ctx.weight.grad.tolist())
            return grad, None

    seen: list[Any] = []
    mixed(LOSS_SCALE="65536")
    model = nn.Linear(2, 1, bias=False)
    for _ in range(2):
        out = Twice.apply(model(torch.full((1, 2), 16.0)), model.weight)
        (out * 2.0**-6).sum().backward()
    assert seen == [[[3.0, 3.0]], [[6.25, 6.25]]]
    assert model.weight.grad.tolist() == [[6.5, 6.5]]


def test_a_backward_called_by_user_code_runs_without_autocast(mixed: Mixed) -> None:
    """User code itself runs in float32; what torch computes in a pass inside does not."""
    mixed(LOSS_SCALE="1024")
    states: list[tuple[str, bool]] = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        states.append(("inside", torch.is_autocast_enabled("cpu")))
        return tensor

    def look(grad: torch.Tensor) -> None:
        states.append(("hook", torch.is_autocast_enabled("cpu")))
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            loss = torch.ones(1, requires_grad=True).exp().sum()
        loss.backward()
        states.append(("hook", torch.is_autocast_enabled("cpu")))

    model = nn.Linear(1, 1)
    model.weight.register_hook(look)
    model(torch.ones(1, 1)).sum().backward()
    assert states == [("hook", True), ("inside", False), ("hook", True)]
    assert not torch.is_autocast_enabled("cpu")


TINY = 2.0**-26


@pytest.mark.parametrize(
    "gradient",
    [
        lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
        lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(x),
        lambda f, x: torch.func.jacrev(f)(x[0])[0],
        lambda f, x: torch.func.vjp(f, x)[1](torch.ones(4, 1))[0],
        lambda f, x: torch.autograd.functional.jacobian(f, x[0], vectorize=True)[0],
        lambda f, x: torch.autograd.grad(f(x), x, torch.ones(3, 4, 1), is_grads_batched=True)[0],
    ],
)
def test_tiny_gradients_survive_transforms_and_many_seeds(
    mixed: Mixed, gradient: Callable[..., torch.Tensor]
) -> None:
    """2^-26 is less than half's smallest number; and 2^30 is more than half holds."""
    for scale in ("65536", str(2.0**30)):
        mixed(LOSS_SCALE=scale)
        model = nn.Linear(6, 1, bias=False)
        nn.init.ones_(model.weight)
        x = data().requires_grad_()
        found = gradient(lambda x, model=model: model(x) * TINY, x).reshape(-1, 6)
        assert found[0].tolist() == [TINY] * 6


def test_programs_that_are_made_functional_differentiate_as_others_do(mixed: Mixed) -> None:
    mixed(LOSS_SCALE="1024")
    nn.Linear(1, 1)(torch.ones(1, 1))

    def add_in_place(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y += x * 3
        return y.sum()

    gradient = torch.func.functionalize(torch.func.grad(add_in_place))
    assert gradient(torch.ones(2)).tolist() == [5.0, 5.0]


@pytest.mark.parametrize("rounds", [1, 3])
def test_functions_may_add_to_the_gradients_of_their_parameters_themselves(
    mixed: Mixed, rounds: int
) -> None:
    """Memory-saving layers: they return None for the weight, and have its gradient written."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.x, ctx.weight = x, weight
            return x.float().mm(weight.t())

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            fresh = grad.t().mm(ctx.x)
            ctx.weight.grad = fresh if ctx.weight.grad is None else ctx.weight.grad.add_(fresh)
            return grad.mm(ctx.weight), None

    mixed(LOSS_SCALE="1024")
    model = nn.Linear(2, 2)
    weight = nn.Parameter(torch.ones(1, 2))
    with torch.no_grad():
        model.weight.fill_(1.0), model.bias.zero_()
    for _ in range(rounds):
        Own.apply(model(torch.ones(1, 2)), weight).sum().backward()
    assert weight.grad.tolist() == [[2.0 * rounds] * 2]
    assert model.weight.grad.tolist() == [[1.0 * rounds] * 2] * 2
