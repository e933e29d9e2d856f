"""What half precision breaks silently is seen in the first calls of a model, and only that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import autoamp
from autoamp.inspection import BOUND, COMPARED, FACTOR, TERM, VALUE, is_lost

Mixed = Callable[..., Any]
Function = Callable[[torch.Tensor], Any]
HALF, BRAIN = torch.float16, torch.bfloat16
MASK = torch.tensor([[False, True, False, False]])


class Part(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.linear(x))


def causes(function: Function, x: torch.Tensor | None = None) -> list[str]:
    """Why a module with this code is demoted, called twice in a region."""
    net = nn.Sequential(nn.Linear(4, 4), Part(function))
    torch.nn.init.eye_(net[0].weight)
    torch.nn.init.eye_(net[1].linear.weight)
    for layer in (net[0], net[1].linear):
        torch.nn.init.zeros_(layer.bias)
    for _ in range(2):
        net(torch.ones(3, 4) if x is None else x)
    found = autoamp.status()["demotions"]
    assert {d["module"] for d in found} <= {"1"}
    return [d["cause"] for d in found]


LOST = {
    "eps": (lambda h: h / (h + 1e-8), "add: float16 cannot hold the constant 1e-08"),
    "eps subtracted": (lambda h: h - 1e-8, "sub: float16 cannot hold the constant 1e-08"),
    "eps in a tensor": (lambda h: h + torch.tensor(1e-8), "add: float16 cannot hold the constant"),
    "a mask added": (lambda h: h + -1e9, "add: float16 cannot hold the constant -1e+09"),
    "a mask by product": (lambda h: (1 - h) * -1e9, "mul: float16 cannot hold the constant -1e+09"),
    "a small factor": (lambda h: h * 1e-9, "mul: float16 cannot hold the constant 1e-09"),
    "clamped below": (lambda h: h.clamp(min=1e-12), "clamp: float16 cannot hold the constant"),
    "clamped above": (
        lambda h: h.clamp(1e-3, 1 - 1e-7),
        "clamp: float16 cannot hold the constant 1",
    ),
    "no bound at all": (lambda h: h.clamp(-1e9, 1e9), "value cannot be converted"),
    "in place": (lambda h: h.clone().add_(1e-8), "add_: float16 cannot hold the constant 1e-08"),
    "compared": (lambda h: h * (h > 1e-8), "gt: float16 cannot hold the constant 1e-08"),
    "a grid": (
        lambda h: h.sum() + torch.arange(3000, dtype=h.dtype).sum(),
        "arange: float16 cannot tell the values of this grid apart",
    ),
    "coordinates": (
        lambda h: h.sum() + torch.linspace(-1, 1, 5000, dtype=h.dtype).sum(),
        "linspace: float16 cannot tell the values of this grid apart",
    ),
    "positions": (
        lambda h: h.sum() + torch.tensor([1, 50257]).type_as(h).sum(),
        "_to_copy: float16 cannot hold these whole numbers",
    ),
    "a counter": (
        lambda h: torch.full((1,), 2048.0, dtype=h.dtype).add_(1) + h.sum(),
        "add_: float16 counts no further",
    ),
    "a product": (lambda h: (h * 300) * 300, "mul: the result leaves the range of float16"),
    "a square in place": (lambda h: h.mul(300).pow_(2.2), "pow_: the result leaves the range"),
    "a cast": (lambda h: (h.float() * 1e5).to(h.dtype), "_to_copy: the result leaves the range"),
    "a matrix product": (lambda h: (h * 200) @ (h * 200).T, "mm: the result leaves the range"),
    "a quotient of rounded numbers": (
        lambda h: 1 / ((h + 1e-4).float() - 1).mean(),
        "its result is not finite, its arguments are",
    ),
    "a row that is all masked": (
        lambda h: torch.softmax(h.float() + torch.full((3, 4), -1e9).to(h.dtype), -1),
        "_to_copy: the result leaves the range",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_what_float16_loses_is_found_and_the_module_is_right(mixed: Mixed, name: str) -> None:
    function, cause = LOST[name]
    mixed("default")
    found = causes(function)
    assert len(found) == 1, found
    assert found[0].startswith(cause)


KEPT: dict[str, Function] = {
    "an eps that is held": lambda h: h / (h + 1e-5),
    "eps of norms": lambda h: nn.functional.layer_norm(h, (4,), eps=1e-12),
    "eps of batch norm": lambda h: nn.functional.batch_norm(
        h, None, None, torch.ones(4), torch.zeros(4), training=True, eps=1e-10
    ),
    "eps in a float32 op": lambda h: torch.log(h.softmax(-1).float() + 1e-8),
    "eps of a norm that is float32": lambda h: h / (h.norm() + 1e-12),
    "normalize": lambda h: nn.functional.normalize(h, eps=1e-12),
    "an infinite mask": lambda h: h.masked_fill(MASK, float("-inf")).softmax(-1),
    "a mask that is cast": lambda h: h + torch.tensor([0.0, -1e9, 0.0, -1e9]).to(h.dtype),
    "ordinary positions": lambda h: h.sum() + torch.arange(200, dtype=h.dtype).mean(),
    "an ordinary grid": lambda h: h.sum() + torch.linspace(-1, 1, 64, dtype=h.dtype).mean(),
    "memory that is not written": lambda h: torch.empty_like(h).zero_() + h,
    "dropout": lambda h: nn.functional.dropout(h, 0.5),
    "attention": lambda h: nn.functional.scaled_dot_product_attention(h[None], h[None], h[None]),
    "gelu": lambda h: 0.5 * h * (1 + torch.tanh(0.79788456 * (h + 0.044715 * h**3))),
    "losses": lambda h: nn.functional.cross_entropy(
        h, torch.tensor([0, 1, 2]), label_smoothing=0.1
    ),
    "minus infinity": lambda h: torch.log((h > 5).to(h.dtype)),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_is_right_in_half_is_left_as_it_is(mixed: Mixed, name: str, dtype: str) -> None:
    mixed("default", dtype)
    assert causes(KEPT[name]) == []


def test_what_bfloat16_loses(mixed: Mixed) -> None:
    mixed("default", "bfloat16")
    assert causes(lambda h: h + 1e-8) == []
    assert causes(lambda h: h.clamp(1e-7, 1 - 1e-7))[0].startswith("clamp: bfloat16 cannot hold")
    mixed("default", "bfloat16")
    found = causes(lambda h: h.sum() + torch.arange(300, dtype=h.dtype).sum())
    assert found == ["arange: bfloat16 cannot tell the values of this grid apart"]


@pytest.mark.parametrize(
    ("constant", "dtype", "role", "lost"),
    [
        (1e-6, HALF, TERM, False),  # 1.01e-6: the least numbers are 6e-8 apart
        (1e-7, HALF, TERM, True),
        (-1e-8, HALF, TERM, True),
        (65504.0, HALF, VALUE, False),
        (65520.0, HALF, VALUE, True),
        (1e5, HALF, BOUND, False),
        (-1e9, HALF, COMPARED, False),
        (1e9, HALF, FACTOR, True),
        (1 - 1e-7, HALF, BOUND, True),
        (1 - 1e-3, HALF, BOUND, False),
        (1 - 1e-7, HALF, TERM, False),
        (1 - 1e-3, BRAIN, BOUND, True),
        (1e-30, BRAIN, TERM, False),
        (1e-45, BRAIN, TERM, True),
        (float("inf"), HALF, VALUE, False),
        (float("nan"), HALF, VALUE, False),
        (0.0, HALF, TERM, False),
    ],
)
def test_which_constants_are_lost(
    constant: float, dtype: torch.dtype, role: str, lost: bool
) -> None:
    assert is_lost(constant, dtype, role) is lost


def test_only_first_calls_are_looked_at_and_each_kind_once(
    mixed: Mixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = mixed("default")
    watched: list[int] = []
    original = session.islands.fallback.watched
    monkeypatch.setattr(
        session.islands.fallback, "watched", lambda *a: (watched.append(1), original(*a))[1]
    )
    net = nn.Linear(4, 4)
    for rows in (2, 2, 3, 2, 2):  # 8 and 12 numbers: of one size
        net(torch.ones(rows, 4))
    assert len(watched) == 1
    net(torch.ones(100, 4))
    net.eval()
    net(torch.ones(2, 4))
    with torch.no_grad():
        net(torch.ones(2, 4))
        net(torch.ones(2, 4))
    assert len(watched) == 4
    for size in range(20):
        net(torch.ones(2**size, 4))
    assert len(watched) == 8  # within reason


def test_the_first_call_gives_the_bits_of_the_second(mixed: Mixed) -> None:
    mixed("default")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    net = nn.Sequential(nn.Linear(16, 16), layer, nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    x = torch.randn(2, 5, 16)
    results = []
    for _ in range(2):
        net.zero_grad()
        out = net(x)
        out.pow(2).mean().backward()
        results.append([out, *(p.grad for p in net.parameters())])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
    assert autoamp.status()["demotions"] == []


def test_modes_of_the_script_see_the_ops_of_the_script_only(mixed: Mixed) -> None:
    mixed("default")
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    with FlopCounterMode(display=False) as first:
        net(torch.ones(3, 4))
    with FlopCounterMode(display=False) as second:
        net(torch.ones(3, 4))
    assert first.get_total_flops() == second.get_total_flops() == 2 * 3 * (4 * 8 + 8 * 4)


def test_a_policy_can_leave_inspection_out(mixed: Mixed, tmp_path: Any) -> None:
    policy = tmp_path / "plain.yaml"
    policy.write_text("extends: default\nfallback: {inspect: false}\n")
    mixed(str(policy))
    assert causes(lambda h: h + 1e-8) == []


@pytest.mark.parametrize("compiles", ["model", "part"])
def test_compiled_modules_are_not_looked_into(mixed: Mixed, compiles: str) -> None:
    mixed("default")
    torch._dynamo.reset()
    part = Part(lambda h: h + 1e-8)
    net = nn.Sequential(nn.Linear(4, 4), part)
    (net if compiles == "model" else part).compile(backend="eager", fullgraph=True)
    with torch.no_grad():
        net(torch.ones(3, 4))
    assert autoamp.status()["demotions"] == []


def test_a_compiled_function_is_one_graph_still_while_its_caller_is_looked_at(mixed: Mixed) -> None:
    mixed("default")
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    part = Part(torch.compile(lambda h: h.relu() + 1, backend=backend, fullgraph=True))
    net = nn.Sequential(nn.Linear(4, 4), part)
    with torch.no_grad():
        assert torch.equal(net(torch.ones(3, 4)), net(torch.ones(3, 4)))
    assert len(graphs) == 1
    assert autoamp.status()["demotions"] == []
