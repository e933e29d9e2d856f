"""What is taken out in the middle of a model, as an array or by a hook, is float32."""

from __future__ import annotations

import copy
import functools
import io
import json
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import autoamp

HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}
EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
pytestmark = pytest.mark.filterwarnings("ignore:__array:DeprecationWarning")
"""NumPy 2 would have `Tensor.__array__` and `__array_wrap__` take more arguments."""
dtypes = pytest.mark.parametrize("dtype", HALF)


class Inside(nn.Module):
    """Calls `look` with the half result of a layer."""

    def __init__(self, look: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.look = nn.Linear(8, 8), look

    def forward(self, x: torch.Tensor) -> Any:
        return self.look(self.layer(x))


def inside(look: Callable[[torch.Tensor], Any]) -> Any:
    """What `look` makes of a tensor that a layer has just computed, inside a region."""
    torch.manual_seed(0)
    model = Inside(look)
    return model(torch.linspace(-1, 1, 32).view(4, 8))


def far(ours: Any, reference: Any) -> float:
    """The largest distance, relative to the size of what the reference holds."""
    return max(
        ((a - b).norm() / b.norm().clamp(min=1e-12)).item()
        for a, b in zip(ours, reference, strict=True)
    )


# --- arrays --------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize(
    "as_array",
    [
        lambda h: h.detach().numpy(),
        lambda h: h.data.cpu().numpy(),
        lambda h: h.numpy(force=True),
        lambda h: np.asarray(h.detach()),
        lambda h: np.array(h.detach()),
        lambda h: np.asarray(h.detach(), dtype=np.float32),
        lambda h: np.from_dlpack(h.detach()),
        lambda h: np.stack([row.detach().numpy() for row in h]),
    ],
)
def test_arrays_made_in_a_model_are_float32_ones(mixed, dtype, as_array):
    reference = inside(as_array)
    mixed("default", dtype)
    ours = inside(as_array)
    assert isinstance(ours, np.ndarray)
    assert ours.dtype == np.float32
    assert np.allclose(ours, reference, rtol=0, atol=8 * EPS[dtype])


@dtypes
def test_numpy_works_on_tensors_in_a_model(mixed, dtype):
    def look(h):
        return np.linalg.svd(h.detach().numpy())[1], np.sin(h.detach()), h.detach() + np.ones(8)

    reference = inside(look)
    mixed("default", dtype)
    values, sines, total = inside(look)
    assert values.dtype == np.float32
    assert sines.dtype is torch.float32
    assert np.allclose(values, reference[0], atol=16 * EPS[dtype])
    assert far([sines], [reference[1]]) < 4 * EPS[dtype]
    assert far([total], [reference[2]]) < 4 * EPS[dtype]


@dtypes
def test_tensors_that_need_a_gradient_are_refused_as_ever(mixed, dtype):
    mixed("default", dtype)
    with pytest.raises(RuntimeError, match=r"Use tensor\.detach"):
        inside(lambda h: h.numpy())


@dtypes
@pytest.mark.parametrize(
    "there_and_back",
    [
        lambda h: torch.from_dlpack(h.detach()),
        lambda h: torch.from_dlpack(torch.to_dlpack(h.detach())),
        lambda h: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(h.detach())),
        lambda h: torch.from_dlpack(h.detach().__dlpack__(max_version=(1, 0))),
        lambda h: torch.from_dlpack(np.from_dlpack(h.detach())),
    ],
)
def test_dlpack_hands_out_float32_inside_a_model(mixed, dtype, there_and_back):
    mixed("default", dtype)
    seen: list[torch.Tensor] = []

    def look(h):
        seen.append(h)
        seen.append(there_and_back(h))

    inside(look)
    half, back = seen
    assert half.dtype is HALF[dtype]
    assert back.dtype is torch.float32
    assert torch.equal(back, half.detach().float())


@dtypes
def test_lists_numbers_and_json_are_right_as_they_are(mixed, dtype):
    mixed("default", dtype)

    def look(h):
        values = h.detach()
        return json.dumps([values.tolist(), values[0, 0].item(), float(values.sum())]), values

    text, values = inside(look)
    listed, first, total = json.loads(text)
    assert torch.equal(torch.tensor(listed), values)
    assert first == values[0, 0].item()
    assert total == pytest.approx(values.sum().item(), rel=EPS[dtype])


