"""Models that lower precision would make slower stay float32, unless the policy says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

import autoamp
from autoamp import devices, report
from autoamp.standing import COSTS, Account


@pytest.fixture
def weighing(mixed: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A machine whose CPU has BF16 arithmetic, one core of which is used."""
    monkeypatch.setattr(devices, "cpu_has_bfloat16_arithmetic", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    return lambda dtype=None, **said: mixed("default", dtype, **said)


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
    assert lines[0].startswith(
        "autoamp: Sequential stays float32: lower precision would add about "
    )
    assert lines[0].endswith("; force it with AUTO_MIXED_PRECISION_DTYPE=bfloat16")
    (told,) = report.describe(session)["stood_down"]
    assert told["type"] == "Sequential"
    assert told["saved_us"] < told["spent_us"]
    assert report.summary(report.describe(session)).endswith(", 1 model left in float32")
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
    flops, numbers = 2 * 256 * 512 * 512, 256 * 512 + 512 * 512 + 256 * 512
    arithmetic = flops / 2 * (1 / costs.float32 - 1 / costs.half)
    assert account.saved == pytest.approx(arithmetic + 2 * numbers / costs.memory)
    casts = 3 * costs.cast + 6 * numbers / costs.memory
    assert account.spent == pytest.approx(casts + costs.product)
    assert account.is_complete


def test_a_call_that_is_trained_counts_its_backward(weighing):
    weighing("bfloat16", LOG="quiet")
    layer, x = nn.Linear(64, 64, bias=False), torch.randn(8, 64)
    totals = []
    for is_training in (False, True):
        account = Account(COSTS["cpu"], 1, is_training)
        with torch.no_grad(), account, torch.autocast("cpu"):
            layer(x).float()
        totals.append((account.saved, account.spent))
    (saved, spent), (saved_trained, spent_trained) = totals
    assert saved_trained == pytest.approx(3 * saved)
    product = COSTS["cpu"].product
    assert spent_trained == pytest.approx(2 * (spent - product) + 3 * product)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_kept_between_calls_is_not_counted_and_ops_are_seen_in_every_mode(weighing, mode):
    """Without gradients the cast of a weight is made once: that of 4096 numbers by 4096 is most of
    what the first call adds.
    """
    session = weighing(LOG="quiet")
    net = Seen(4096)
    for _ in range(2):
        with mode():
            net(torch.randn(1, 4096))
    assert net.dtypes == [torch.bfloat16] * 2
    assert session.stand_down.told == []


RECURRENT = {"mkldnn_rnn_layer": nn.LSTM, "linear": nn.GRU}


@pytest.mark.parametrize("make", RECURRENT.values(), ids=RECURRENT)
def test_recurrent_layers_stand_down_where_they_are_small(weighing, make):
    small, large = make(8, 8), make(512, 512)
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            small(torch.randn(4, 2, 8))
    except RuntimeError as error:
        pytest.skip(f"this CPU has no such layer in bfloat16: {error}")
    session = weighing(LOG="quiet")
    with torch.no_grad():
        for _ in range(2):
            small(torch.randn(4, 2, 8))
            large(torch.randn(4, 64, 512))
    assert set(session.regions.standing) == {id(small)}


def test_torch_s_own_encoder_is_counted_though_it_is_one_op(weighing):
    session = weighing(LOG="quiet")
    make = lambda width: nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True).eval()  # noqa: E731
    small, large = make(16), make(256)
    with torch.no_grad():
        for _ in range(2):
            small(torch.randn(1, 2, 16))
            large(torch.randn(4, 64, 256))
    assert set(session.regions.standing) == {id(small)}


def test_a_call_with_twice_the_numbers_or_the_first_that_is_trained_is_decided_anew(
    weighing, capsys
):
    """A call with a tiny batch, to learn shapes or to act, decides nothing about training."""
    session = weighing()
    net = Seen(64)

    def call(*numbers_of_rows: int) -> list[torch.dtype]:
        net.dtypes.clear()
        for rows in numbers_of_rows:
            net(torch.randn(rows, 64))
        return net.dtypes

    half, full = torch.bfloat16, torch.float32
    with torch.no_grad():
        assert call(8, 8, 15, 1, 16, 16, 31) == [half, full, full, full, half, full, full]
    assert call(8, 16, 32, 1, 63) == [half, half, half, full, full]
    (told,) = report.describe(session)["stood_down"]
    assert told["type"] == "Seen"
    assert call(4096, 1, 4096) == [half, half, half]
    assert report.describe(session)["stood_down"] == []
    lines = [line for line in capsys.readouterr().err.splitlines() if "Seen" in line]
    assert len(lines) == 2
    assert lines[1] == "autoamp: Seen is in lower precision from here on: its calls have grown"


