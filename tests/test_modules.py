"""Modules that keep a precision of their own: by name, by class, for some steps; and parameters."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import autoamp

Ruled = Callable[..., Any]
Mixed = Callable[..., Any]
EXACT = {"rtol": 0.0, "atol": 0.0}
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture
def ruled(mixed: Mixed, tmp_path: Path) -> Ruled:
    """`ruled('modules: [{name: a, precision: float32}]')`: active with these rules; the session."""

    def enable(rules: str, dtype: str = "bfloat16", **variables: str) -> Any:
        policy = tmp_path / "rules.yaml"
        policy.write_text(f"extends: torch\n{rules}\n")
        return mixed(str(policy), dtype=dtype, **variables)

    return enable


class Block(nn.Module):
    """Two layers and a norm; `before` the second layer stands what a test puts there."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.attn = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.attn(x))) + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.ModuleList([Block(), Block()])
        self.decoder = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.encoder, *self.decoder):
            x = block(x)
        return x


class MyLinear(nn.Linear):
    """A class of the script's own, derived from torch's."""


def x4() -> torch.Tensor:
    return torch.linspace(-1, 1, 8).reshape(2, 4)


def seen_in(model: nn.Module, call: Callable[[], Any] | None = None) -> dict[str, torch.dtype]:
    """By name, the dtypes that layers of `model` compute in during one call."""
    seen: dict[str, torch.dtype] = {}
    handles = [
        module.register_forward_hook(
            lambda module, args, result, name=name: seen.update({name: result.dtype})
        )
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear)
    ]
    (call or (lambda: model(x4())))()
    for handle in handles:
        handle.remove()
    return seen


def state() -> list[Any]:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return [
        depth,
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    ]


def gradients(model: nn.Module, call: Callable[[], torch.Tensor] | None = None) -> list[Any]:
    """Loss and gradients of one backward."""
    model.zero_grad()
    loss = (call() if call else model(x4())).pow(2).mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


class Outer(nn.Module):
    """A training loop in a module, with a layer and an island that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.island = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.island.weight = self.layer.weight
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            out = self.layer(x).float() + self.island(x).float()
            self.seen.append(out.abs().sum().item())
            out.pow(2).sum().backward()
            with torch.no_grad():
                self.layer.weight.mul_(0.5)
        return out


# Which modules a rule means


def test_a_glob_over_qualified_names_matches_dots_too(ruled: Ruled) -> None:
    ruled('modules: [{name: "decoder.*attn", precision: float32}]')
    seen = seen_in(Net())
    islands = {name for name, dtype in seen.items() if dtype is FP32}
    assert islands == {"decoder.0.attn", "decoder.1.attn"}
    assert set(seen.values()) == {FP32, BF16}


def test_a_regex_must_match_the_whole_name(ruled: Ruled) -> None:
    ruled(r'modules: [{regex: "(en|de)coder\\.1\\.out", precision: float32}]')
    seen = seen_in(Net())
    assert {n for n, dtype in seen.items() if dtype is FP32} == {"encoder.1.out", "decoder.1.out"}
    ruled(r'modules: [{regex: "coder\\.1", precision: float32}]')
    assert set(seen_in(Net()).values()) == {BF16}


@pytest.mark.parametrize(
    "word", ["torch.nn.Linear", "torch.nn.modules.linear.Linear", "Linear", "MyLinear"]
)
def test_a_class_is_known_by_any_of_its_names_and_by_what_it_derives_from(
    ruled: Ruled, word: str
) -> None:
    ruled(f"modules: [{{type: {word}, precision: float32}}]")
    net = nn.Sequential(nn.Linear(4, 4), MyLinear(4, 4), nn.Bilinear(4, 4, 4))
    seen = seen_in(net[:2])
    assert seen == {"0": BF16 if word == "MyLinear" else FP32, "1": FP32}


def test_a_class_of_the_script_is_known_by_its_full_name(run_script: Any, tmp_path: Path) -> None:
    policy = tmp_path / "p.yaml"
    policy.write_text("modules: [{type: __main__.Mine, precision: float32}]")
    script = """
import torch
from torch import nn

class Mine(nn.Linear): ...

seen = []
net = nn.Sequential(Mine(2, 2), nn.Linear(2, 2))
for layer in net:
    layer.register_forward_hook(lambda module, args, result: seen.append(result.dtype))
