"""Custom autograd Functions inside regions run as in a script without autoamp: in float32."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import autoamp

HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}
EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
dtypes = pytest.mark.parametrize("dtype", HALF)


class Product(Function):
    """A linear layer, as in torch's notes on extending autograd."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.mm(weight.t())

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad.mm(weight), grad.t().mm(x)


class Linear(Product):
    """The same; it notes the dtypes of what it is given."""

    seen: ClassVar[list[torch.dtype]] = []

    @staticmethod
    def forward(ctx, x, weight):
        Linear.seen = [x.dtype, weight.dtype]
        return Product.forward(ctx, x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors  # once: a checkpoint unpacks them once
        Linear.seen += [grad.dtype, x.dtype, weight.dtype]
        return grad.mm(weight), grad.t().mm(x)


class Inside(nn.Module):
    """A layer whose half result is given to `function`, with a weight of float32."""

    def __init__(self, function: Callable[..., Any], width: int = 8) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(width, width)
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layer(x), self.weight)


def inside(function: Callable[..., Any], width: int = 8) -> Inside:
    torch.manual_seed(0)
    return Inside(function, width)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def far(ours: Any, reference: Any) -> float:
    """The largest distance, relative to the size of what the reference holds."""
    return max(
        ((a - b).norm() / b.norm().clamp(min=1e-12)).item()
        for a, b in zip(ours, reference, strict=True)
    )


# --- what a forward is given ---------------------------------------------------------------------


@dtypes
def test_ops_of_a_function_run_in_float32_forwards_and_backwards(mixed, dtype):
    mixed("default", dtype)
    model, x = inside(Linear.apply), torch.randn(4, 8)
    half: list[torch.Tensor] = []
    model.function = lambda h, w: (half.append(h), Linear.apply(h, w))[1]
    y = model(x)
    assert half[0].dtype is HALF[dtype]
    product = half[0].detach().double() @ model.weight.detach().double().t()
    assert far([y.double()], [product]) < 1e-6  # of float32; a product in half is a hundredth off
    y.sum().backward()
    assert set(Linear.seen) == {torch.float32}
    assert all(g.dtype is torch.float32 and g.isfinite().all() for g in gradients(model))


@dtypes
def test_float32_tensors_are_passed_as_they_are(mixed, dtype):
    mixed("default", dtype)
    given: list[Any] = []

    class Keep(Function):
        @staticmethod
        def forward(ctx, x, weight, words):
            given.extend((weight, words))
            return x + weight.sum()

        @staticmethod
        def backward(ctx, grad):
            return grad, None, None

    words = ["a", {"b": 1}]
    model = inside(lambda h, w: Keep.apply(h, w, words))
    model(torch.randn(4, 8))
    assert given[0] is model.weight
    assert given[1] is words


@dtypes
def test_outside_of_regions_functions_get_what_they_are_given(mixed, dtype):
    mixed("default", dtype)
    inside(Linear.apply)(torch.randn(4, 8))
    x = torch.randn(2, 8).to(HALF[dtype]).requires_grad_()
    y = Linear.apply(x, torch.ones(3, 8).to(HALF[dtype]))
    assert Linear.seen == [HALF[dtype]] * 2
    assert y.dtype is HALF[dtype]


@dtypes
def test_functions_that_declare_how_they_meet_autocast_stay_as_they_are(mixed, dtype):
    mixed("default", dtype)

    class Declares(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx, x, weight):
            seen.append((x.dtype, x.mm(weight).dtype))
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            return grad * 2, None

    seen: list[Any] = []
    inside(Declares.apply)(torch.randn(4, 8)).sum().backward()
    assert seen == [(HALF[dtype], HALF[dtype])]


@dtypes
def test_a_context_of_the_script_inside_the_region_wins(mixed, dtype):
    mixed("default", dtype)

    def in_own_context(h, weight):
        with torch.autocast("cpu", HALF[dtype]):
            return Linear.apply(h, weight)

    def without_autocast(h, weight):
        with torch.autocast("cpu", enabled=False):
            return Linear.apply(h, weight.to(h.dtype))

    for function in (in_own_context, without_autocast):
        inside(function)(torch.randn(4, 8))
        assert Linear.seen[0] is HALF[dtype]


