"""What is put into torch comes out again by identity; while in, it looks like the original."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import os
import pickle
import sys
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import wrapt
from torch import nn

import autoamp
from autoamp import activation, bootstrap, patches
from autoamp.errors import PatchError
from autoamp.patches import FUNCTIONAL, PATCHES, scales
from autoamp.patching import Ledger, Patch
from autoamp.policy import Policy

ABSENT = "absent"
OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.LBFGS)


def owner_of(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    return wrapt.resolve_path(module, path)[:2]


def snapshot() -> dict[str, Any]:
    """What stands at each target, and in each optimizer class, right now."""
    found = {}
    for patch in PATCHES:
        try:
            owner, name = owner_of(patch.target)
        except AttributeError:
            found[patch.target] = ABSENT
        else:
            found[patch.target] = vars(owner).get(name, ABSENT)
    for name in ("__init__", "step", "zero_grad", "add_param_group"):
        found[f"Optimizer.{name}"] = vars(torch.optim.Optimizer).get(name, ABSENT)
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before if before[name] is not after[name]]


def is_ours(function: Any) -> bool:
    function = getattr(function, "fget", function)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and os.path.dirname(code.co_filename) == os.path.dirname(
        autoamp.__file__
    )


@pytest.fixture(autouse=True)
def _settled():
    """The look at the first optimizer has been taken: it would change `Optimizer.__init__`."""
    autoamp.disable()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def own_optimizer() -> type[torch.optim.Optimizer]:
    """A fresh class, which torch has not wrapped yet."""

    class Mine(torch.optim.Optimizer):
        def __init__(self, parameters, lr):
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            """Mine."""
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad, alpha=group["lr"])

    return Mine


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    torch.manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4)).square().mean()
        loss.backward()
        optimizer.step(*([lambda loss=loss: loss] if "LBFGS" in type(optimizer).__name__ else []))


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


# --- out again -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("policy", ["torch", "default"])
def test_every_target_is_the_original_again_after_disable(mixed, dtype, policy):
    before = snapshot()
    session = mixed(policy, dtype)
    during = snapshot()
    applied = [e.target for e in session.ledger.entries if e.outcome == "applied"]
    assert [name for name in differences(before, during) if ":" in name] == applied
    assert all(is_ours(during[target]) for target in applied)
    train(small(), torch.optim.SGD(small().parameters(), lr=0.1))
    autoamp.disable()
    assert differences(before, snapshot()) == []
    assert not any(is_ours(found) for found in snapshot().values())


def test_a_second_activation_finds_and_leaves_the_same_originals(mixed):
    before = snapshot()
    for dtype in ("float16", "bfloat16", "float16"):
        mixed(dtype=dtype)
        model = small()
        train(model, torch.optim.Adam(model.parameters()))
    autoamp.disable()
    assert differences(before, snapshot()) == []


def test_optimizer_classes_used_before_have_their_step_back(mixed):
    for cls in OPTIMIZERS:
        train(model := small(), cls(model.parameters(), lr=0.1))
    before = {cls: vars(cls)["step"] for cls in OPTIMIZERS}
    assert all(step.hooked for step in before.values())
    mixed()
    assert all(is_ours(vars(cls)["step"]) for cls in OPTIMIZERS)
    for cls in OPTIMIZERS:
        train(model := small(), cls(model.parameters(), lr=0.1))
    autoamp.disable()
    assert {cls: vars(cls)["step"] for cls in OPTIMIZERS} == before


def test_optimizer_classes_first_used_meanwhile_are_as_torch_would_have_them(mixed):
    mine, reference = own_optimizer(), own_optimizer()
    plain = vars(mine)["step"]
    mixed()
    model = small()
    optimizer = mine(model.parameters(), lr=0.1)
    train(model, optimizer)
    assert is_ours(vars(mine)["step"])
    autoamp.disable()
    reference(small().parameters(), lr=0.1)
    step, theirs = vars(mine)["step"], vars(reference)["step"]
    assert not is_ours(step)
    assert step.__code__ is theirs.__code__
    assert step.__wrapped__ is plain
    assert step.hooked is True
    assert vars(step).keys() == vars(theirs).keys()


def test_step_hooks_run_once_for_optimizer_classes_first_used_meanwhile(mixed):
    mine = own_optimizer()
    mixed()
    mine(small().parameters(), lr=0.1)
    autoamp.disable()
    model, calls = small(), []
    optimizer = mine(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *args: calls.append(args))
    train(model, optimizer, steps=1)
    assert len(calls) == 1


def test_an_optimizer_is_gated_again_when_autoamp_comes_back(mixed):
    mine = own_optimizer()
    model = small()
    mixed()
    optimizer = mine(model.parameters(), lr=0.1)
    autoamp.disable()
    session = mixed()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    (model(torch.randn(3, 4)).sum() * float("inf")).backward()
    optimizer.step()
    session.loss_scale.read_back()
    assert (session.loss_scale.taken, session.loss_scale.skipped) == (0, 1)
    assert all(map(torch.equal, before, model.parameters()))


def test_an_optimizer_from_an_active_time_works_on_afterwards(mixed):
    reference, model = small(), small()
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)  # keeps a bound `step`
    assert scheduler.get_last_lr() == [0.1]
    autoamp.disable()
    train(model, optimizer)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_kernels_are_taken_out_of_the_dispatcher(mixed):
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    session = mixed("default", "float16")  # CUDA's lists on the CPU, whose own has no softmax
    assert not has("aten::softmax.int", "AutocastCPU")
    session.decide(torch.device("cpu"))
    assert has("aten::softmax.int", "AutocastCPU")
    autoamp.disable()
    assert not has("aten::softmax.int", "AutocastCPU")


def test_nothing_of_a_session_lives_on_after_disable(mixed):
    def ours() -> list[Any]:
        return [f for f in sys.meta_path if type(f).__module__ == bootstrap.__name__]

    session = mixed()
    model = small()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert [finder.name for finder in ours()] in ([], ["torch._dynamo.utils"])
    gone = weakref.ref(session.regions)
    del session
    autoamp.disable()
    assert ours() == []
    assert activation.session() is None
    del model
    gc.collect()
    assert gone() is None


# --- all or nothing ------------------------------------------------------------------------------


def with_bogus_row(optional: bool = False) -> tuple[Patch, ...]:
    def never(original: Any, session: Any) -> Any:
        raise AssertionError("there is no original")

    row = Patch("torch.nn.functional:no_such_op", never, "to fail", optional=optional)
    middle = len(PATCHES) // 2
    return (*PATCHES[:middle], row, *PATCHES[middle:])


@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_target_that_is_missing_restores_all_and_is_named(monkeypatch, capsys, strict):
    before = {**snapshot(), **{cls: vars(cls)["step"] for cls in (torch.optim.SGD,)}}
    monkeypatch.setattr(patches, "PATCHES", with_bogus_row())
    monkeypatch.setenv("AUTO_MIXED_PRECISION_STRICT", strict)
    expected = (
        f"torch.nn.functional:no_such_op does not exist in torch {torch.__version__}; "
        "use a torch version that autoamp supports, or report this."
    )
    if strict == "1":
        with pytest.raises(PatchError) as caught:
            autoamp.enable("torch")
        assert str(caught.value) == expected
    else:
        autoamp.enable("torch")
        assert capsys.readouterr().err == (
            f"autoamp: off in this process: {expected[:-1]}; the program continues in float32\n"
        )
    after = {**snapshot(), **{cls: vars(cls)["step"] for cls in (torch.optim.SGD,)}}
    assert [name for name in before if before[name] is not after[name]] == []
    status = autoamp.status()
    assert (status["phase"], status["active"], status["patches"]) == ("failed", False, [])
    assert status["reason"] == expected
    assert activation.session() is None


def test_an_optional_target_that_is_missing_is_listed_as_absent(mixed, monkeypatch):
    monkeypatch.setattr(patches, "PATCHES", with_bogus_row(optional=True))
    mixed()
    rows = {row["target"]: row["outcome"] for row in autoamp.status()["patches"]}
    assert rows.pop("torch.nn.functional:no_such_op") == "absent"
    assert "absent" not in [rows[patch.target] for patch in PATCHES if not patch.optional]


def test_a_factory_that_fails_restores_what_was_applied_before():
    class Owner:
        def first(self):
            return 1

    owner = Owner.first
    ledger = Ledger()
    sys.modules["owner_for_test"] = type(sys)("owner_for_test")
    sys.modules["owner_for_test"].Owner = Owner
    rows = [
        Patch("owner_for_test:Owner.first", lambda original, session: lambda self: 2, "fine"),
        Patch("owner_for_test:Owner.first", lambda original, session: 1 / 0, "broken"),
    ]
    try:
        with pytest.raises(ZeroDivisionError):
            ledger.apply(rows, Policy(), None)
    finally:
        del sys.modules["owner_for_test"]
    assert vars(Owner)["first"] is owner
    assert ledger.replaced_since() == []


def test_presence_and_kind_come_back_with_the_value():
    class Base:
        def inherited(self):
            return "base"

        @staticmethod
        def still():
            return "still"

        @classmethod
        def of_class(cls):
            return cls.__name__

    class Child(Base):
        @staticmethod
        def still():
            return "child"

    before = dict(vars(Child))
    ledger = Ledger()
    ledger.replace(Child, "inherited", lambda self: "ours")
    ledger.replace(Child, "still", lambda: "ours")
    ledger.replace(Child, "of_class", lambda cls: f"our {cls.__name__}")
    ledger.replace(Base, "of_class", lambda cls: f"the {cls.__name__}", "a:target")
    assert (Child().inherited(), Child().still(), Child.still()) == ("ours", "ours", "ours")
    assert (Child.of_class(), Child().of_class(), Base.of_class()) == (
        "our Child",
        "our Child",
        "the Base",
    )
    assert ledger.replaced_since() == []
    ledger.lift("a:target")
    assert Base.of_class() == "Base"
    ledger.lower("a:target")
    assert Base.of_class() == "the Base"
    assert ledger.restore() == []
    assert Base.of_class() == "Base"
    assert "inherited" not in vars(Child)
    assert "of_class" not in vars(Child)
    assert isinstance(vars(Base)["of_class"], classmethod)
    assert dict(vars(Child)) == before
    assert isinstance(vars(Child)["still"], staticmethod)


# --- what it says --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_status_lists_every_row_with_outcome_and_why(mixed, dtype):
    session = mixed(dtype=dtype)
    listed = autoamp.status()["patches"]
    assert [(row["target"], row["why"]) for row in listed] == [(p.target, p.why) for p in PATCHES]
    for row, patch in zip(listed, PATCHES, strict=True):
        needed = patch.when(session.policy)
        allowed = {"applied", "absent"} if needed and patch.optional else {"applied"}
        assert row["outcome"] in (allowed if needed else {"not needed"}), row
        assert len(row["why"].split()) >= 4
    rows = zip(listed, PATCHES, strict=True)
    of_scaling = {row["outcome"] for row, patch in rows if patch.when is scales}
    assert ("not needed" in of_scaling) is (dtype == "bfloat16")


def test_no_target_is_listed_twice():
    targets = [patch.target for patch in PATCHES]
    assert len(set(targets)) == len(targets)


def test_what_somebody_puts_on_top_is_reported_and_survives(mixed, monkeypatch, capsys):
    original = F.linear
    monkeypatch.setattr(F, "linear", original)  # so that torch's own is put back in the end
    mixed()
    ours = F.linear

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    monkeypatch.setattr(F, "linear", theirs)
    assert autoamp.status()["replaced_since"] == ["torch.nn.functional:linear"]
    x = torch.ones(2, 3)
    assert F.linear(x, x).dtype is torch.float32
    capsys.readouterr()
    autoamp.disable()
    assert F.linear is theirs
    assert capsys.readouterr().err.endswith(
        "autoamp: torch.nn.functional:linear has been replaced by someone else and is left; "
        "ours only passes on\n"
    )
    assert torch.equal(F.linear(x, x), original(x, x))
    assert not any(is_ours(found) for name, found in snapshot().items() if "linear" not in name)


def test_nothing_is_reported_where_nobody_replaced_anything(mixed):
    mixed()
    model = small()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert autoamp.status()["replaced_since"] == []


# --- dressed as the original ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["torch", "default"])
def test_a_replacement_has_name_place_doc_and_signature_of_the_original(mixed, policy):
    before = snapshot()
    session = mixed(policy)
    for entry in session.ledger.entries:
        if entry.outcome != "applied":
            continue
        owner, name = owner_of(entry.target)
        original, ours = before[entry.target], getattr(owner, name)
        if original is ABSENT:  # it lives on a base class
            original = getattr(owner.__mro__[1], name)
        original = getattr(original, "__func__", original)
        ours = getattr(ours, "__func__", ours)
        if isinstance(ours, property):  # in the place of one that is written in C
            assert ours.__doc__ == original.__doc__
            continue
        assert inspect.isfunction(ours), entry.target
        assert ours.__wrapped__ is original
        assert ours.__doc__ == original.__doc__
        assert ours.__qualname__.rpartition(".")[2] == ours.__name__
        if inspect.isclass(owner):
            assert ours.__name__ == original.__name__
            assert ours.__qualname__ == original.__qualname__
            assert ours.__module__ == owner.__module__
        else:
            assert (ours.__module__, ours.__qualname__) == (owner.__name__, name)
        try:
            signature = inspect.signature(original)
        except ValueError:
            continue  # torch's builtins have none
        assert inspect.signature(ours) == signature


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_a_function_pickles_and_copies_as_what_torch_has_under_its_name(mixed, name):
    mixed()
    ours = getattr(F, name)
    assert pickle.loads(pickle.dumps(ours)) is ours
    assert copy.deepcopy(ours) is ours
    assert copy.copy(ours) is ours


def test_a_gated_step_has_the_name_and_signature_of_the_original(mixed):
    optimizer_class = own_optimizer()
    plain = vars(optimizer_class)["step"]
    mixed()
    optimizer_class(small().parameters(), lr=0.1)
    step = vars(optimizer_class)["step"]
    assert (step.__name__, step.__doc__) == ("step", "Mine.")
    assert step.__qualname__ == plain.__qualname__
    assert inspect.signature(step) == inspect.signature(plain)
    assert inspect.unwrap(step) is inspect.unwrap(plain)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is not supported:DeprecationWarning")
def test_torchscript_compiles_functions_that_use_the_replaced_ones(mixed):
    mixed()

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight)

    def conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x, weight)

    def attention(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    x = torch.arange(6.0).reshape(1, 2, 3)
    assert torch.equal(torch.jit.script(linear)(x, x[0]), x @ x[0].T)
    assert torch.jit.script(conv)(x, x).tolist() == [[[55.0]]]
    assert torch.jit.script(attention)(x).shape == (1, 2, 3)
    module = torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.Conv1d(2, 1, 1)))
    assert module(x).dtype is torch.float32


def test_fx_sees_the_function_that_the_script_sees(mixed):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3))

        def forward(self, x):
            return F.conv1d(F.linear(x, self.weight), torch.ones(1, 2, 1))

    mixed()
    traced = torch.fx.symbolic_trace(Two())
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert targets[0] is F.linear
    assert F.conv1d in targets
    assert traced(torch.ones(1, 2, 3)).tolist() == Two()(torch.ones(1, 2, 3)).tolist()
    assert "torch.nn.functional.linear" in traced.code or "torch._C._nn.linear" in traced.code


# --- what the user keeps -------------------------------------------------------------------------


def test_what_is_pickled_while_active_loads_where_there_is_no_autoamp(mixed, run_script, tmp_path):
    mixed()
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer)
    copied = copy.deepcopy(model)
    assert copied(torch.ones(2, 4)).dtype is torch.float32
    assert copy.deepcopy(optimizer).state_dict().keys() == optimizer.state_dict().keys()
    kept = {
        "model": model,
        "optimizer": optimizer,
        "functions": [getattr(F, name) for name in FUNCTIONAL],
        "step": optimizer.step,
        "register_hook": torch.Tensor.register_hook,
    }
    (tmp_path / "kept.pickle").write_bytes(pickle.dumps(kept))
    torch.save(kept, tmp_path / "kept.pt")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    model.eval()
    result = run_script(
        "import sys\n"
        "sys.modules['autoamp'] = None\n"
        "import pickle, torch, torch.nn.functional as F\n"
        "first = pickle.load(open('kept.pickle', 'rb'))\n"
        "for kept in (first, torch.load('kept.pt', weights_only=False)):\n"
        "    print([f is getattr(F, f.__name__) for f in kept['functions']].count(True))\n"
        "    kept['step']()\n"
        "    kept['model'].load_state_dict(torch.load('weights.pt'))\n"
        "    kept['optimizer'].load_state_dict(torch.load('optimizer.pt'))\n"
        "    print(kept['model'].eval()(torch.ones(1, 4)).dtype)\n"
        "    print(kept['register_hook'] is torch.Tensor.register_hook)\n",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"{len(FUNCTIONAL)}\ntorch.float32\nTrue\n" * 2


def keys_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every name on every object that a training step touches."""
    found: dict[str, Any] = {"optimizer": sorted(vars(optimizer))}
    for name, module in model.named_modules():
        found[f"module {name}"] = sorted(vars(module))
        found[f"hooks {name}"] = {k: len(v) for k, v in vars(module).items() if k.endswith("hooks")}
    for name, parameter in model.named_parameters():
        hooks = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        found[f"parameter {name}"] = (sorted(vars(parameter)), hooks, parameter.dtype)
        found[f"gradient {name}"] = (sorted(vars(parameter.grad)), parameter.grad.dtype)
        found[f"state {name}"] = {
            key: getattr(value, "dtype", type(value))
            for key, value in optimizer.state[parameter].items()
        }
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = (sorted(vars(buffer)), buffer.dtype)
    found["groups"] = [sorted(group) for group in optimizer.param_groups]
    return found