def test_a_scripts_own_half_arrays_stay_half_outside_of_models(mixed):
    mixed("default", "float16")
    inside(lambda h: h)
    x = torch.ones(3, dtype=torch.float16)
    assert x.numpy().dtype == np.float16
    x.numpy()[0] = 5.0
    assert x[0].item() == 5.0  # one memory
    assert torch.from_dlpack(x).dtype is torch.float16
    assert torch.from_dlpack(torch.ones(3, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_bfloat16_has_an_array_where_autoamp_makes_bfloat16_and_not_elsewhere(mixed):
    x = torch.ones(3, dtype=torch.bfloat16)
    mixed("default", "bfloat16")
    with pytest.raises(TypeError, match="BFloat16"):
        x.numpy()
    inside(lambda h: h)
    assert x.numpy().dtype == np.float32
    autoamp.disable()
    with pytest.raises(TypeError, match="BFloat16"):
        x.numpy()


@dtypes
def test_float32_arrays_share_their_memory(mixed, dtype):
    mixed("default", dtype)

    def look(h):
        x = torch.zeros(3)
        x.numpy()[1] = 2.0
        torch.from_dlpack(x)[2] = 3.0
        return x

    assert inside(look).tolist() == [0.0, 2.0, 3.0]


@dtypes
def test_an_array_taken_when_a_checkpoint_computes_anew_is_the_same(mixed, dtype):
    mixed("default", dtype, LOSS_SCALE="1")
    arrays: list[Any] = []

    def part(h):
        arrays.append(h.detach().numpy())
        return h.sin()

    for use_reentrant in (True, False):
        y = inside(
            lambda h, r=use_reentrant: torch.utils.checkpoint.checkpoint(part, h, use_reentrant=r)
        )
        y.sum().backward()
    assert len(arrays) == 4
    assert all(a.dtype == np.float32 and np.array_equal(a, arrays[0]) for a in arrays)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_numpy_in_compiled_functions_traces(mixed, backend):
    mixed("default", "bfloat16")

    @functools.partial(torch.compile, backend=backend, fullgraph=True)
    def double(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 2)

    assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))


# --- forward hooks -------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def images() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, 6, 6)


@dtypes
def test_hooks_see_float32_and_what_they_saw_goes_on(mixed, dtype):
    mixed("default", dtype)
    model, seen = net(), {}
    conv, after = model.features[2], model.features[3]

    def pre(module, args):
        seen["pre"] = args[0]

    def post(module, args, output):
        seen["args"], seen["output"] = args[0], output

    def with_kwargs(module, args, kwargs, output):
        seen["again"] = output

    conv.register_forward_pre_hook(pre)
    conv.register_forward_hook(post)
    conv.register_forward_hook(hook=with_kwargs, with_kwargs=True)
    after.forward = lambda x: seen.setdefault("went on", x).relu()
    model(images())
    assert {value.dtype for value in seen.values()} == {torch.float32}
    assert seen["args"] is seen["pre"]
    assert seen["output"] is seen["again"] is seen["went on"]


@dtypes
def test_what_a_hook_returns_wins(mixed, dtype):
    mixed("default", dtype)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Identity())
    model[1].register_forward_pre_hook(lambda m, args: (torch.ones_like(args[0]),))
    model[1].register_forward_hook(lambda m, args, y: (args[0], y, torch.full_like(y, 7.0)))
    args, result, seven = model(torch.randn(3, 4))
    assert torch.equal(args, torch.ones(3, 4))
    expected = F.linear(torch.ones(3, 4), model[1].weight, model[1].bias)
    assert far([result], [expected]) < 4 * EPS[dtype]
    assert torch.equal(seven, torch.full((3, 4), 7.0))