def test_the_torch_policy_does_what_hand_written_code_does(mixed):
    mixed("torch", "bfloat16")
    inside(Linear.apply)(torch.randn(4, 8))
    assert Linear.seen[0] is torch.bfloat16


# --- everything that a Function can do -----------------------------------------------------------


class Everything(Function):
    """Non-tensor and non-differentiable outputs, gradients only where they are needed."""

    @staticmethod
    def forward(ctx, x, weight, scale):
        top = x.argmax(dim=1)
        ctx.mark_non_differentiable(top)
        ctx.scale = scale
        ctx.save_for_backward(x, weight)
        return x * weight.sum() * scale, top, "word", None

    @staticmethod
    def backward(ctx, grad, *others):
        _, weight = ctx.saved_tensors
        Everything.needs = ctx.needs_input_grad
        return grad * weight.sum() * ctx.scale, None, None


@dtypes
def test_outputs_of_every_kind_come_back(mixed, dtype):
    mixed("default", dtype)
    model = inside(lambda h, w: Everything.apply(h, w.detach(), 3.0))
    y, top, word, nothing = model(torch.randn(4, 8))
    assert (y.dtype, top.dtype, word, nothing) == (torch.float32, torch.int64, "word", None)
    assert y.requires_grad
    assert not top.requires_grad
    y.sum().backward()
    assert Everything.needs == (True, False, False)
    assert model.weight.grad is None


class Square(Function):
    """Can be differentiated twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@dtypes
def test_double_backward_goes_through(mixed, dtype):
    def penalty(function: Callable[..., Any]) -> list[torch.Tensor]:
        model = inside(lambda h, w: function(h @ w))
        torch.manual_seed(1)
        x = torch.randn(4, 8, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        grad.square().mean().backward()
        return gradients(model)

    reference = penalty(lambda h: h * h)
    mixed("default", dtype)
    assert far(penalty(Square.apply), reference) < 20 * EPS[dtype]


@dtypes
def test_once_differentiable_backwards_run(mixed, dtype):
    mixed("default", dtype)

    class Once(Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            assert not torch.is_grad_enabled()
            return grad * 2

    model = inside(lambda h, w: Once.apply(h))
    model(torch.randn(4, 8)).sum().backward()
    assert torch.equal(model.layer.bias.grad, torch.full((8,), 8.0))


@dtypes
def test_what_is_edited_in_place_is_edited_for_the_script(mixed, dtype):
    class Double(Function):
        @staticmethod
        def forward(ctx, x):
            x.mul_(2)
            ctx.mark_dirty(x)
            return x

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def step(h, w):
        h = h * 1.0
        returned = Double.apply(h)
        return returned + h  # one tensor, without autoamp

    def run() -> list[torch.Tensor]:
        model = inside(step)
        y = model(torch.ones(4, 8))
        y.sum().backward()
        return [y.detach(), *gradients(model)]

    reference = run()
    mixed("default", dtype)
    assert far(run(), reference) < 4 * EPS[dtype]


class Cube(Function):
    """The form with `setup_context`, with forward mode and a rule for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, times=1.0):
        return x**3 * times

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.times = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad * ctx.times, None

    @staticmethod
    def jvp(ctx, tangent, _):
        (x,) = ctx.saved_tensors
        return 3 * x * x * tangent * ctx.times


@dtypes
def test_the_form_with_setup_context_takes_keywords_and_defaults(mixed, dtype):
    def run(function: Callable[..., Any]) -> list[torch.Tensor]:
        model = inside(lambda h, w: function(h, times=2.0) + function(h))
        model(torch.full((4, 8), 0.5)).sum().backward()
        return gradients(model)

    reference = run(lambda x, times=1.0: x**3 * times)
    mixed("default", dtype)
    assert far(run(Cube.apply), reference) < 4 * EPS[dtype]


@dtypes
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_transforms_and_forward_mode_reach_through_functions(mixed, dtype):
    def run() -> list[torch.Tensor]:
        vmapped = inside(lambda h, w: torch.vmap(Cube.apply)(h))
        forward = inside(
            lambda h, w: torch.func.jvp(Cube.apply, (h.detach(),), (torch.ones_like(h),))[1]
        )
        inner = inside(
            lambda h, w: torch.func.vmap(torch.func.grad(lambda r: Cube.apply(r).sum()))(h)
        )
        x = torch.linspace(-1, 1, 32).view(4, 8)
        return [model(x).detach() for model in (vmapped, forward, inner)]

    reference = run()
    mixed("default", dtype)
    assert far(run(), reference) < 8 * EPS[dtype]