KINDS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "fused Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "fused SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, fused=True),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.01),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_training_leaves_the_same_names_on_the_users_objects(mixed, kind, dtype):
    plain_model = small()
    plain_optimizer = KINDS[kind](plain_model.parameters())
    train(plain_model, plain_optimizer)
    plain_keys = list(plain_optimizer.state_dict())
    session = mixed(dtype=dtype)
    model = small()
    optimizer = KINDS[kind](model.parameters())
    train(model, optimizer)
    assert session.counts.regions == 3
    assert keys_of(model, optimizer) == keys_of(plain_model, plain_optimizer)
    extra = ["autoamp"] if dtype == "float16" else []
    assert list(optimizer.state_dict()) == [*plain_keys, *extra]
    assert model.state_dict().keys() == plain_model.state_dict().keys()
    autoamp.disable()
    assert list(optimizer.state_dict()) == plain_keys


def test_the_one_key_in_a_state_dict_holds_plain_numbers_and_plain_torch_ignores_it(mixed):
    mixed(LOSS_SCALE="128")
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    saved = optimizer.state_dict()
    assert {key: type(value) for key, value in saved["autoamp"].items()} == {
        "scale": float,
        "growth_tracker": int,
        "skips_in_a_row": int,
    }
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    autoamp.disable()
    loaded = torch.load(file, weights_only=True)
    plain = torch.optim.SGD(small().parameters(), lr=0.5)
    plain.load_state_dict(loaded)
    assert plain.param_groups[0]["lr"] == 0.1
    assert list(plain.state_dict()) == ["state", "param_groups"]
