"""Optimizers of torch that take their fused form under a policy: the same numbers, nothing left."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp import performance
from autoamp.policy import PerformanceRule

FUSED = "extends: torch\nperformance: {optimizer: fused}\n"
MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}


@pytest.fixture
def fused(mixed: Any, tmp_path: Path) -> Callable[..., Any]:
    (tmp_path / "fused.yaml").write_text(FUSED)
    return lambda dtype="float16", **variables: mixed(
        str(tmp_path / "fused.yaml"), dtype, LOG="quiet", **variables
    )


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What each call of torch's functional optimizers was told of the form to take."""
    seen: list[bool] = []
    for name in ("sgd", "adam", "adagrad"):
        module = importlib.import_module(f"torch.optim.{name}")
        monkeypatch.setattr(module, name, _noting(getattr(module, name), seen))
    return seen


def _noting(function: Callable[..., Any], seen: list[bool]) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        seen.append(bool(kwargs.get("fused")))
        return function(*args, **kwargs)

    return noting


def train(make: Callable[[Any], torch.optim.Optimizer], steps: int = 6, bad: int = -1) -> Any:
    """Six steps, of which one may meet an infinite gradient."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = make(net.parameters())
    x = torch.randn(6, 4)
    for number in range(steps):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        (loss * float("inf") if number == bad else loss).backward()
        optimizer.step()
    return net, optimizer


def values(net: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


@pytest.mark.parametrize("bad", [-1, 0, 3], ids=["finite", "first overflows", "fourth overflows"])
@pytest.mark.parametrize("name", MAKE)
def test_a_fused_step_gives_what_the_plain_one_gives(mixed, fused, forms, name, bad):
    mixed("torch", "float16", LOG="quiet")
    plain, plain_optimizer = train(MAKE[name], bad=bad)
    assert not any(forms)
    forms.clear()
    fused()
    net, optimizer = train(MAKE[name], bad=bad)
    assert forms
    assert all(forms)
    assert torch.allclose(values(net), values(plain), rtol=1e-6, atol=1e-7)
    assert optimizer.param_groups[0]["fused"] is plain_optimizer.param_groups[0]["fused"] is None
    assert vars(optimizer).keys() == vars(plain_optimizer).keys()
    saved, plainly = optimizer.state_dict(), plain_optimizer.state_dict()
    assert saved["param_groups"] == plainly["param_groups"]
    for state, plain_state in zip(saved["state"].values(), plainly["state"].values(), strict=True):
        assert state.keys() == plain_state.keys()
        for key in state:
            assert torch.allclose(state[key], plain_state[key], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "asked",
    [{"fused": False}, {"foreach": False}, {"foreach": True}],
    ids=lambda asked: " ".join(map(str, *asked.items())),
)
def test_the_form_that_a_script_asks_for_is_kept(fused, forms, asked):
    fused("bfloat16")
    train(lambda parameters: torch.optim.SGD(parameters, 0.1, **asked))
    assert not any(forms)


def test_sparse_gradients_and_learning_rates_in_tensors_are_left_plain(fused, forms):
    fused("bfloat16")
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), 0.1)
    embedding(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    train(lambda parameters: torch.optim.Adam(parameters, torch.tensor(0.01)))
    assert not any(forms)


def test_a_step_of_the_script_is_called_as_it_is(fused):
    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            assert self.param_groups[0]["fused"] is None

    fused("bfloat16")
    train(Mine)


def test_an_error_in_a_step_leaves_the_groups_as_they_were(fused):
    fused("bfloat16")
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], 0.1)
    optimizer.register_step_post_hook(lambda *_: 1 / 0)
    parameter.grad = torch.ones(3)
    before = copy.deepcopy(optimizer.param_groups[0])
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    del before["params"]
    assert {k: v for k, v in optimizer.param_groups[0].items() if k != "params"} == before
    assert "_step_supports_amp_scaling" not in vars(optimizer)


# --- switches ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def as_torch_has_them(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trainers of other tests may have thrown switches; torch's own test code forbids to."""
    flags = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision("highest")


def test_switches_are_thrown_and_put_back():
    undo = performance.throw(PerformanceRule(float32_matmul="tf32", cudnn_benchmark="on"))
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cudnn.benchmark
    for put_back in undo:
        put_back()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.benchmark


def test_what_the_script_says_later_stays():
    undo = performance.throw(PerformanceRule(float32_matmul="tf32"))
    torch.set_float32_matmul_precision("medium")
    for put_back in undo:
        put_back()
    assert torch.get_float32_matmul_precision() == "medium"


def test_without_a_word_no_switch_is_thrown():
    assert performance.throw(PerformanceRule()) == []


def test_switches_are_for_cuda(mixed, tmp_path):
    (tmp_path / "p.yaml").write_text("performance: {float32_matmul: tf32, cudnn_benchmark: on}\n")
    session = mixed(str(tmp_path / "p.yaml"), "bfloat16", LOG="quiet")
    nn.Linear(2, 2)(torch.ones(1, 2))
    assert session.undo == []
    assert torch.get_float32_matmul_precision() == "highest"
    autoamp.disable()