@dtypes
def test_hooks_of_every_form_are_called_as_torch_calls_them(mixed, dtype):
    def run() -> list[Any]:
        calls: list[Any] = []

        def note(name):
            def hook(module, *given):
                calls.append((name, [_kind(value) for value in given]))

            return hook

        class Part(nn.Module):
            def forward(self, x, *, scale):
                if scale > 1:
                    raise ValueError("scale")
                return {"x": x * scale}

        model = Inside(lambda h: part(h, scale=0.5))
        part = model.part = Part()
        part.register_forward_hook(note("last"))
        part.register_forward_hook(note("first"), prepend=True)
        part.register_forward_hook(note("kwargs"), with_kwargs=True)
        part.register_forward_hook(note("always"), always_call=True)
        part.register_forward_pre_hook(note("pre"))
        part.register_forward_pre_hook(note("pre kwargs"), with_kwargs=True, prepend=True)
        model(torch.ones(2, 8))
        model.look = lambda h: part(h, scale=2.0)
        with pytest.raises(ValueError, match="scale"):
            model(torch.ones(2, 8))
        return calls

    reference = run()
    mixed("default", dtype)
    ours = run()
    assert ours[:6] == reference[:6]
    assert ours[6:9] == reference[6:9]


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, dict):
        return {key: _kind(item) for key, item in value.items()}
    return [_kind(item) for item in value] if isinstance(value, tuple) else value


@dtypes
def test_a_pre_hook_with_kwargs_hands_on_what_it_saw(mixed, dtype):
    mixed("default", dtype)
    seen: list[Any] = []

    class Part(nn.Module):
        def forward(self, x, y=None):
            seen.append((x, y))
            return x + y

    model = Inside(lambda h: part(h, y=h))
    part = model.part = Part()
    part.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append((args[0], kwargs["y"])), with_kwargs=True
    )
    model(torch.ones(2, 8))
    (x, y), went_on = seen
    assert x is y is went_on[0] is went_on[1]
    assert x.dtype is torch.float32


@dtypes
def test_global_hooks_see_float32(mixed, dtype):
    mixed("default", dtype)
    module, seen = torch.nn.modules.module, []
    handles = [
        module.register_module_forward_hook(lambda m, args, y: seen.append(y)),
        module.register_module_forward_pre_hook(lambda m, args: seen.append(args[0])),
    ]
    try:
        net()(images())
    finally:
        for handle in handles:
            handle.remove()
    assert len(seen) == 14
    assert {tensor.dtype for tensor in seen} == {torch.float32}
    net()(images())
    assert len(seen) == 14


@dtypes
def test_arithmetic_in_a_hook_is_that_of_float32(mixed, dtype):
    def run() -> list[torch.Tensor]:
        model, grams = net(), []

        def gram(module, args, output):
            flat = output.flatten(2) * 300  # products of it do not fit into float16
            grams.append(flat @ flat.transpose(1, 2))

        model.features[0].register_forward_hook(gram)
        model(images())
        return grams

    reference = run()
    mixed("default", dtype)
    ours = run()
    assert ours[0].dtype is torch.float32
    assert far(ours, reference) < 8 * EPS[dtype]


@dtypes
def test_modules_called_in_a_hook_stay_in_the_region(mixed, dtype):
    mixed("default", dtype)
    model, adapter, seen = net(), nn.Linear(6, 4), []
    adapter.forward = lambda x: seen.append(nn.Linear.forward(adapter, x)) or seen[-1]
    model.head.register_forward_hook(lambda m, args, y: y + adapter(args[0]))
    assert model(images()).dtype is torch.float32
    assert seen[0].dtype is HALF[dtype]


@dtypes
@pytest.mark.parametrize("scale", ["65536", "1"])
def test_grad_cam_by_hooks_finds_the_map_of_float32(mixed, dtype, scale):
    def cam() -> list[torch.Tensor]:
        model, kept = net(), {}

        def keep(module, args, output):
            kept["activation"] = output
            output.retain_grad()

        def keep_gradient(module, grad_input, grad_output):
            kept["gradient"] = grad_output[0]

        handles = [
            model.features[2].register_forward_hook(keep),
            model.features[2].register_full_backward_hook(keep_gradient),
        ]
        score = model(images())[:, 1].sum()
        score.backward()
        for handle in handles:
            handle.remove()
        activation = kept["activation"]
        weights = activation.grad.mean((2, 3), keepdim=True)
        return [activation.detach(), activation.grad, kept["gradient"], weights * activation]

    reference = cam()
    mixed("default", dtype, LOSS_SCALE=scale)
    ours = cam()
    assert {tensor.dtype for tensor in ours} == {torch.float32}
    assert far(ours, reference) < 16 * EPS[dtype]


