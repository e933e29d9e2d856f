"""The audited step: what it counts is right, and it changes nothing."""

from __future__ import annotations

import json
import runpy
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from counting import counted_step
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

import autoamp
from autoamp.reporting.audit import WARM_UP

Mixed = Callable[..., Any]
SCRIPTS = Path(__file__).parent / "scripts"
SMALL = {
    "char_lstm": ("--length", "8", "--batch-size", "2"),
    "char_transformer": ("--batch-size", "1", "--accumulate", "2", "--context", "8"),
    "digits_cnn": ("--batch-size", "8"),
    "digits_dcgan": ("--batch-size", "8"),
    "digits_vae": ("--batch-size", "8"),
    "image_resnet": ("--batch", "2", "--width", "4", "--size", "8"),
}
SCHEMA = json.loads((Path(autoamp.__file__).parent / "reporting" / "schema.json").read_text())


class EnoughError(Exception):
    """Ends a script before its evaluation, which is no subject here."""


def play(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(WARM_UP + 3))

    def stop(*arguments: Any) -> None:
        if next(steps, None) is None:
            raise EnoughError

    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--log-every", "1", *SMALL[script]])
    hook = register_optimizer_step_post_hook(stop)
    try:
        with pytest.raises(EnoughError):
            runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
    finally:
        hook.remove()