net(torch.ones(1, 2))
assert seen == [torch.float32, torch.bfloat16], seen
print("ok")
"""
    result = run_script(
        script, AUTO_MIXED_PRECISION=str(policy), AUTO_MIXED_PRECISION_DTYPE="bfloat16"
    )
    assert result.stdout == "ok\n", result.stderr


def test_the_first_rule_that_matches_wins(ruled: Ruled) -> None:
    ruled(
        "modules: [{name: encoder.0.out, precision: lower}, {type: Linear, precision: float32},"
        "{name: 'decoder.*', precision: lower}]"
    )
    seen = seen_in(Net())
    assert {name for name, dtype in seen.items() if dtype is BF16} == {"encoder.0.out"}


def test_the_root_has_an_empty_name_and_a_class(ruled: Ruled) -> None:
    for rule in ("type: Net", "name: '*'", "regex: '|nothing'"):
        ruled(f"modules: [{{{rule}, precision: float32}}]")
        net = Net()
        assert set(seen_in(net).values()) == {FP32}, rule
        assert net(x4()).dtype is FP32


def test_a_rule_holds_below_until_an_inner_module_has_its_own(ruled: Ruled) -> None:
    ruled("modules: [{name: decoder.0.out, precision: lower}, {name: decoder, precision: float32}]")
    seen = seen_in(Net())  # decoder is a list of modules: nobody calls it
    assert {n for n, d in seen.items() if d is FP32} == {
        "decoder.0.attn",
        "decoder.1.attn",
        "decoder.1.out",
    }
    assert seen["decoder.0.out"] is BF16


def test_all_names_of_a_shared_module_count(ruled: Ruled) -> None:
    ruled("modules: [{name: decoder.1.out, precision: float32}]")
    net = Net()
    net.decoder[1].out = net.encoder[0].out
    seen = seen_in(net)
    assert seen["encoder.0.out"] is seen["decoder.1.out"] is FP32


def test_a_rule_for_what_holds_a_shared_module_holds_wherever_it_is_called(ruled: Ruled) -> None:
    ruled("modules: [{name: decoder, precision: float32}]")
    net, seen = Net(), []
    net.decoder[1].out = net.encoder[0].out
    net.encoder[0].out.register_forward_hook(lambda m, args, result: seen.append(result.dtype))
    net(x4())
    assert seen == [FP32, FP32]


def test_another_model_that_shares_parts_takes_no_rule_away(ruled: Ruled) -> None:
    ruled("modules: [{name: decoder, precision: float32}]")
    net = Net()
    before = seen_in(net)
    extractor = nn.Sequential(net.encoder[0], net.decoder[0])
    assert seen_in(extractor)["1.out"] is FP32
    assert seen_in(net) == before
    assert [before["encoder.0.out"], before["decoder.0.out"]] == [BF16, FP32]


def test_modules_that_hold_each_other_in_a_circle_have_names_all_the_same(ruled: Ruled) -> None:
    session = ruled("modules: [{name: decoder.0.out, precision: float32}]")
    net, seen = Net(), []
    for block in net.decoder:
        block.out.register_forward_hook(lambda module, args, result: seen.append(result.dtype))
    net.decoder[0].up = net
    net(x4())
    assert seen == [FP32, BF16]
    assert session.modules._names[id(net.decoder[0].out)] == {"decoder.0.out"}


def test_shared_parts_of_shared_parts_do_not_explode(ruled: Ruled) -> None:
    """2 ** 30 names."""
    ruled("modules: [{type: Linear, precision: float32}]")
    part: nn.Module = nn.Linear(4, 4)
    for _ in range(30):
        outer = nn.Module()
        outer.a = outer.b = part
        outer.forward = part.forward  # type: ignore[method-assign]
        part = outer
    assert part(x4()).dtype is FP32


@pytest.mark.parametrize("wrap", ["compile", "DataParallel", "AveragedModel"])
def test_wrappers_take_no_part_in_names(ruled: Ruled, wrap: str) -> None:
    ruled("modules: [{name: decoder.0.out, precision: float32}]")
    net = Net()
    if wrap == "compile":
        whole: Any = torch.compile(net, backend="eager")
    elif wrap == "DataParallel":
        whole = nn.DataParallel(net)
    else:
        whole = torch.optim.swa_utils.AveragedModel(net)
        net = whole.module
    seen: list[torch.dtype] = []
    net.decoder[0].out.register_forward_hook(lambda m, args, result: seen.append(result.dtype))
    net.decoder[1].out.register_forward_hook(lambda m, args, result: seen.append(result.dtype))
    whole(x4())
    assert seen == [FP32, BF16]
    torch._dynamo.reset()


def test_a_module_that_the_script_calls_module_keeps_that_name(ruled: Ruled) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(self.module(x))

    for rule in ("name: module", "regex: '|nothing'"):
        ruled(f"modules: [{{name: other, precision: lower}}, {{{rule}, precision: float32}}]")
        assert seen_in(Outer()) == {"module": FP32, "other": BF16}


def test_names_are_the_whole_model_s_where_a_script_calls_its_parts(ruled: Ruled) -> None:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Sequential(Block()), nn.Sequential(Block())

    ruled(
        "modules: [{name: encoder.0.out, precision: float32},{name: decoder, precision: float32}]"
    )
    vae = Vae()
    seen = seen_in(vae, lambda: vae.decoder(vae.encoder(x4())))
    assert {name for name, dtype in seen.items() if dtype is BF16} == {"encoder.0.attn"}


def test_names_are_a_model_s_own_too_where_nobody_calls_its_owner(ruled: Ruled) -> None:
    class Trainer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Net()

    ruled(
        "modules: [{name: encoder.0.out, precision: float32},"
        "{name: model.encoder.1.out, precision: float32}]"
    )
    trainer = Trainer()
    seen = seen_in(trainer.model, lambda: trainer.model(x4()))
    assert {n for n, dtype in seen.items() if dtype is FP32} == {"encoder.0.out", "encoder.1.out"}


def test_a_part_called_on_its_own_gets_no_other_names(ruled: Ruled) -> None:
    ruled("modules: [{name: out, precision: float32}]")
    net = Net()
    net.out = nn.Linear(4, 4)
    for _ in range(2):
        seen = seen_in(net, lambda: net.out(net(x4())))
        assert {name for name, dtype in seen.items() if dtype is FP32} == {"out"}
        net.decoder[0](x4())


def test_modules_that_come_later_are_found(ruled: Ruled) -> None:
    ruled("modules: [{name: 'decoder.*.out', precision: float32}]")
    net = Net()
    assert seen_in(net)["decoder.1.out"] is FP32
    net.decoder.append(Block())
    net.decoder[0].out = nn.Linear(4, 4)
    net.decoder[1] = Block()
    seen = seen_in(net)
    assert {n for n, d in seen.items() if d is FP32} == {f"decoder.{i}.out" for i in range(3)}


def test_modules_made_during_the_call_are_found(ruled: Ruled) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "late"):
                self.late = nn.Linear(4, 4)
            return self.late(self.first(x))

    ruled("modules: [{name: late, precision: float32}]")
    net = Lazy()
    results = []
    nn.Module.register_forward_hook(net.first, lambda m, a, result: results.append(result.dtype))
    net(x4())
    assert seen_in(net) == {"first": BF16, "late": FP32}


def test_modules_outside_the_tree_are_known_by_class(ruled: Ruled) -> None:
    """A layer in a list, one made for the call, and a container made for the call."""
    seen: list[torch.dtype] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.dtype)
        return x

    class Hiding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.hidden = nn.Linear(4, 4), [MyLinear(4, 4)]
            self.held = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = note(self.hidden[0](note(self.first(x))))
            x = note(MyLinear(4, 4)(x))
            x = note(MyLinear(4, 4)(x))
            return note(nn.Sequential(*self.held)(x))

    session = ruled(
        "modules: [{type: MyLinear, precision: float32}, {name: held, precision: float32}]"
    )
    net = Hiding()
    net(x4())
    net(x4())
    assert seen == [BF16, FP32, FP32, FP32, FP32] * 2
    known = len(session.modules.table)
    net(x4())
    gc.collect()
    assert len(session.modules.table) == known


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripted_parts_are_islands_as_a_whole(ruled: Ruled) -> None:
    ruled("modules: [{name: '1', precision: float32}]")
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4)))
    net, seen = nn.Sequential(nn.Linear(4, 4), scripted, nn.Identity()), []
    net[2].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    net(x4())
    assert seen == [FP32]


def test_a_container_made_for_the_call_takes_nothing_away(ruled: Ruled) -> None:
    class Wrapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held, self.other = nn.ModuleList([nn.Linear(4, 4)]), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.Sequential(*self.held, self.other)(x)

    ruled("modules: [{name: held, precision: float32}, {name: '0', precision: float16}]")
    net = Wrapping()
    for _ in range(2):
        assert seen_in(net) == {"held.0": FP32, "other": BF16}


def test_modules_that_compare_and_hash_badly_are_told_apart(ruled: Ruled) -> None:
    class Odd(nn.Linear):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise AssertionError("nobody may compare modules")

    ruled("modules: [{name: '1', precision: float32}]")
    seen: list[torch.dtype] = []
    layers = [Odd(4, 4), Odd(4, 4)]
    net = nn.Sequential()
    net._modules.update({"0": layers[0], "1": layers[1]})
    for layer in layers:
        layer._forward_hooks[0] = lambda m, args, result: seen.append(result.dtype)
    net(x4())
    assert seen == [BF16, FP32]


# What a precision means


def test_borders_cast_half_arguments_in_containers_and_leave_results(ruled: Ruled) -> None:
    inside: list[Any] = []

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Any, *, more: Any) -> Any:
            inside.append((x["a"].dtype, x["b"][0].dtype, more.dtype, more is x["a"]))
            return {"result": self.layer(x["a"])}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(4, 4), Inner()

        def forward(self, x: torch.Tensor) -> Any:
            half = self.first(x)
            assert half.dtype is BF16
            result = self.inner({"a": half, "b": [half]}, more=half)["result"]
            inside.append(result.dtype)
            return result

    ruled("modules: [{type: Inner, precision: float32}]")
    Outer()(x4())
    assert inside == [(FP32, FP32, FP32, True), FP32]


def test_an_island_computes_what_float32_computes(ruled: Ruled) -> None:
    net = Net()
    expected = gradients(net)
    ruled("modules: [{type: Net, precision: float32}]")
    torch.testing.assert_close(gradients(net), expected, **EXACT)
    ruled("modules: [{type: Nothing, precision: float32}]")
    assert not torch.equal(gradients(net)[0], expected[0])


def test_gradients_flow_through_borders(ruled: Ruled) -> None:
    """Against the same written by hand."""
    net = Net()

    def by_hand() -> torch.Tensor:
        with torch.autocast("cpu", BF16):
            x = net.encoder[1](net.encoder[0](x4()))
            with torch.autocast("cpu", enabled=False):
                x = net.decoder[0](x.float())
            return net.decoder[1](x).float()

    expected = gradients(net, by_hand)
    ruled("modules: [{name: decoder.0, precision: float32}]")
    torch.testing.assert_close(gradients(net), expected, **EXACT)


def test_lower_opens_again_inside_float32_and_hands_float32_back(ruled: Ruled) -> None:
    results: list[torch.dtype] = []

    class Island(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            half = self.attn(x)
            results.append(half.dtype)
            return half @ self.out.weight  # fails where one of them is half

    ruled("modules: [{name: '*attn', precision: lower}, {type: Island, precision: float32}]")
    net = nn.Sequential(Island())
    assert seen_in(net)["0.attn"] is BF16
    assert results == [FP32]


@pytest.mark.parametrize(("lower", "other"), [("bfloat16", FP16), ("float16", BF16)])
def test_the_other_half_dtype_can_be_had_with_weights_shared(
    ruled: Ruled, lower: str, other: torch.dtype
) -> None:
    """Torch keeps one cast of a weight, in whatever dtype was asked first."""
    outputs: list[torch.Tensor] = []

    class Tied(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outputs.append(F.linear(x, self.layer.weight))
            return outputs[-1]

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            layer = nn.Linear(4, 4, bias=False)
            self.one, self.two = Tied(layer), Tied(layer)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b, c, d = self.one(x), self.two(x), self.one(x), self.two(x)
            return torch.cat([a, b, c, d])  # torch refuses float16 beside bfloat16 here

    word = str(other).removeprefix("torch.")
    ruled(f"modules: [{{name: two, precision: {word}}}]", dtype=lower)
    own = getattr(torch, lower)
    net = Both()
    gradients(net)
    assert [y.dtype for y in outputs] == [own, other, own, other]
    weight = net.one.layer.weight
    for y in outputs:
        assert torch.equal(y, F.linear(x4().to(y.dtype), weight.to(y.dtype)))


@pytest.mark.parametrize("precision", ["float32", "lower", "float16"])
def test_weights_edited_by_hand_inside_a_region_are_seen_by_islands(
    ruled: Ruled, precision: str
) -> None:
    ruled(f"modules: [{{name: island, precision: {precision}}}]")
    net = Outer()
    net(x4())
    assert net.seen == pytest.approx([net.seen[0], net.seen[0] / 2, net.seen[0] / 4], rel=1e-2)
    assert torch.is_autocast_cache_enabled()


class Casts(TorchDispatchMode):
    """Counts the casts of one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor, self.count = tensor, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default and args[0] is self.tensor
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("precision", "casts"), [("float32", 1), ("lower", 1), ("float16", 2)])
def test_float32_islands_leave_the_cast_cache_alone(
    ruled: Ruled, precision: str, casts: int
) -> None:
    """One cast of a shared weight serves both calls outside of the island, and is still right."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.island = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.island.weight = self.layer.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.island(self.layer(x)))

    net = Tied()
    ruled(f"modules: [{{name: island, precision: {precision}}}]")
    with Casts(net.layer.weight) as casts_of_weight:
        found = net(x4())
    assert casts_of_weight.count == casts
    half, weight = x4().bfloat16(), net.layer.weight
    dtype = {"float32": FP32, "lower": BF16, "float16": FP16}[precision]
    with autoamp.off():
        half = F.linear(half, weight.bfloat16())
        half = F.linear(half.to(dtype), weight.to(dtype)).bfloat16()
        assert torch.equal(found, F.linear(half, weight.bfloat16()).float())


def test_float16_in_a_bfloat16_session_scales_the_loss(ruled: Ruled) -> None:
    """Gradients of 1e-9 vanish in float16 unless the loss is scaled."""
    session = ruled("modules: [{name: '0', precision: float16}]")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4))
    loss = net(x4()).sum() * 1e-9
    assert session.scales
    loss.backward()
    found = net[0].weight.grad.clone()
    net.zero_grad()
    with autoamp.off():
        (net(x4()).sum() * 1e-9).backward()
    expected = net[0].weight.grad
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-12)
    assert float(expected.abs().max()) > 1e-10
    assert session.loss_scale.state()["scale"] == 65536.0


def test_no_float16_island_no_scaling(ruled: Ruled) -> None:
    session = ruled("modules: [{name: nobody, precision: float16}]")
    Net()(x4()).sum().backward()
    assert not session.scales


@pytest.mark.parametrize("precision", ["float32", "lower", "float16"])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_in_an_island_restores_what_was_around(
    ruled: Ruled, precision: str, error: type[BaseException]
) -> None:
    states: list[Any] = []

    class Failing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise error

    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Failing(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            states.append(state())
            try:
                return self.part(x)
            except error:
                states.append(state())
                raise

    before = state()
    ruled(f"modules: [{{type: Failing, precision: {precision}}}]")
    with pytest.raises(error):
        Catching()(x4())
    assert states[0] == states[1]
    assert state() == before


def test_contexts_of_the_script_win_over_rules(ruled: Ruled) -> None:
    class Explicit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                x = self.a(x)
            with autoamp.off():
                x = self.b(x)
            return self.c(x)

    ruled("modules: [{name: c, precision: float32}, {type: Linear, precision: float16}]")
    net = Explicit()
    assert seen_in(net) == {"a": FP32, "b": FP32, "c": FP32}

    def by_hand() -> None:
        with torch.autocast("cpu", BF16):
            net(x4())

    assert seen_in(net, by_hand) == {"a": FP32, "b": FP32, "c": BF16}
    half = nn.Linear(4, 4).half()
    assert seen_in(half, lambda: half(x4().half())) == {"": FP16}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["around", "inside"])
def test_checkpointed_modules_meet_their_islands_again(
    ruled: Ruled, reentrant: bool, where: str
) -> None:
    class Saving(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_()
            for block in (*self.encoder, *self.decoder):
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    rule = "decoder.0" if where == "around" else "*.attn"
    ruled(
        f"modules: [{{name: '{rule}', precision: float32}}, {{type: LayerNorm, precision: lower}},"
        "{name: encoder.1.out, precision: float16}]"
    )
    plain, saving = Net(), Saving()
    expected = gradients(plain)
    recomputed: list[torch.dtype] = []
    saving.decoder[0].attn.register_forward_hook(lambda m, a, y: recomputed.append(y.dtype))
    torch.testing.assert_close(gradients(saving), expected, **EXACT)
    assert recomputed == [FP32, FP32]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_modules_made_for_one_call_meet_their_islands_again(
    ruled: Ruled, reentrant: bool
) -> None:
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 4)

        def part(self, x: torch.Tensor) -> torch.Tensor:
            return nn.GELU()(self.layer(x)).pow(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.part, x.clone().requires_grad_(), use_reentrant=reentrant)

    ruled("modules: [{type: GELU, precision: float32}]")
    net = Saving()
    found = gradients(net)
    torch.testing.assert_close(gradients(net, lambda: net.part(x4())), found, rtol=1e-2, atol=1e-3)
    assert len(found) == 3


def test_threads_have_islands_of_their_own(ruled: Ruled) -> None:
    ruled("modules: [{name: '*.attn', precision: float32}]")
    net, seen = Net(), {}
    thread = threading.Thread(target=lambda: seen.update(seen_in(net)))
    thread.start()
    thread.join()
    assert {name for name, dtype in seen.items() if dtype is FP32} == {
        name for name in seen if name.endswith("attn")
    }


def test_replicas_in_threads_compute_as_their_context_says(ruled: Ruled) -> None:
    """What `nn.DataParallel` does on several GPUs: there the worker's own context is in force."""
    session = ruled("modules: [{name: '*.attn', precision: float32}]")
    net, results = Net(), []
    net(x4())
    known = len(session.modules.table)

    def work() -> None:
        replica = net._replicate_for_data_parallel()
        with torch.autocast("cpu", BF16):
            results.append(replica(x4()).dtype)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    gc.collect()
    assert results == [FP32]  # of a residual block
    assert len(session.modules.table) == known