@dtypes
def test_a_perceptual_loss_on_caught_features_trains_as_in_float32(mixed, dtype):
    def train() -> list[torch.Tensor]:
        critic, features = net().requires_grad_(False), []
        for index in (0, 2):
            critic.features[index].register_forward_hook(lambda m, args, y: features.append(y))

        def of(image):
            features.clear()
            critic(image)
            return list(features)

        torch.manual_seed(2)
        generator = nn.Conv2d(3, 3, 3, padding=1)
        optimizer = torch.optim.SGD(generator.parameters(), lr=0.05)
        goals = [goal.detach() for goal in of(images())]
        losses = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = sum(
                F.mse_loss(a, b) for a, b in zip(of(generator(images())), goals, strict=True)
            )
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert losses[-1] < losses[0]
        return [torch.stack(losses), *(p.detach() for p in generator.parameters())]

    reference = train()
    mixed("default", dtype)
    assert far(train(), reference) < 16 * EPS[dtype]


@dtypes
def test_what_a_hook_edits_in_place_goes_on(mixed, dtype):
    mixed("default", dtype)
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())

    def mask(module, args, output):
        output[:, 0] = -1e9  # float16 does not hold it

    model[0].register_forward_hook(mask)
    y = model(torch.ones(2, 4))
    assert torch.equal(y[:, 0], torch.full((2,), -1e9))


@dtypes
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_hooks_meet_a_checkpoint_as_the_forward_did(mixed, dtype, use_reentrant):
    mixed("default", dtype)
    found = []
    for is_checkpointed in (False, True):
        model, seen = net(), []
        for layer in model.features:
            layer.register_forward_hook(lambda m, args, y, seen=seen: seen.append(y.detach()))
        plain = model.features.forward
        if is_checkpointed:
            model.features.forward = lambda x, plain=plain: torch.utils.checkpoint.checkpoint(
                plain, x, use_reentrant=use_reentrant
            )
        model(images().requires_grad_()).sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))
    again = seen[4:]
    assert len(again) >= 3  # a checkpoint may stop when it has all that it needs
    assert all(map(torch.equal, seen, again))


def test_hooks_outside_of_regions_get_what_is_there(mixed):
    mixed("default", "float16")
    net()(images())
    model, seen = nn.Linear(2, 2).half(), []
    model.register_forward_hook(lambda m, args, y: seen.append(y))
    x = torch.ones(1, 2, dtype=torch.float16)
    assert model(x) is seen[0]
    assert seen[0].dtype is torch.float16
    with torch.autocast("cpu", torch.float16):  # a context of the script's own
        own = nn.Linear(2, 2)
        own.register_forward_hook(lambda m, args, y: seen.append(y))
        own(x.float())
    assert seen[1].dtype is torch.float16


@dtypes
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_with_hooks_are_one_graph_and_hooks_see_float32(mixed, dtype, backend):
    mixed("default", dtype)
    model, seen = net(), []

    def keep(module, args, output):
        seen.append((args[0].dtype, output.dtype))

    def pre(module, args):
        seen.append(args[0].dtype)

    model.features[2].register_forward_hook(keep)
    model.features[2].register_forward_pre_hook(pre)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    expected = model(images())
    eager, _ = list(seen), seen.clear()
    y = compiled(images())
    assert seen == eager == [torch.float32, (torch.float32, torch.float32)]
    assert far([y], [expected]) < 8 * EPS[dtype]


# --- a hook on a module stays the script's -------------------------------------------------------


CALLS: list[torch.dtype] = []


def module_level(module, args, output):
    CALLS.append(output.dtype)


class Counting:
    """A hook that is an object with a state."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module, args, output):
        self.count += 1


class Hooked(nn.Module):
    """A model whose hook is a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(2, 2), None
        self.layer.register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.kept = output.detach()

    def forward(self, x):
        return self.layer(x)


def test_a_model_with_hooks_pickles_as_without_autoamp(mixed):
    def saved() -> bytes:
        torch.manual_seed(0)
        torch.utils.hooks.RemovableHandle.next_id = 0
        model = nn.Linear(2, 2)
        model.register_forward_hook(module_level)
        model.register_forward_hook(Counting())
        model.register_forward_pre_hook(functools.partial(module_level, "x"))
        return pickle.dumps(model)

    mixed("default", "bfloat16")
    ours = saved()
    assert b"autoamp" not in ours
    loaded = pickle.loads(ours)
    first, second = loaded._forward_hooks.values()
    assert first is module_level
    assert type(second) is Counting
    autoamp.disable()
    assert type(next(iter(pickle.loads(saved())._forward_hooks.values()))) is type(first)