# --- Functions that know only half ---------------------------------------------------------------


class OnlyHalf(Function):
    """As kernels of attention are: they refuse float32, and their gradients are half too."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        OnlyHalf.calls += 1
        if x.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("OnlyHalf only supports fp16 and bf16 data type")
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        assert grad.dtype in (torch.float16, torch.bfloat16)
        return grad * 2


@dtypes
def test_a_function_that_refuses_float32_gets_what_the_script_gives_it(mixed, dtype):
    session = mixed("default", dtype)
    model = inside(lambda h, w: OnlyHalf.apply(h.to(HALF[dtype])))
    OnlyHalf.calls = 0
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
    assert OnlyHalf.calls == 4  # refused once
    assert torch.equal(model.layer.bias.grad, torch.full((8,), 24.0))
    assert not session.demotions


@dtypes
def test_where_neither_works_the_error_in_float32_is_raised(mixed, dtype):
    mixed("default", dtype)
    cause = KeyError("cause")

    class Broken(Function):
        @staticmethod
        def forward(ctx, x):
            raise RuntimeError(f"no dtype is right, not {x.dtype}") from cause

    with pytest.raises(RuntimeError, match=r"not torch\.float32") as caught:
        inside(lambda h, w: Broken.apply(h))(torch.randn(4, 8))
    assert caught.value.__cause__ is cause


@dtypes
def test_half_that_a_script_gives_outside_of_regions_gets_half_gradients(mixed, dtype):
    mixed("default", dtype, LOSS_SCALE="128")
    inside(lambda h, w: h)(torch.randn(4, 8))
    x = torch.randn(4, 8, requires_grad=True)
    OnlyHalf.apply(x.to(HALF[dtype])).float().sum().backward()
    assert torch.equal(x.grad, torch.full((4, 8), 2.0))


@dtypes
def test_an_error_that_is_no_question_of_precision_is_raised_at_once(mixed, dtype):
    mixed("default", dtype)
    calls = []

    class Broken(Function):
        @staticmethod
        def forward(ctx, x):
            calls.append(x)
            raise ValueError("no such class")

    with pytest.raises(ValueError, match="no such class"):
        inside(lambda h, w: Broken.apply(h))(torch.randn(4, 8))
    assert {x.dtype for x in calls} == {torch.float32}


# --- modules inside Functions --------------------------------------------------------------------


class Checkpoint(Function):
    """As in diffusion models: the part between is computed anew in the backward."""

    @staticmethod
    def forward(ctx, run_function, length, *args):
        ctx.run_function = run_function
        ctx.inputs, ctx.parameters = list(args[:length]), list(args[length:])
        with torch.no_grad():
            return ctx.run_function(*ctx.inputs)

    @staticmethod
    def backward(ctx, *grads):
        ctx.inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.enable_grad():
            copies = [x.view_as(x) for x in ctx.inputs]
            outputs = ctx.run_function(*copies)
        found = torch.autograd.grad(outputs, ctx.inputs + ctx.parameters, grads, allow_unused=True)
        return (None, None, *found)


class Block(nn.Module):
    """A residual block whose own ops stand beside modules, checkpointed by hand."""

    def __init__(self, width: int, call: Callable[..., Any]) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.call = call
        self.ran: list[torch.Tensor] = []

    def _forward(self, x, context):
        h = F.gelu(self.up(self.norm(x) + context))
        out = x + self.down(h) * 0.5
        self.ran.append(out.detach())
        return out

    def forward(self, x, context):
        return self.call(self._forward, x, context, self.parameters())


def with_checkpoint(function, x, context, parameters):
    return Checkpoint.apply(function, 2, x, context, *parameters)


def without(function, x, context, parameters):
    return function(x, context)


class Net(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 3)
        self.blocks = nn.ModuleList(Block(12, call) for _ in range(2))
        self.context = nn.Linear(6, 12)

    def forward(self, x):
        h, context = self.first(x), self.context(x)
        for block in self.blocks:
            h = block(h, context)
        return self.last(h)


def train(model: nn.Module, steps: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        x = torch.randn(10, 6)
        optimizer.zero_grad()
        F.mse_loss(model(x), x[:, :3].sin()).backward()
        found = [g.clone() for g in gradients(model)]
        optimizer.step()
    return found


def net(call: Callable[..., Any]) -> Net:
    torch.manual_seed(0)
    return Net(call)


SCALES = {"float16": ("65536", "1"), "bfloat16": ("dynamic",)}
scaled = pytest.mark.parametrize(
    ("dtype", "scale"), [(dtype, scale) for dtype, scales in SCALES.items() for scale in scales]
)


@scaled
def test_a_home_made_checkpoint_computes_the_gradients_of_float32(mixed, dtype, scale):
    reference = train(net(without))
    session = mixed("default", dtype, LOSS_SCALE=scale)
    model = net(with_checkpoint)
    assert far(train(model), reference) < 8 * EPS[dtype]
    for block in model.blocks:
        first, again = block.ran
        assert first.dtype is again.dtype is torch.float32
        assert torch.equal(first, again)
    assert not session.demotions


@dtypes
def test_modules_in_a_checkpoint_run_in_the_precision_of_the_region(mixed, dtype):
    mixed("default", dtype)
    model, seen = net(with_checkpoint), []
    up = model.blocks[0].up
    up.forward = lambda x: seen.append(nn.Linear.forward(up, x)) or seen[-1]
    train(model)
    assert [y.dtype for y in seen] == [HALF[dtype]] * 2


class Reversible(Function):
    """RevNet: the backward reconstructs the inputs from the outputs, block by block."""

    @staticmethod
    def forward(ctx, x, blocks):
        ctx.blocks = blocks
        with torch.no_grad():
            one, two = x.chunk(2, dim=1)
            for f, g in blocks:
                one = one + f(two)
                two = two + g(one)
        ctx.y = torch.cat([one, two], dim=1).detach()
        return ctx.y.clone()

    @staticmethod
    def backward(ctx, grad):
        one, two = ctx.y.chunk(2, dim=1)
        d_one, d_two = grad.chunk(2, dim=1)
        for f, g in reversed(ctx.blocks):
            with torch.enable_grad():
                one = one.detach().requires_grad_()
                g_one = g(one)
                g_one.backward(d_two)
            with torch.no_grad():
                two = two - g_one
                d_one = d_one + one.grad
            with torch.enable_grad():
                two = two.detach().requires_grad_()
                f_two = f(two)
                f_two.backward(d_one)
            with torch.no_grad():
                one = one - f_two
                d_two = d_two + two.grad
        Reversible.reconstructed = torch.cat([one, two], dim=1)
        return torch.cat([d_one, d_two], dim=1), None


def reversibly(x, blocks):
    return Reversible.apply(x, blocks)


def straight(x, blocks):
    one, two = x.chunk(2, dim=1)
    for f, g in blocks:
        one = one + f(two)
        two = two + g(one)
    return torch.cat([one, two], dim=1)


class RevNet(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6))

    def forward(self, x):
        self.x = self.first(x).float()
        blocks = list(zip(self.parts[::2], self.parts[1::2], strict=True))
        return self.last(self.call(self.x, blocks))


@scaled
def test_a_reversible_network_reconstructs_and_computes_the_gradients_of_float32(
    mixed, dtype, scale
):
    def model(call: Callable[..., Any]) -> RevNet:
        torch.manual_seed(0)
        return RevNet(call)

    reference = train(model(straight))
    mixed("default", dtype, LOSS_SCALE=scale)
    ours = model(reversibly)
    assert far(train(ours), reference) < 8 * EPS[dtype]
    assert far([Reversible.reconstructed], [ours.x.detach()]) < 1e-5  # the same f and g again


def test_a_checkpoint_whose_backward_overflows_is_skipped_and_goes_on(mixed):
    reference = train(net(without), steps=4)
    session = mixed("default", "float16")
    model = net(with_checkpoint)
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(10, 6)).sum().mul(1e5).backward()  # beyond float16 at any useful scale
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    assert session.loss_scale.current(torch.device("cpu")).item() < 65536
    assert far(train(model, steps=4), reference) < 40 * EPS["float16"]


@dtypes
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_torchs_own_checkpoint_meets_functions_as_the_forward_did(mixed, dtype, use_reentrant):
    mixed("default", dtype)
    forwards: list[torch.Tensor] = []

    def part(h, weight):
        forwards.append(Linear.apply(h, weight))
        return forwards[-1].sin()

    def checkpointed(h, weight):
        return torch.utils.checkpoint.checkpoint(part, h, weight, use_reentrant=use_reentrant)

    found = []
    for function in (part, checkpointed):
        model = inside(function)
        torch.manual_seed(1)
        model(torch.randn(4, 8)).sum().backward()
        found.append(gradients(model))
    assert all(map(torch.equal, *found))
    assert len(forwards) == 3
    assert torch.equal(forwards[1], forwards[2])


# --- compiled code -------------------------------------------------------------------------------


IN_DYNAMO = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning", "ignore:The .grad attribute"
)


@dtypes
@IN_DYNAMO
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_keeps_functions_in_one_graph(mixed, dtype, backend):
    def square(h, weight):
        return Square.apply(h @ weight)

    reference_model = inside(square)
    x = torch.randn(4, 8)
    reference_model(x).sum().backward()
    mixed("default", dtype, LOSS_SCALE="1")
    model = inside(square)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    compiled(x).sum().backward()
    assert far(gradients(model), gradients(reference_model)) < 8 * EPS[dtype]

    alone = torch.compile(lambda x: Square.apply(x), backend=backend, fullgraph=True)
    value = torch.tensor([3.0], requires_grad=True)
    alone(value).backward()
    assert value.grad.item() == 6.0


@dtypes
@IN_DYNAMO
def test_compiled_parts_of_a_model_meet_functions(mixed, dtype):
    mixed("default", dtype, LOSS_SCALE="1")
    part = torch.compile(lambda h, w: Square.apply(h @ w), backend="aot_eager", fullgraph=True)
    model = inside(part)
    model(torch.randn(4, 8)).sum().backward()
    assert all(g.isfinite().all() for g in gradients(model))


# --- dressed as the original ---------------------------------------------------------------------


def test_apply_is_what_it_was_to_those_who_look(mixed):
    plain = vars(Function)["apply"]
    is_python = isinstance(plain, classmethod)  # from torch 2.14 on it is C, without a signature
    signature = inspect.signature(Square.apply) if is_python else None
    mixed("default", "bfloat16")
    apply = Square.apply
    assert isinstance(vars(Function)["apply"], classmethod)
    assert apply.__self__ is Square
    assert apply.__name__ == "apply"
    if is_python:
        assert apply.__qualname__ == "Function.apply"
        assert inspect.signature(apply) == signature
    assert pickle.loads(pickle.dumps(apply)) == apply
    assert copy.deepcopy(apply) == apply
    assert functools.partial(apply)(torch.tensor(2.0)).item() == 4.0
    assert inspect.ismethod(super(Cube, Cube).apply)
    autoamp.disable()
    assert vars(Function)["apply"] is plain
    assert apply(torch.tensor(3.0)).item() == 9.0  # one that was kept


def test_a_function_with_an_apply_of_its_own_is_called_through_it(mixed):
    mixed("default", "bfloat16")
    seen = []

    class Own(Function):
        @classmethod
        def apply(cls, x, factor=2.0):
            seen.append(cls)
            return super().apply(x, factor)

        @staticmethod
        def forward(ctx, x, factor):
            seen.append(x.dtype)
            return x * factor

        @staticmethod
        def backward(ctx, grad):
            return grad * 2, None

    inside(lambda h, w: Own.apply(h))(torch.randn(4, 8)).sum().backward()
    assert seen == [Own, torch.float32]


def test_classes_of_functions_are_not_kept_alive(mixed):
    session = mixed("default", "bfloat16")

    def once() -> None:
        class Gone(Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1

            @staticmethod
            def backward(ctx, grad):
                return grad

        inside(lambda h, w: Gone.apply(h))(torch.randn(4, 8)).sum().backward()
        assert len(session.function_devices) == 1

    once()
    gc.collect()
    assert len(session.function_devices) == 0
