"""Models that lower precision would make slower stay float32, where the policy says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp import devices, report
from autoamp.standing import COSTS, Account


@pytest.fixture
def weighing(mixed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A machine whose CPU has BF16 arithmetic, and a policy under which models may stand down."""
    monkeypatch.setattr(devices, "cpu_has_bfloat16_arithmetic", lambda: True)
    (tmp_path / "auto.yaml").write_text("extends: default\nperformance: {stand_down: auto}\n")
    return lambda dtype=None, **said: mixed(str(tmp_path / "auto.yaml"), dtype, **said)


class Seen(nn.Module):
    """A layer that notes in which dtype it gave its results."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.layer(x)
        self.dtypes.append(result.dtype)
        return result


def test_a_tiny_model_stays_float32_from_its_second_call_on_and_a_line_says_why(weighing, capsys):
    session = weighing()
    net = nn.Sequential(Seen(16), Seen(16))
    x = torch.randn(1, 16)
    for _ in range(4):
        net(x)
    assert net[0].dtypes == net[1].dtypes == [torch.bfloat16, *[torch.float32] * 3]
    assert session.counts.regions == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "stays float32" in line]
    assert len(lines) == 1
    assert lines[0].startswith("autoamp: Sequential stays float32: its casts take about ")
    (told,) = report.describe(session)["stood_down"]
    assert told["type"] == "Sequential"
    assert told["saved_us"] < told["spent_us"]
    with torch.no_grad():
        result = net(x)
    autoamp.disable()
    assert torch.equal(result, net(x))


def test_a_model_that_multiplies_large_matrices_is_in_lower_precision_all_along(weighing, capsys):
    session = weighing()
    net = Seen(512)
    for _ in range(3):
        net(torch.randn(256, 512))
    assert net.dtypes == [torch.bfloat16] * 3
    assert session.counts.regions == 3
    assert "stays float32" not in capsys.readouterr().err
    assert report.describe(session)["stood_down"] == []


def test_the_account_of_a_call_is_what_the_table_says(weighing):
    """One product of (256, 512) by (512, 512), casts of its operands and of the result."""
    costs = COSTS["cpu"]
    weighing("bfloat16", LOG="quiet")
    layer, x = nn.Linear(512, 512, bias=False), torch.randn(256, 512)
    with torch.no_grad(), Account(costs, 2, False) as account, torch.autocast("cpu"):
        layer(x).float()
    flops = 2 * 256 * 512 * 512
    assert account.saved == pytest.approx(flops / 2 * (1 / costs.float32 - 1 / costs.half))
    moved = 6 * (256 * 512 + 512 * 512 + 256 * 512)
    assert account.spent == pytest.approx(3 * costs.op + moved / costs.memory)
    assert account.is_complete


def test_a_dtype_that_is_named_is_used_whatever_it_costs(weighing):
    session = weighing("bfloat16")
    net = Seen(16)
    for _ in range(3):
        net(torch.randn(1, 16))
    assert net.dtypes == [torch.bfloat16] * 3
    assert session.stand_down is None


@pytest.mark.parametrize("policy", ["torch", "default", "safe", "bf16"])
def test_only_a_policy_that_says_so_stands_down(mixed, policy):
    assert mixed(policy, None, LOG="quiet").stand_down is None


def test_the_script_s_own_context_wins_in_a_model_that_stands_down(weighing):
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = Seen(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                return self.seen(x)
            with torch.autocast("cpu", torch.bfloat16):
                return self.seen(x)

    weighing()
    net = Own()
    x = torch.randn(1, 16)
    net(x)
    net(x)
    net.eval()
    net(x)
    assert net.seen.dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_what_is_compiled_or_not_fully_counted_does_not_stand_down(weighing):
    session = weighing(LOG="quiet")
    x = torch.randn(1, 2, 16)
    lstm, attention = nn.LSTM(16, 16), nn.TransformerEncoderLayer(16, 2, dropout=0.0)
    for _ in range(2):
        lstm(x)
        attention(x)
    assert session.stand_down.seen[id(attention)] is False
    compiled = torch.compile(Seen(16), backend="eager")
    compiled(x)
    assert session.stand_down.told == []


def test_gradients_and_steps_are_float32_ones_after_the_first_call(weighing):
    def train() -> list[float]:
        torch.manual_seed(0)
        net = nn.Linear(16, 4)
        net(torch.zeros(1, 16))  # where it is decided
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        losses = []
        for _ in range(4):
            loss = net(torch.ones(1, 16)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    exact = train()
    weighing(LOG="quiet")
    assert train() == exact


@pytest.mark.parametrize("is_declined", [True, False])
def test_where_the_device_gains_nothing_only_the_outermost_call_is_asked(
    mixed, monkeypatch, is_declined
):
    monkeypatch.setattr(devices, "cpu_has_bfloat16_arithmetic", lambda: not is_declined)
    session = mixed("default", None, LOG="quiet")
    asked = []
    ask = session.regions.precision_for
    monkeypatch.setattr(
        type(session.regions), "precision_for", lambda self, p: asked.append(p) or ask(p)
    )
    net = nn.Sequential(Seen(16), Seen(16))
    for _ in range(3):
        net(torch.randn(2, 16))
    asked.clear()
    net(torch.randn(2, 16))
    assert len(asked) == (0 if is_declined else 1)


def test_a_model_whose_parts_are_elsewhere_is_asked_part_by_part(mixed, monkeypatch):
    monkeypatch.setattr(devices, "cpu_has_bfloat16_arithmetic", lambda: False)
    session = mixed("default", None, LOG="quiet")
    net = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    net[1].weight = nn.Parameter(torch.empty(2, device="meta"))
    net(torch.ones(1, 2))
    assert session.regions.standing[id(net)] == ""
    assert session.regions.standing[id(net[0])] == "cpu"