@pytest.mark.filterwarnings("default")  # those of the scripts are not the subject here
@pytest.mark.parametrize("script", SMALL)
def test_the_numbers_of_each_script_equal_an_independent_count(
    mixed: Mixed, script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "run.json"
    mixed("default", "bfloat16", REPORT=str(path))
    play(script, monkeypatch)
    audited_output = capsys.readouterr().out
    autoamp.disable()
    report = json.loads(path.read_text())
    jsonschema.validate(report, SCHEMA)
    audit = report["audit"]
    assert (audit["step"], audit["missing"]) == (WARM_UP + (2 if "gan" in script else 1), "")

    mixed("default", "bfloat16")
    with counted_step(WARM_UP) as count:
        play(script, monkeypatch)
    # The audit changes no number: without it the losses are printed alike, to the last digit.
    assert capsys.readouterr().out == audited_output
    assert audit["ops"] == count.ops
    assert audit["casts"] == count.casts
    assert sum(audit["casts"].values()) == sum(row["casts"] for row in audit["modules"])
    by_class: Counter[tuple[str, str]] = Counter()
    backward: Counter[str] = Counter()
    for row in audit["modules"]:
        backward.update(row["backward"])
        for dtype, number in row["forward"].items():
            by_class[row["type"], dtype] += number
    assert by_class == count.by_class
    assert backward == count.ops["backward"]
    by_name: Counter[tuple[str, str]] = Counter()
    for row in audit["names"]:
        by_name[row["phase"], row["dtype"]] += row["count"]
    assert by_name == {(p, d): n for p, counts in count.ops.items() for d, n in counts.items()}


class Net(nn.Module):
    """By hand: a product in half, an activation, and a norm in float32 on it (CUDA's lists)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(torch.relu(self.first(x))))


def train(
    model: nn.Module, steps: int = WARM_UP + 1, factor: float = 1.0, lr: float = 0.01
) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.randn(3, 4)).square().mean() * factor).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def audit_of(session: Any) -> dict[str, Any]:
    return session.watch.audit.result


def rows_of(session: Any) -> dict[str, dict[str, Any]]:
    return {row["name"] or row["root"]: row for row in audit_of(session)["modules"]}


def test_a_model_counted_by_hand(mixed: Mixed, tmp_path: Path) -> None:
    session = mixed("default", REPORT=str(tmp_path / "run.json"))
    train(Net())
    rows = rows_of(session)
    assert list(rows) == ["Net", "first", "norm", "last", "outside of modules"]
    # Forward: an addmm; relu; the norm; an addmm.
    assert rows["first"]["forward"] == rows["last"]["forward"] == {"float16": 1}
    assert rows["Net"]["forward"] == {"float16": 1}
    assert (rows["norm"]["forward"], rows["norm"]["precision"]) == ({"float32": 1}, "float32")
    # Backward: two products and a sum for the last layer, no gradient of the input for the first;
    # the sums are bias gradients.
    assert rows["last"]["backward"] == {"float16": 3}
    assert rows["first"]["backward"] == {"float16": 2}
    assert rows["norm"]["backward"] == {"float32": 1}
    assert rows["Net"]["backward"] == {"float16": 1}
    # Each layer casts its input, weight and bias, and in the backward the gradients of the last
    # two and of an input that needs one; the norm casts its input, and its gradient back. Outside
    # of modules the result becomes float32, and its gradient half.
    assert [rows[name]["casts"] for name in rows] == [0, 5, 2, 6, 1]
    assert audit_of(session)["casts"] == {"float32 to float16": 8, "float16 to float32": 6}
    assert rows["first"]["parameters"] == 4 * 8 + 8


def test_head_room_and_underflow_are_those_of_a_reference(mixed: Mixed, tmp_path: Path) -> None:
    """One layer, a fixed scale of 1, and gradients around the least number of float16, 6e-8."""
    session = mixed("default", REPORT=str(tmp_path / "run.json"), LOSS_SCALE="1")
    model = nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch.manual_seed(0)
    x, wanted = torch.randn(5, 4), torch.randn(5, 3) * 1e-7
    wanted[0] = 0  # is zero in float32, too, and not lost
    for _ in range(WARM_UP + 1):
        optimizer.zero_grad()
        (model(x) * wanted).sum().backward()
        optimizer.step()
    weight = model.weight.detach()
    row = rows_of(session)["Linear"]
    largest = max(t.half().abs().max().item() for t in (x, weight, x.half() @ weight.half().T))
    assert row["largest"] == pytest.approx(largest, rel=1e-3)
    assert row["head_room"] == pytest.approx(65504 / largest, rel=1e-3)
    # What becomes zero: of the weight's gradient, made of the half gradient of the result.
    half = wanted.half()
    exact = half.float().T @ x.half().float()
    lost = ((exact.half() == 0) & (exact != 0)).sum().item()
    of = (exact != 0).sum().item()
    # The gradient of the result was cast outside of the module.
    outside = rows_of(session)["outside of modules"]
    gone = ((half == 0) & (wanted != 0)).sum().item()
    assert outside["underflow"] == pytest.approx(gone / 12)
    assert gone > 0
    assert row["underflow"] == pytest.approx(lost / of)
    assert row["largest_gradient"] == pytest.approx(exact.half().abs().max().item(), rel=1e-2)


@pytest.mark.parametrize(("policy", "dtype"), [("default", "float16"), ("torch", "bfloat16")])
def test_no_bit_and_no_random_number_changes(
    mixed: Mixed, tmp_path: Path, policy: str, dtype: str
) -> None:
    def run(**variables: str) -> tuple[list[torch.Tensor], torch.Tensor]:
        mixed(policy, dtype, **variables)
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)  # with dropout
        model = nn.Sequential(nn.Linear(4, 4), layer, nn.BatchNorm1d(4), nn.Linear(4, 2))
        return train(model, WARM_UP + 3), torch.rand(2)

    plain, random = run()
    audited, random_too = run(REPORT=str(tmp_path / "run.json"))
    assert audit_of(autoamp.activation.session())["step"] == WARM_UP + 1
    assert all(map(torch.equal, plain, audited))
    assert torch.equal(random, random_too)


def test_nothing_looks_before_or_after_the_step(mixed: Mixed, tmp_path: Path) -> None:
    session = mixed("default", REPORT=str(tmp_path / "run.json"))
    seen: list[int] = []

    class Look(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch._C._len_torch_dispatch_stack())
            return super().forward(x)

    train(Look(), WARM_UP + 4)
    inspection = [1]  # the first call is inspected
    assert seen == inspection + [0] * (WARM_UP - 1) + [1] + [0] * 3
    assert session.audit is None
    assert torch._C._len_torch_dispatch_stack() == 0


def test_no_report_no_audit(mixed: Mixed) -> None:
    session = mixed("torch")
    train(Net(), WARM_UP + 2)
    assert (session.audit, session.watch) == (None, None)
    assert autoamp.status()["audit"]["missing"] == "no report was asked for"


def test_a_step_with_two_optimizers_and_accumulation_is_one_step(
    mixed: Mixed, tmp_path: Path
) -> None:
    session = mixed("torch", "bfloat16", REPORT=str(tmp_path / "run.json"))
    first, second = nn.Linear(4, 4), nn.Linear(4, 2)
    one = torch.optim.SGD(first.parameters(), lr=0.1)
    two = torch.optim.SGD(second.parameters(), lr=0.1)
    for _ in range(WARM_UP + 1):
        for _ in range(3):
            first(torch.ones(2, 4)).sum().backward()
        one.step()
        for _ in range(2):
            second(torch.ones(2, 4)).sum().backward()
        two.step()
    rows = audit_of(session)["modules"]
    told = [(row["root"], row["forward"]["bfloat16"]) for row in rows if row["forward"]]
    assert told == [("Linear", 2), ("Linear 2", 3)]  # from a step of the one to its next


def test_evaluations_in_between_are_not_counted(mixed: Mixed, tmp_path: Path) -> None:
    session = mixed("torch", "bfloat16", REPORT=str(tmp_path / "run.json"))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(WARM_UP + 1):
        with torch.no_grad():
            model(torch.ones(2, 4))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert sum(audit_of(session)["ops"]["forward"].values()) == 4


def test_what_is_between_two_calls_of_a_model_belongs_to_no_module(
    mixed: Mixed, tmp_path: Path
) -> None:
    session = mixed("torch", "bfloat16", REPORT=str(tmp_path / "run.json"))
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(WARM_UP + 1):
        first = model(torch.ones(2, 4)).square().sum()
        second = model(torch.ones(2, 4)).square().sum()
        (first + second).backward()
        optimizer.step()
    rows = rows_of(session)
    # Twice a product and a sum; the gradients of both calls are added up for weight and bias.
    assert rows["Linear"]["backward"] == {"bfloat16": 4, "float32": 2}
    assert rows["outside of modules"]["backward"]["float32"] >= 4  # two squares are two ops each


def test_a_checkpointed_module_keeps_its_bits_and_its_recomputation_is_its_own(
    mixed: Mixed, tmp_path: Path
) -> None:
    class Checkpointed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(self.first, nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
            return self.last(self.norm(inner))

    def run(**variables: str) -> list[torch.Tensor]:
        mixed("torch", "bfloat16", **variables)
        torch.manual_seed(0)
        return train(Checkpointed())

    plain = run()
    assert all(map(torch.equal, plain, run(REPORT=str(tmp_path / "run.json"))))
    row = rows_of(autoamp.activation.session())["block.0"]
    assert row["forward"] == {"bfloat16": 1}
    assert row["backward"] == {"bfloat16": 3}  # the product again, one for the weight, a sum
    assert rows_of(autoamp.activation.session())["block.1"]["backward"] == {"bfloat16": 2}


def test_modes_of_the_script_see_what_they_saw_without_the_audit(
    mixed: Mixed, tmp_path: Path
) -> None:
    class Ops(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    def run(**variables: str) -> list[str]:
        mixed("torch", "bfloat16", **variables)
        model = Net()
        with Ops() as outer:  # around everything
            train(model, 3 * (WARM_UP + 1))
        if variables:
            missing = audit_of(autoamp.activation.session())["missing"]
            assert missing == "a dispatch mode of the script was on"
        inner = Ops()

        class Inside(Net):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with inner:
                    return super().forward(x)

        train(Inside(), WARM_UP + 2)
        return outer.seen + inner.seen

    assert run(REPORT=str(tmp_path / "run.json")) == run()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it
@pytest.mark.parametrize("compiles", ["model", "module", "function"])
def test_compiled_code_is_not_looked_into_and_stays_as_compiled(
    mixed: Mixed, tmp_path: Path, compiles: str
) -> None:
    session = mixed("torch", "bfloat16", REPORT=str(tmp_path / "run.json"))
    torch._dynamo.reset()
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    class Calls(Net):
        def __init__(self) -> None:
            super().__init__()
            self.act = torch.compile(lambda h: h.relu() + 1, backend=backend, fullgraph=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.norm(self.act(self.first(x))))

    model: Any = Calls() if compiles == "function" else Net()
    if compiles == "model":
        model = torch.compile(model, backend=backend, fullgraph=True)
    elif compiles == "module":
        model.first.compile(backend=backend, fullgraph=True)
    train(model, 3 * WARM_UP + 2)
    assert len(graphs) == 1
    audit = audit_of(session)
    if compiles == "function":
        assert audit["ops"]["forward"]["bfloat16"] >= 2  # what is around it
    else:
        assert (audit["step"], audit["missing"]) == (
            None,
            "compiled and scripted modules are not looked into",
        )


def test_what_the_audit_cannot_do_is_no_error_of_the_script(
    mixed: Mixed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autoamp.reporting import audit

    def fails(*args: Any) -> Any:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(audit.Look, "_measure", fails)
    session = mixed("torch", REPORT=str(tmp_path / "run.json"))
    train(Net())
    assert audit_of(session)["missing"] == "the audit failed: ZeroDivisionError: of ours"


def test_short_runs_say_why_there_is_no_audit(mixed: Mixed, tmp_path: Path) -> None:
    session = mixed("torch", REPORT=str(tmp_path / "run.json"))
    train(Net(), WARM_UP)
    found = audit_of(session)
    assert (found["step"], found["missing"]) == (
        None,
        "a step is audited after 3 steps; there were fewer",
    )


def test_of_a_very_large_model_deep_modules_are_added_to_those_above(
    mixed: Mixed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autoamp.reporting import audit

    monkeypatch.setattr(audit, "MAX_MODULES", 12)
    session = mixed("torch", "bfloat16", REPORT=str(tmp_path / "run.json"))
    blocks = [nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)]) for _ in range(8)]
    train(nn.Sequential(nn.Linear(4, 2), *blocks))
    modules = audit_of(session)["modules"]
    assert len(modules) == 11  # the root, its nine parts, and what is outside
    assert [row["forward"]["bfloat16"] for row in modules[2:10]] == [4] * 8
    assert [row["casts"] for row in modules[2:10]] == [16] * 8  # weights, biases, their gradients