def test_a_saved_model_with_hooks_loads_where_there_is_no_autoamp(mixed, tmp_path, run_script):
    hooks = """
        import torch
        from torch import nn
        seen = []
        def note(module, args, output):
            seen.append(output.dtype)
        class Own(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(2, 2)
                self.layer.register_forward_hook(self.keep)
            def keep(self, module, args, output):
                self.kept = output
            def forward(self, x):
                return self.layer(x)
    """
    (tmp_path / "hooks.py").write_text("\n".join(line[8:] for line in hooks.splitlines()))
    done = run_script(
        "import torch, hooks\n"
        "model = torch.nn.Sequential(torch.nn.Linear(2, 2), hooks.Own(), torch.nn.Linear(2, 2))\n"
        "model[0].register_forward_hook(hooks.note)\n"
        "model(torch.ones(1, 2))\n"
        "assert hooks.seen == [torch.float32] and model[1].kept.dtype is torch.float32\n"
        "torch.save(model, 'model.pt')\n",
        AUTO_MIXED_PRECISION="1",
        AUTO_MIXED_PRECISION_DTYPE="bfloat16",
        PYTHONPATH=sys.path[0],
    )
    assert "1 region" in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
    done = run_script(
        "import torch, hooks\n"
        "import sys\n"
        "for name in [name for name in sys.modules if name.startswith('autoamp')]:\n"
        "    sys.modules[name] = None\n"
        "model = torch.load('model.pt', weights_only=False)\n"
        "model(torch.ones(1, 2))\n"
        "assert hooks.seen == [torch.float32]\n"
        "assert list(model[0]._forward_hooks.values()) == [hooks.note]\n"
        "keep, = model[1].layer._forward_hooks.values()\n"
        "assert keep.__self__ is model[1]\n",
    )
    assert done.returncode == 0, done.stderr


def test_deep_copies_have_hooks_of_their_own(mixed):
    mixed("default", "bfloat16")
    model, counting = nn.Sequential(nn.Linear(2, 2), Hooked()), Counting()
    model[0].register_forward_hook(counting)
    twin = copy.deepcopy(model)
    twin(torch.ones(1, 2))
    assert counting.count == 0
    assert next(iter(twin[0]._forward_hooks.values())).count == 1
    assert model[1].kept is None
    assert twin[1].kept.dtype is torch.float32
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False)[1].layer._forward_hooks


def test_a_hook_on_a_module_compares_and_answers_as_the_scripts(mixed):
    mixed("default", "bfloat16")
    model, counting = nn.Linear(2, 2), Counting()
    handle = model.register_forward_hook(counting)
    other = model.register_forward_hook(module_level)
    found, function = model._forward_hooks.values()
    assert isinstance(found, Counting)
    assert found == counting
    assert counting in model._forward_hooks.values()
    assert hash(function) == hash(module_level)
    assert function.__name__ == "module_level"
    assert repr(function) == repr(module_level)
    model(torch.ones(1, 2))
    assert found.count == counting.count == 1
    handle.remove()
    other.remove()
    assert not model._forward_hooks
    nn.Linear(2, 2).register_forward_hook(function)  # taken from one module to another


def test_a_scripts_own_pruning_is_found_among_hooks(mixed):
    class Halves(prune.BasePruningMethod):
        PRUNING_TYPE = "unstructured"

        def compute_mask(self, t, default_mask):
            mask = default_mask.clone()
            mask.view(-1)[::2] = 0
            return mask

    mixed("default", "bfloat16")
    model = nn.Linear(4, 4)
    Halves.apply(model, "weight")
    prune.l1_unstructured(model, "bias", amount=2)
    model(torch.ones(1, 4)).sum().backward()
    assert prune.is_pruned(model)
    prune.remove(model, "weight")
    prune.remove(model, "bias")
    assert not prune.is_pruned(model)
    assert not model.weight.view(-1)[::2].any()


