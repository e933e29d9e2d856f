"""Where lower precision is on, and where it is not."""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoamp
from autoamp import region
from autoamp.patches import FUNCTIONAL

Mixed = Callable[..., Any]
EXACT = {"rtol": 0.0, "atol": 0.0}
CALLS: dict[str, tuple[Any, ...]] = {
    "linear": (torch.randn(4, 8), torch.randn(2, 8), torch.randn(2)),
    "conv1d": (torch.randn(1, 3, 9), torch.randn(2, 3, 3)),
    "conv2d": (torch.randn(1, 3, 9, 9), torch.randn(2, 3, 3, 3)),
    "conv3d": (torch.randn(1, 3, 5, 5, 5), torch.randn(2, 3, 3, 3, 3)),
    "conv_transpose1d": (torch.randn(1, 3, 9), torch.randn(3, 2, 3)),
    "conv_transpose2d": (torch.randn(1, 3, 5, 5), torch.randn(3, 2, 3, 3)),
    "conv_transpose3d": (torch.randn(1, 3, 3, 3, 3), torch.randn(3, 2, 3, 3, 3)),
    "conv_tbc": (torch.randn(9, 1, 3), torch.randn(3, 3, 2), torch.randn(2)),
    "prelu": (torch.randn(4, 3), torch.randn(3)),
    "scaled_dot_product_attention": (torch.randn(1, 2, 4, 8),) * 3,
}