def test_rules_come_and_go_with_steps(ruled: Ruled) -> None:
    session = ruled(
        "modules: [{name: encoder.0.out, precision: float32, steps: {from: 1, to: 3}},"
        "{name: encoder.0.*, precision: float16, steps: {to: 2}},"
        "{name: encoder.0, precision: float32, steps: {from: 4}}]"
    )
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    seen = []
    for step in range(6):
        dtypes = seen_in(net, lambda: gradients(net))
        seen.append((dtypes["encoder.0.out"], dtypes["encoder.0.attn"]))
        assert dtypes["encoder.1.out"] is BF16
        optimizer.step()
        assert session.modules.steps() == step + 1
    assert seen == [
        (FP16, FP16),
        (FP32, FP16),
        (FP32, BF16),
        (BF16, BF16),
        (FP32, FP32),
        (FP32, FP32),
    ]


def test_skipped_steps_count_and_nobody_waits_for_them(
    ruled: Ruled, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = ruled(
        "modules: [{name: '0', precision: float32, steps: {from: 2, to: 4}}]\n"
        "loss_scale: {init: 16777216.0}",
        dtype="float16",
    )
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step, expected in enumerate((FP16, FP16, FP32, FP32, FP16)):
        if step == 2:
            assert session.loss_scale.skipped == 2
            monkeypatch.setattr(session.loss_scale, "read_back", None)
        optimizer.zero_grad()
        factor = 100 if step < 2 else 1e-6
        assert seen_in(net, lambda f=factor: net(x4()).mul(f).sum().backward())["0"] is expected
        optimizer.step()
        assert session.modules.steps() == step + 1
    monkeypatch.undo()


# What rules leave behind


def test_models_pickle_and_copy_without_a_trace(ruled: Ruled) -> None:
    def saved(model: nn.Module) -> bytes:
        buffer = io.BytesIO()
        torch.save(model, buffer, _use_new_zipfile_serialization=False)
        return buffer.getvalue()

    net = Net()
    plain = (saved(net), pickle.dumps(net), [vars(m).keys() for m in net.modules()])
    ruled(
        "modules: [{name: '*.attn', precision: float32}, {type: LayerNorm, precision: float16}]\n"
        "parameters: [{name: '*.out.weight'}]"
    )
    net(x4())
    assert pickle.dumps(net) == plain[1]
    assert [vars(m).keys() for m in net.modules()] == plain[2]
    assert len(saved(net)) == len(plain[0])
    twin = copy.deepcopy(net)
    assert [vars(m).keys() for m in twin.modules()] == plain[2]
    assert seen_in(twin) == seen_in(net)
    assert seen_in(pickle.loads(pickle.dumps(net))) == seen_in(net)


def test_models_die_as_ever_and_are_forgotten(ruled: Ruled) -> None:
    session = ruled(
        "modules: [{name: '*.attn', precision: float32}]\nparameters: [{name: '*.weight'}]"
    )
    net = Net()
    net(x4())
    rules = session.modules
    assert len(rules.table) == len(list(net.modules()))
    assert len(rules._covered) == 12
    reference = weakref.ref(net)
    del net
    gc.collect()
    assert reference() is None
    assert [len(table) for table in (rules.table, rules._covered, rules._names)] == [0, 0, 0]
    assert all(isinstance(living(), type) for living in rules._living.values())


def test_without_rules_nothing_is_looked_up(mixed: Mixed, monkeypatch: pytest.MonkeyPatch) -> None:
    session = mixed(dtype="bfloat16")
    monkeypatch.setattr(session.islands, "call_nested", None)
    Net()(x4())
    assert session.modules.table == session.modules._names == {}


def test_every_module_of_a_large_model_costs_one_lookup(ruled: Ruled) -> None:
    """1,000 rules that match nothing here: no nested call gets further than the table."""
    rules = ",".join(f"{{name: 'other.{index}.*', precision: float32}}" for index in range(1000))
    session = ruled(f"modules: [{rules}]", LOG="quiet")
    net = nn.Sequential(*(nn.Linear(1, 1) for _ in range(1000)))
    net(torch.ones(1, 1))
    assert set(session.modules.table.values()) == {None}
    asked: list[str] = []
    sys.setprofile(
        lambda frame, event, arg: (
            asked.append(frame.f_code.co_name)
            if event == "call"
            and "modules.py" in frame.f_code.co_filename
            and "autoamp" in frame.f_code.co_filename
            else None
        )
    )
    try:
        net(torch.ones(1, 1))
    finally:
        sys.setprofile(None)
    assert asked == ["of_root", "step_ended", "steps"]


# What is said


NOTICE = "autoamp: {at}: '{word}' matches no {what} of the models that ran; the nearest {near}"


@pytest.mark.parametrize(
    ("rule", "word", "near"),
    [
        ("name: 'decodr.*.attn'", "decodr.*.attn", "name is 'decoder.1.attn'"),
        ("regex: 'encoder.2.out'", "encoder.2.out", "name is 'encoder.1.out'"),
        ("type: LayerNrm", "LayerNrm", "class is 'LayerNorm'"),
        (
            "type: torch.nn.LayerNrm",
            "torch.nn.LayerNrm",
            "class is 'torch.nn.modules.normalization.LayerNorm'",
        ),
    ],
)
@pytest.mark.parametrize("steps", [True, False])
def test_a_pattern_that_matches_nothing_is_named_once(
    ruled: Ruled, capfd: pytest.CaptureFixture[str], rule: str, word: str, near: str, steps: bool
) -> None:
    session = ruled(
        f"modules:\n  - {{{rule}, precision: float32}}\n  - {{type: Linear, precision: lower}}"
    )
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(x4())
    lines = capfd.readouterr().err.splitlines()
    assert not [line for line in lines if "matches no" in line]
    if steps:
        for _ in range(3):
            gradients(net)
            optimizer.step()
    else:
        session.modules.check_matches()
    at = f"{session.policy.source}:3:5"
    lines = [line for line in capfd.readouterr().err.splitlines() if "matches no" in line]
    assert lines == [NOTICE.format(at=at, word=word, what="module", near=near)]
    session.modules.check_matches()
    assert capfd.readouterr().err == ""


def test_a_parameter_pattern_that_matches_nothing_is_named(
    ruled: Ruled, capfd: pytest.CaptureFixture[str]
) -> None:
    session = ruled("parameters:\n  - {name: 'decoder.0.out.weigth'}\n  - {name: '*.bias'}")
    session.modules.check_matches()
    assert "matches no" not in capfd.readouterr().err  # no model ran
    Net()(x4())
    session.modules.check_matches()
    line = NOTICE.format(
        at=f"{session.policy.source}:3:5",
        word="decoder.0.out.weigth",
        what="parameter",
        near="name is 'decoder.0.out.weight'",
    )
    assert [x for x in capfd.readouterr().err.splitlines() if "matches no" in x] == [line]


def test_many_patterns_that_match_nothing_are_counted(
    ruled: Ruled, capfd: pytest.CaptureFixture[str]
) -> None:
    rules = ",".join(f"{{name: 'x{index}', precision: float32}}" for index in range(20))
    session = ruled(f"modules: [{rules}]")
    Net()(x4())
    session.modules.check_matches()
    lines = capfd.readouterr().err.splitlines()
    assert sum("matches no module" in line for line in lines) == 8
    assert lines[-1] == "autoamp: 12 more rules match nothing"


# Parameters


def test_parameters_are_covered_and_their_views(ruled: Ruled) -> None:
    session = ruled("parameters: [{name: 'decoder.*.weight'}, {regex: 'encoder.0.out.bias'}]")
    net, covers = Net(), session.modules.covers
    assert not covers(net.decoder[0].out.weight)  # nobody has called the model yet
    net(x4())
    names = {name for name, parameter in net.named_parameters() if covers(parameter)}
    assert names == {
        *(f"decoder.{i}.{part}.weight" for i in (0, 1) for part in ("attn", "norm", "out")),
        "encoder.0.out.bias",
    }
    weight = net.decoder[0].out.weight
    with torch.no_grad():
        assert covers(weight.t())
    assert covers(weight.view(16)[2:].reshape(7, 2).t())
    assert not covers(weight + 0)
    assert not covers(net.encoder[0].out.weight.t())
    assert not covers(x4())


def test_shared_wrapped_replaced_and_later_parameters_are_covered(ruled: Ruled) -> None:
    session = ruled("parameters: [{name: decoder.0.out.weight}, {name: decoder.2.out.weight}]")
    net, covers = Net(), session.modules.covers
    net.encoder[0].out.weight = net.decoder[0].out.weight
    whole = nn.DataParallel(net)
    whole(x4())
    assert covers(net.encoder[0].out.weight)
    old = net.decoder[0].out.weight
    net.decoder[0].out.weight = nn.Parameter(torch.zeros(4, 4))
    whole(x4())
    assert covers(net.decoder[0].out.weight)
    net.decoder.append(Block())
    whole(x4())
    assert covers(net.decoder[2].out.weight)
    assert covers(old)  # alive, and the first block's still
    del old
    assert covers(net.encoder[0].out.weight)
    twin = copy.deepcopy(net)
    assert not covers(twin.decoder[0].out.weight)
    twin(x4())
    assert covers(twin.decoder[0].out.weight)


# Compiled code

COMPILED = """
import sys
import torch
from torch import nn
from torch._dynamo.utils import counters
import autoamp

backend = sys.argv[1]
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.norm, self.out = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.out(self.norm(self.attn(x))).relu() + x


class Net(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.encoder = nn.ModuleList([Block() for _ in range(depth)])
        self.decoder = nn.ModuleList([Block() for _ in range(depth)])

    def forward(self, x):
        for block in (*self.encoder, *self.decoder):
            x = block(x)
        return x


net, x = Net(), torch.randn(4, 4)
tolerance = dict(rtol=0, atol=0) if backend != "inductor" else dict(rtol=2e-2, atol=2e-3)


def step(function):
    net.zero_grad()
    out = function(x)
    assert out.dtype is torch.float32, out.dtype
    loss = out.pow(2).mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in net.parameters())]


def fresh():
    torch._dynamo.reset()
    counters.clear()
    return counters["stats"]


def note_dtypes(seen):
    def note(graph, inputs):
        seen.extend(
            str(node.meta["example_value"].dtype).removeprefix("torch.")
            for node in graph.graph.nodes
            if node.op == "call_function" and "linear" in str(node.target)
        )
        return graph.forward
    return note

"""

COMPILED_NAMES = (
    COMPILED
    + """
expected = step(net)
with autoamp.off():
    assert not torch.equal(step(net)[0], expected[0])
stats = fresh()
function = torch.compile(lambda x: net(x), backend=backend, fullgraph=True)
for _ in range(4):
    found = step(function)
assert stats["unique_graphs"] == 1, stats
torch.testing.assert_close(found, expected, **tolerance)
module = torch.compile(net, backend=backend, fullgraph=True)
for _ in range(4):
    found = step(module)
assert stats["unique_graphs"] == 2, stats
torch.testing.assert_close(found, expected, **tolerance)

dtypes = ["bfloat16"] * 4 + ["float32", "float16", "float32", "bfloat16"]
for compiled in (lambda x: net(x), net):
    fresh()
    seen = []
    torch.compile(compiled, backend=note_dtypes(seen), fullgraph=True)(x)
    assert seen == dtypes, seen

stats = fresh()
for block in (*net.encoder, *net.decoder):
    block.compile(backend=backend, fullgraph=True)
for _ in range(3):
    found = step(net)
torch.testing.assert_close(found, expected, **tolerance)
print("same")
"""
)

NAME_RULES = r"""
extends: torch
modules:
  - {name: "decoder.*.attn", precision: float32}
  - {type: LayerNorm, precision: float32}
  - {regex: "decoder\\.0\\.out", precision: float16}
"""


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_code_has_the_islands_of_eager_code(
    run_script: Any, tmp_path: Path, backend: str
) -> None:
    assert compiled(run_script, tmp_path, COMPILED_NAMES, NAME_RULES, backend) == "same\n"


def compiled(
    run_script: Any, folder: Path, script: str, rules: str, *arguments: str, dtype: str = "bfloat16"
) -> str:
    policy = folder / "rules.yaml"
    policy.write_text(rules)
    result = run_script(
        script,
        *arguments,
        AUTO_MIXED_PRECISION=str(policy),
        AUTO_MIXED_PRECISION_DTYPE=dtype,
        AUTO_MIXED_PRECISION_LOG="quiet",
    )
    assert result.returncode == 0, result.stderr
    return str(result.stdout)


REGIONAL = (
    COMPILED
    + """

class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = Net(depth=6), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.body(x))


x = x.requires_grad_()
for policy in sys.argv[2:]:
    autoamp.disable()
    autoamp.enable(policy)
    net, stats = Headed(), fresh()
    expected = step(net)
    for block in (*net.body.encoder, *net.body.decoder):
        block.compile(backend=backend, fullgraph=True)
    for _ in range(3):
        found = step(net)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    print(stats["unique_graphs"])
"""
)


def test_blocks_of_one_class_share_what_is_compiled(run_script: Any, tmp_path: Path) -> None:
    graphs = {
        "[]": "1",
        "[{type: LayerNorm, precision: float32}, {type: Linear, precision: lower}]": "1",
        "[{type: Block, precision: float32}]": "1",
        "[{name: head, precision: float32}]": "1",
        # Two kinds of blocks.
        "[{name: body.encoder.0.norm, precision: float16}]": "2",
        "[{name: body.decoder.1, precision: float32}]": "2",
        # Names tell the layers of a class apart in all of them: more than Dynamo's limit of 8.
        "[{name: '*.norm', precision: float16}]": "12",
    }
    policies = written(tmp_path, [f"modules: {rules}" for rules in graphs])
    found = compiled(run_script, tmp_path, REGIONAL, "", "aot_eager", *policies)
    assert dict(zip(graphs, found.split(), strict=True)) == graphs


def written(folder: Path, texts: list[str]) -> list[str]:
    paths = [folder / f"policy{index}.yaml" for index in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return [str(path) for path in paths]


MANY_ROOTS = (
    COMPILED
    + """
import torch._dynamo.config as config
from autoamp import activation

limits = config.cache_size_limit, config.accumulated_cache_size_limit
for policy in sys.argv[2:]:
    autoamp.disable()
    autoamp.enable(policy)
    stats = fresh()
    function = torch.compile(lambda net, x: net(x), backend=backend, fullgraph=True)
    for _ in range(12):
        net = Net(depth=1)
        torch.testing.assert_close(function(net, x), net(x), rtol=0, atol=0)
    print(stats["unique_graphs"])
    activation.session().modules.close()
    assert limits == (config.cache_size_limit, config.accumulated_cache_size_limit)
"""
)


def test_a_compiled_function_serves_many_models(run_script: Any, tmp_path: Path) -> None:
    """More than Dynamo's limit of 8, where names may tell each from the others."""
    graphs = {
        "modules: [{type: LayerNorm, precision: float32}]": "1",
        "modules: [{name: encoder.0.norm, precision: float16}]": "12",
        "modules: [{name: nothing, precision: float32}]": "12",
        "parameters: [{name: decoder.0.out.weight}]": "12",
    }
    policies = written(tmp_path, list(graphs))
    found = compiled(run_script, tmp_path, MANY_ROOTS, "", "eager", *policies)
    assert dict(zip(graphs, found.split(), strict=True)) == graphs


TWICE = (
    COMPILED
    + """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, query, key):
        return self.layer(query) if query is key else self.layer(query) + 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.attention = nn.Linear(4, 4), Attention()

    def forward(self, x):
        half = self.first(x)
        return self.attention(half, key=half)


net = Net()
print(torch.equal(torch.compile(lambda x: net(x), backend=backend)(x), net(x)))
with autoamp.off():
    print(torch.equal(net(x) > 0, net.attention.layer(net.first(x)) > 0))
"""
)


def test_an_argument_passed_twice_is_one_tensor_in_compiled_islands_too(
    run_script: Any, tmp_path: Path
) -> None:
    rules = "modules: [{type: Attention, precision: float32}]"
    assert compiled(run_script, tmp_path, TWICE, rules, "eager") == "True\nTrue\n"


INSIDE_AND_OUTSIDE = (
    COMPILED
    + """
import copy


class Island(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.own, self.held = nn.Linear(4, 4), [inner]

    def forward(self, x):
        return self.held[0](self.own(x))


plain, inner = net.encoder[0], copy.deepcopy(net.encoder[0])
inner.compile(backend=backend, fullgraph=True)
island, plain_island = Island(inner), Island(plain)
plain_island.own = island.own
function = torch.compile(lambda x: inner(x), backend=backend)
with autoamp.off():
    float32 = plain(x)
for _ in range(3):
    assert torch.equal(island(x), plain_island(x))
    assert torch.equal(inner(x), plain(x))
    assert torch.equal(function(x), plain(x))
print(torch.equal(plain(x), float32))
with autoamp.off():
    float32 = plain_island(x)
print(torch.equal(island(x), float32))
"""
)


def test_code_compiled_in_an_island_is_not_used_outside(run_script: Any, tmp_path: Path) -> None:
    rules = "modules: [{type: Island, precision: float32}]"
    found = compiled(run_script, tmp_path, INSIDE_AND_OUTSIDE, rules, "eager")
    assert found == "False\nTrue\n"


LATER = (
    COMPILED
    + """
import copy


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), None

    def forward(self, x):
        x = self.first(x)
        return x if self.second is None else self.second(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.grows = nn.LayerNorm(4), Growing()

    def forward(self, x):
        return self.grows(self.norm(x))


plain = Net()
net = copy.deepcopy(plain)
(net if backend == "whole" else net.grows).compile(backend="eager", fullgraph=True)
for change in ("nothing", "a new module", "a module in the place of another"):
    if change != "nothing":
        net.grows.second = plain.grows.second = nn.Linear(4, 4)
    for _ in range(2):
        assert torch.equal(net(x), plain(x)), change
with autoamp.off():
    float32 = plain(x)
print(torch.equal(plain(x), float32))
"""
)


@pytest.mark.parametrize("compile_what", ["whole", "part"])
def test_modules_that_come_later_are_found_in_compiled_code(
    run_script: Any, tmp_path: Path, compile_what: str
) -> None:
    rules = "[{name: norm, precision: float16}, {name: '*second', precision: float32}]"
    found = compiled(run_script, tmp_path, LATER, f"modules: {rules}", compile_what)
    assert found == "False\n"


COMPILED_STEPS = (
    COMPILED
    + """
from autoamp import activation

rules = activation.session().modules
optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
graphs, found, expected = [], [], []
stats = fresh()
for kind in (lambda x: net(x), net):
    compiled = torch.compile(kind, backend=backend, fullgraph=True)
    activation.session().counts.steps = 0
    rules.step_ended()
    for index in range(5):
        expected.append(step(net))
        found.append(step(compiled))
        optimizer.step()
        rules.step_ended()
        graphs.append(stats["unique_graphs"])
torch.testing.assert_close(found, expected, rtol=0, atol=0)
print(graphs)
assert not torch.equal(expected[0][0], expected[2][0])
assert torch.equal(expected[0][0], expected[4][0])
"""
)


def test_steps_under_compile_cost_one_recompilation_at_each_border(
    run_script: Any, tmp_path: Path
) -> None:
    rules = "modules: [{name: 'decoder.*', precision: float32, steps: {from: 2, to: 4}}]"
    found = compiled(run_script, tmp_path, COMPILED_STEPS, rules, "aot_eager")
    assert found == "[1, 1, 2, 2, 3, 4, 4, 5, 5, 6]\n"


COMPILED_PARAMETERS = (
    COMPILED
    + """
for compiled in (lambda x: net(x), net):
    fresh()
    seen = []
    torch.compile(compiled, backend=note_dtypes(seen), fullgraph=True)(x)
    print(*seen)
"""
)


def test_owners_of_covered_parameters_are_islands_in_compiled_code(
    run_script: Any, tmp_path: Path
) -> None:
    rules = "parameters: [{name: 'decoder.*.attn.weight'}]"
    found = compiled(run_script, tmp_path, COMPILED_PARAMETERS, rules, "eager")
    words = ["bfloat16"] * 4 + ["float32", "bfloat16"] * 2
    assert found == 2 * (" ".join(words) + "\n")