def test_torchs_own_hooks_are_left_alone(mixed):
    mixed("default", "bfloat16")
    model = nn.LazyLinear(2)
    (hook,) = model._forward_pre_hooks.values()
    assert type(hook) is type(model._infer_parameters)
    model(torch.ones(1, 3))
    assert not model._forward_pre_hooks


def test_scripting_a_model_with_hooks_is_as_without_autoamp(mixed):
    mixed("default", "bfloat16")
    model = nn.Linear(2, 2)
    model.register_forward_hook(scripted_hook)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch call it deprecated
        scripted = torch.jit.script(model)
    x = torch.ones(1, 2)
    assert torch.allclose(scripted(x), F.linear(x, model.weight, model.bias) * 2, atol=1e-2)


def scripted_hook(self, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    return output * 2


def test_after_disable_hooks_are_the_plain_ones(mixed):
    mixed("default", "bfloat16")
    model, seen = net(), []

    def keep(module: Any, args: Any, y: torch.Tensor) -> None:
        seen.append(y)

    handle = model.features[2].register_forward_hook(keep)
    before = model.register_forward_pre_hook(lambda module, args: None)
    everywhere = torch.nn.modules.module.register_module_forward_hook(keep)
    with torch.no_grad():
        model(images())
    autoamp.disable()
    assert list(model.features[2]._forward_hooks.values()) == [keep]
    everywhere_hooks = torch.nn.modules.module._global_forward_hooks
    left = [model.features[2]._forward_hooks, model._forward_pre_hooks, everywhere_hooks]
    assert {type(hook) for hooks in left for hook in hooks.values()} == {type(keep)}
    for one in (before, everywhere):
        one.remove()
    seen[:] = seen[:1]
    half = model.to(torch.bfloat16)
    half(images().bfloat16())
    assert [y.dtype for y in seen] == [torch.float32, torch.bfloat16]
    handle.remove()
    assert not model.features[2]._forward_hooks


# --- ops of extensions ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def extension() -> Any:
    """Two ops as extensions have them: one that knows only float32, one that takes half too."""
    library = torch.library.Library("autoamp_tests", "DEF")
    library.define("only_float32(Tensor x, Tensor scale) -> Tensor")
    library.define("any_dtype(Tensor x) -> Tensor")

    def only_float32(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float32 or scale.dtype is not torch.float32:
            raise RuntimeError(f"\"only_float32\" not implemented for '{x.dtype}'")
        return x * scale

    library.impl("only_float32", only_float32, "CompositeImplicitAutograd")
    library.impl("any_dtype", lambda x: x * 2, "CompositeImplicitAutograd")
    yield torch.ops.autoamp_tests
    library._destroy()


class Extended(nn.Module):
    """A layer, an op of an extension in this module's own code, and a layer behind it."""

    def __init__(self, op: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.last, self.op = nn.Linear(8, 8), nn.Linear(8, 8), op
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.op(self.first(x))
        self.seen.append(h.dtype)
        return self.last(h)


@dtypes
def test_an_op_that_knows_only_float32_gets_it_and_the_layers_around_stay_half(
    mixed, dtype, extension
):
    def train() -> tuple[nn.Module, list[torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(
            Extended(lambda h: extension.only_float32(h, torch.full((8,), 3.0))), nn.Linear(8, 2)
        )
        y = model(torch.linspace(-1, 1, 32).view(4, 8))
        y.sum().backward()
        return model, [y.detach(), *(p.grad for p in model.parameters())]

    _, reference = train()
    session = mixed("default", dtype, LOSS_SCALE="128")
    model, ours = train()
    assert far(ours, reference) < 8 * EPS[dtype]
    assert [(d.module, d.below) for d in session.demotions] == [("0", False)]
    inner: list[torch.dtype] = []
    last = model[0].last
    last.forward = lambda x: inner.append(nn.Linear.forward(last, x)) or inner[-1]
    model(torch.ones(4, 8))
    assert inner[0].dtype is HALF[dtype]


@dtypes
def test_an_op_of_an_extension_that_takes_half_gets_half(mixed, dtype, extension):
    session = mixed("default", dtype)
    model = nn.Sequential(Extended(extension.any_dtype))
    for _ in range(2):
        model(torch.ones(4, 8))
    assert model[0].seen == [HALF[dtype]] * 2
    assert not session.demotions