def test_a_model_whose_arithmetic_is_in_another_thread_does_not_stand_down(weighing):
    class Elsewhere(Seen):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad(), ThreadPoolExecutor(1) as pool:
                found = pool.submit(F.linear, x, self.layer.weight).result()
            return found.bfloat16().float() + 1

    session = weighing(LOG="quiet")
    net = Elsewhere(16)
    for _ in range(2):
        net(torch.randn(1, 16))
    assert session.stand_down.told == []


def test_a_call_that_fails_decides_nothing(weighing):
    session = weighing(LOG="quiet")
    net = Seen(16)
    with pytest.raises(RuntimeError):
        net(torch.randn(1, 3))
    assert not session.stand_down.decided
    assert not session.regions.standing


def test_a_dtype_that_is_named_is_used_whatever_it_costs(weighing):
    session = weighing("bfloat16")
    net = Seen(16)
    for _ in range(3):
        net(torch.randn(1, 16))
    assert net.dtypes == [torch.bfloat16] * 3
    assert session.stand_down is None


@pytest.mark.parametrize("policy", ["torch", "bf16", "fp16", "apex-o1", "tensorflow"])
def test_policies_that_name_a_dtype_or_imitate_others_do_not_stand_down(mixed, policy):
    assert mixed(policy, None, LOG="quiet").stand_down is None


@pytest.mark.parametrize("policy", ["default", "safe", "fast"])
def test_our_own_policies_stand_down(mixed, policy):
    assert mixed(policy, None, LOG="quiet").stand_down is not None


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


def test_what_is_compiled_or_does_arithmetic_that_nobody_tells_does_not_stand_down(weighing):
    @torch.library.custom_op("standing::opaque", mutates_args=())
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    class Opaque(Seen):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return opaque(super().forward(x))

    session = weighing(LOG="quiet")
    x, net = torch.randn(2, 16), Opaque(16)
    compiled = torch.compile(Seen(16), backend="eager")
    with torch.no_grad():
        for _ in range(2):
            net(x)
            compiled(x)
    assert session.stand_down.told == []
    assert net.dtypes == [torch.bfloat16] * 2


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
    session = mixed("torch", None, LOG="quiet")
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
    assert session.regions.standing[id(net)].device_type == ""
    assert session.regions.standing[id(net[0])].device_type == "cpu"


class Checkpointed(nn.Module):
    """Its second part runs again in the backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.reentrant = Seen(16), Seen(16), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(
            self.second, self.first(x), use_reentrant=self.reentrant
        )


NOTED = {True: 2, False: 1}
"""How often a step is noted: what is not reentrant stops as soon as it has what was saved."""


def gradients(net: nn.Module, call: Callable[..., torch.Tensor], steps: int = 3) -> list[Any]:
    found = []
    for _ in range(steps):
        net.zero_grad()
        call(torch.ones(2, 16)).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in net.parameters()])
    return found


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_model_that_stands_down_computes_again_is_float32_too(weighing, reentrant):
    plain = Checkpointed(reentrant)
    (expected,) = gradients(plain, plain, steps=1)
    weighing(LOG="quiet")
    net = Checkpointed(reentrant)
    for found in gradients(net, net)[1:]:
        assert all(map(torch.equal, found, expected))
    half, full = torch.bfloat16, torch.float32
    each = (half, full, full)
    assert net.second.dtypes == [dtype for dtype in each for _ in range(NOTED[reentrant])]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_a_script_checkpoints_is_in_one_precision_in_both_of_its_runs(
    weighing, reentrant
):
    """Whether it stands down already or not."""
    session = weighing(LOG="quiet")
    net, known = Seen(16), Seen(16)
    for _ in range(2):
        known(torch.ones(2, 16))
    assert session.regions.standing
    known.dtypes.clear()
    for model in (net, known):
        gradients(
            model,
            lambda x, m=model: torch.utils.checkpoint.checkpoint(
                m, x.requires_grad_(), use_reentrant=reentrant
            ),
        )
        assert model.dtypes == [torch.bfloat16] * 3 * NOTED[reentrant]
    assert id(net) not in session.regions.standing