class Probe(nn.Module):
    """A module with one parameter that notes what it sees on the inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.seen.append(y.dtype)
        return y


def x4() -> torch.Tensor:
    return torch.linspace(-1, 1, 8).reshape(2, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_inside_is_half_and_the_outside_is_float32(mixed: Mixed, dtype: torch.dtype) -> None:
    mixed(dtype=str(dtype).removeprefix("torch."))
    probe = Probe()
    assert probe(x4()).dtype is torch.float32
    assert probe.seen == [dtype]
    with torch.autocast("cpu", dtype):
        expected = F.linear(x4(), probe.layer.weight, probe.layer.bias)
    torch.testing.assert_close(probe(x4()), expected.float(), **EXACT)


def test_only_the_outermost_call_is_a_region(mixed: Mixed) -> None:
    session = mixed()
    nn.Sequential(Probe(), nn.Sequential(Probe(), nn.ReLU()))(x4())
    assert session.counts.regions == 1


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.CrossEntropyLoss(), nn.Flatten()])
def test_modules_without_parameters_stay_float32(mixed: Mixed, loss: nn.Module) -> None:
    session = mixed()
    arguments = (x4(), x4()) if "Loss" in type(loss).__name__ else (x4(),)
    loss(*arguments)
    assert session.counts.regions == 0


def test_arithmetic_outside_modules_is_never_touched(mixed: Mixed) -> None:
    a = torch.randn(16, 16)
    expected = [a @ a, torch.mm(a, a), torch.einsum("ij,jk->ik", a, a), torch.cdist(a, a)]
    mixed()
    Probe()(x4())
    found = [a @ a, torch.mm(a, a), torch.einsum("ij,jk->ik", a, a), torch.cdist(a, a)]
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("name", FUNCTIONAL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_direct_functional_calls_are_regions_of_one_op(
    mixed: Mixed, name: str, dtype: torch.dtype
) -> None:
    x, weight, *others = CALLS[name]
    arguments = (x, nn.Parameter(weight), *others)
    with torch.autocast("cpu", dtype):
        expected = getattr(F, name)(*arguments)
    assert expected.dtype is dtype
    session = mixed(dtype=str(dtype).removeprefix("torch."))
    found = getattr(F, name)(*arguments)
    torch.testing.assert_close(found, expected.float(), **EXACT)
    assert session.counts.regions == 1


@pytest.mark.parametrize("name", region.WITH_WEIGHT)
def test_direct_functional_calls_with_plain_data_for_a_weight_are_none(
    mixed: Mixed, name: str
) -> None:
    """Windows, blurs and fixed filters: arithmetic on data, as a matrix product is."""
    expected = getattr(F, name)(*CALLS[name])
    session = mixed()
    assert torch.equal(getattr(F, name)(*CALLS[name]), expected)
    assert session.counts.regions == 0
    x, weight, *others = CALLS[name]
    fast = weight.clone().requires_grad_() * 1  # as in a loop of meta-learning
    getattr(F, name)(x, fast, *others)
    assert session.counts.regions == 1


def test_direct_functional_calls_by_keyword_and_in_other_dtypes(mixed: Mixed) -> None:
    session = mixed()
    x, weight = torch.randn(2, 4), nn.Parameter(torch.randn(3, 4))
    assert torch.equal(F.linear(input=x, weight=weight), F.linear(x, weight))
    assert session.counts.regions == 2
    assert F.linear(x.double(), weight.double()).dtype is torch.float64
    assert F.linear(x.half(), weight.half()).dtype is torch.float16
    assert session.counts.regions == 2


@pytest.mark.parametrize("enabled", [True, False])
def test_the_script_s_own_autocast_context_wins(mixed: Mixed, enabled: bool) -> None:
    session = mixed(dtype="float16")
    probe = Probe()
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        out = probe(x4())
    assert out.dtype is (torch.bfloat16 if enabled else torch.float32)
    assert session.counts.regions == 0


def test_an_island_inside_a_region_wins(mixed: Mixed) -> None:
    class Island(Probe):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x)

    mixed()
    island = Island()
    nn.Sequential(island)(x4())
    assert island.seen == [torch.float32]


def test_off_exempts_a_block_a_function_and_an_open_region(mixed: Mixed) -> None:
    mixed()
    probe = Probe()

    class Interrupted(Probe):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with autoamp.off():
                return probe(x)

    @autoamp.off()
    def function() -> torch.Tensor:
        return probe(x4())

    with autoamp.off(), autoamp.off():
        probe(x4())
    function()
    Interrupted()(x4())
    assert probe.seen == [torch.float32] * 3
    probe(x4())
    assert probe.seen[3] is torch.float16


def test_off_does_nothing_where_autoamp_is_not_active() -> None:
    with autoamp.off():
        assert torch.autocast_increment_nesting() == 1
        torch.autocast_decrement_nesting()


def state() -> list[Any]:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return [
        depth,
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    ]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_exceptions_pass_through_and_leave_autocast_as_it_was(
    mixed: Mixed, error: type[BaseException]
) -> None:
    class Failing(Probe):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise error

    before = state()
    mixed()
    with pytest.raises(error):
        Failing()(x4())
    assert state() == before
    probe = Probe()
    probe(x4())
    assert probe.seen == [torch.float16]


def test_weights_changed_between_two_calls_are_seen(mixed: Mixed) -> None:
    mixed()
    probe = Probe()
    first = probe(x4())
    with torch.no_grad():
        probe.layer.weight.mul_(2)
    probe.layer.bias.data.mul_(2)
    torch.testing.assert_close(probe(x4()), first * 2, rtol=2e-3, atol=1e-3)


def test_threads_have_regions_of_their_own(mixed: Mixed) -> None:
    mixed()
    probe, results = Probe(), []
    thread = threading.Thread(target=lambda: results.append(probe(x4()).dtype))
    thread.start()
    thread.join()
    assert (results, probe.seen) == ([torch.float32], [torch.float16])


def test_half_models_are_left_alone_and_said_once(
    mixed: Mixed, capfd: pytest.CaptureFixture[str]
) -> None:
    session = mixed()
    model = nn.Linear(4, 4).bfloat16()
    for _ in range(2):
        assert model(x4().bfloat16()).dtype is torch.bfloat16
    assert session.counts.regions == 0
    assert capfd.readouterr().err.splitlines() == [
        "autoamp: a model with torch.bfloat16 parameters is left as it is"
    ]


def test_double_models_compute_in_double(mixed: Mixed) -> None:
    model = nn.Linear(4, 4).double()
    expected = model(x4().double())
    mixed()
    assert torch.equal(model(x4().double()), expected)


def test_tensors_that_came_in_as_half_go_out_as_half(mixed: Mixed) -> None:
    class Passing(Probe):
        def forward(self, x: torch.Tensor, other: torch.Tensor) -> Any:
            return super().forward(x), other

    mixed()
    given = torch.ones(2, dtype=torch.float16)
    out, same = Passing()(x4(), given)
    assert out.dtype is torch.float32
    assert same is given


def test_outputs_keep_hands_half_tensors_out(mixed: Mixed, tmp_path: Any) -> None:
    policy = tmp_path / "keep.yaml"
    policy.write_text("outputs: keep")
    mixed(str(policy))
    assert Probe()(x4()).dtype is torch.float16


def test_an_lstm_without_half_kernel_runs_in_float32(mixed: Mixed) -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 4)
    x = torch.randn(5, 2, 3)
    packed = nn.utils.rnn.pack_padded_sequence(x, [5, 3])
    expected, (hidden, cell) = lstm(x)
    expected_packed = lstm(packed)[0].data
    session = mixed()
    out, state = lstm(x)
    if session.kernels.registered:  # this CPU's oneDNN has no half LSTM
        torch.testing.assert_close([out, *state], [expected, hidden, cell], **EXACT)
        torch.testing.assert_close(lstm(packed)[0].data, expected_packed, **EXACT)
    out.sum().backward()
    assert out.dtype is torch.float32
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    autoamp.disable()
    assert torch.equal(lstm(x)[0], expected)


def test_kernels_are_gone_after_disable(mixed: Mixed) -> None:
    session = mixed()
    kernels = list(session.kernels.registered)
    autoamp.disable()
    for kernel in kernels:
        packet, _, overload = kernel.op.partition(".")
        name = f"aten::{packet}.{overload}"
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCPU")


def test_tracing_export_and_fx_see_the_float32_program(mixed: Mixed) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    mixed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch call it deprecated
        traced = torch.jit.trace(model, x4())
    assert "Half" not in str(traced.inlined_graph)
    exported = torch.export.export(model, (x4(),))
    targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert targets == ["aten.linear.default", "aten.relu.default"]
    graph = torch.fx.symbolic_trace(model).graph
    assert [node.op for node in graph.nodes] == [
        "placeholder",
        "call_module",
        "call_module",
        "output",
    ]


def test_models_pickle_and_copy_as_ever(mixed: Mixed) -> None:
    mixed()
    probe = Probe()
    probe(x4())
    twin = copy.deepcopy(probe)
    assert vars(twin).keys() == vars(Probe()).keys()
    assert torch.equal(twin(x4()), probe(x4()))


def test_functional_call_and_vmap_do_what_hand_written_autocast_does(mixed: Mixed) -> None:
    mixed()
    probe = Probe()
    parameters = dict(probe.named_parameters())
    assert torch.equal(torch.func.functional_call(probe, parameters, (x4(),)), probe(x4()))
    assert set(probe.seen) == {torch.float16}
    with torch.autocast("cpu", torch.float16):
        expected = torch.vmap(probe.layer)(x4()[None])  # torch lowers nothing under vmap on the CPU
    torch.testing.assert_close(torch.vmap(probe)(x4()[None]), expected.float(), **EXACT)


def test_numpy_json_and_dtype_checks_at_top_level_see_float32(mixed: Mixed) -> None:
    mixed(dtype="bfloat16")
    out = Probe()(x4())
    assert isinstance(out, torch.FloatTensor)
    assert out.detach().numpy().dtype == "float32"
    assert all(isinstance(value, float) for value in out.flatten().tolist())


def test_metrics_computed_on_outputs_accumulate_in_float32(mixed: Mixed) -> None:
    """4096 + 1 is 4096 in bfloat16."""
    mixed(dtype="bfloat16")
    probe = Probe()
    total = torch.zeros(())
    for _ in range(5000):
        total = total + (probe(x4())[0, 0] * 0 + 1).detach()
        probe.seen.clear()
    assert float(total) == 5000.0


def test_modules_called_from_inside_the_engine_open_no_region(mixed: Mixed) -> None:
    session = mixed(dtype="bfloat16")
    probe = Probe()
    leaf = torch.ones(2, requires_grad=True)

    def call_a_model(grad: torch.Tensor) -> None:
        probe(x4())

    leaf.register_hook(call_a_model)
    leaf.sum().backward()
    assert probe.seen == [torch.float32]
    assert session.counts.regions == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_edited_by_hand_after_a_backward_in_a_region_are_seen_there(
    mixed: Mixed, dtype: str
) -> None:
    """No optimizer steps here: only the backward tells that weights are about to change."""
    seen: list[float] = []

    class Outer(Probe):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                out = super().forward(x)
                seen.append(out.float().abs().sum().item())
                out.float().pow(2).sum().backward()
                with torch.no_grad():
                    self.layer.weight.mul_(0.5)
                    self.layer.bias.data.mul_(0.5)
            return out

    mixed(dtype=dtype)
    Outer()(x4())
    assert seen == pytest.approx([seen[0], seen[0] / 2, seen[0] / 4], rel=1e-2)
    assert torch.is_autocast_cache_enabled()


def test_models_that_hash_badly_run_where_sharding_is_loaded(mixed: Mixed) -> None:
    """Whoever imports a trainer has it loaded. A region that fails leaves no nesting behind."""
    import torch.distributed.fsdp

    class Odd(nn.Linear):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise AssertionError("nobody may compare modules")

    assert torch.distributed.fsdp.__name__ in sys.modules
    session = mixed(dtype="bfloat16")
    net = nn.ModuleList()
    net._modules.update({"0": Odd(4, 4)})
    result = net[0](x4())
    assert torch.equal(result, result.bfloat16().float())
    assert session.counts.regions == 1
