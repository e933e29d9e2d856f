"""What scripts make of models is what they make without autoamp: files, and what code can ask."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

MODEL = """
import copy, inspect, io, json, zipfile
import torch
import torch.utils._python_dispatch
import torch.nn.functional as F
from torch import nn, package
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 8, 3, padding=1), nn.LayerNorm(8)
        self.inner, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8) / 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        x = self.norm(self.conv(x).transpose(1, 2))
        x = F.linear(F.gelu(self.inner(x)), self.weight)[:, None]
        return F.scaled_dot_product_attention(x, x, x).softmax(-1)


net, x = Net(), torch.randn(2, 4, 5)
plain = copy.deepcopy(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
for _ in range(3):  # what is made is made of a model that has run
    net(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
net.load_state_dict(plain.state_dict())
net.eval()
net(x)
artefacts, runs, sizes = {}, {}, {}
"""

MAKE = """
def entries(name):
    with zipfile.ZipFile(name) as archive:
        return {
            entry: archive.read(entry)
            for entry in archive.namelist()
            if not entry.endswith((".debug_pkl", "serialization_id"))  # source lines, a hash
        }


scripted = torch.jit.script(net)
scripted.save("script.pt")
torch.jit.trace(net, x).save("trace.pt")
torch.jit.freeze(torch.jit.script(net)).save("frozen.pt")
exported = torch.export.export(net, (x,))
torch.export.save(exported, "exported.pt2")
for name in ("script.pt", "trace.pt", "frozen.pt", "exported.pt2"):
    artefacts[name] = entries(name)
program = json.loads(artefacts["exported.pt2"].pop("exported/models/model.json"))
for node in program["graph_module"]["graph"]["nodes"]:
    del node["metadata"]  # paths, and what kind of callable made it
artefacts["exported program"] = program
symbolic = torch.fx.symbolic_trace(net)
targets = [node.target for node in symbolic.graph.nodes if node.op == "call_function"]
assert {F.gelu, F.linear, F.scaled_dot_product_attention} < set(targets)
artefacts["fx"] = symbolic.code.replace("torch._C._nn.", "torch.nn.functional.")
with package.PackageExporter("package.pt") as exporter:
    exporter.extern("torch.**")
    exporter.save_pickle("models", "net.pkl", nn.Sequential(net.conv, nn.LayerNorm(5)))
artefacts["package.pt"] = {
    name: data for name, data in entries("package.pt").items() if not name.endswith(".pkl")
}
runs["package"] = package.PackageImporter("package.pt").load_pickle("models", "net.pkl")(x)

runs["eager"] = net(x)
runs["script"] = scripted(x)
runs["script, loaded"] = torch.jit.load("script.pt")(x)
runs["trace"] = torch.jit.load("trace.pt")(x)
artefacts["frozen, run"] = torch.jit.load("frozen.pt")(x).tolist()  # it owns no parameter
runs["fx"] = symbolic(x)
runs["export"] = exported.module()(x)
"""

FILES = """
whole, fresh = io.BytesIO(), torch.optim.AdamW(net.parameters())
torch.save([net.conv, net.norm, net.inner, net.state_dict(), fresh], whole)
artefacts["torch.save"] = whole.getvalue()
import pickle
from multiprocessing.reduction import ForkingPickler
artefacts["pickle"] = b"autoamp" in pickle.dumps([net.inner, optimizer])
artefacts["forking pickle"] = b"autoamp" in bytes(ForkingPickler.dumps(net.inner))
twin = copy.deepcopy(net)
artefacts["attributes"] = [sorted(vars(module)) for module in (*net.modules(), *twin.modules())]
artefacts["hooks"] = [
    [len(getattr(module, f"_{kind}_hooks")) for kind in ("forward", "forward_pre", "backward")]
    for module in net.modules()
]
assert torch.equal(twin(x), net(x))
"""

OVERRIDES = """
from torch import overrides
functions = overrides.get_overridable_functions()
artefacts["overridable"] = {
    space.__name__: sorted({function.__name__ for function in found})
    for space, found in functions.items()
    if hasattr(space, "__name__")
}
testing = overrides.get_testing_overrides()
artefacts["testing"] = sorted({function.__name__ for function in testing})
names = "linear", "scaled_dot_product_attention", "gelu"
artefacts["tables"] = [
    (
        overrides.resolve_name(getattr(F, name)),
        getattr(F, name) in testing,
        getattr(F, name) in functions[F],
        getattr(F, name) in overrides.get_ignored_functions(),
        str(inspect.signature(testing[getattr(F, name)])),
    )
    for name in names
]
tensor_names = "numpy", "register_hook", "__setitem__", "retain_grad"
artefacts["tensor tables"] = [
    (overrides.resolve_name(getattr(torch.Tensor, name)), getattr(torch.Tensor, name) in testing)
    for name in tensor_names
]

ASKED = []


class Tagged(torch.Tensor):
    handlers = {}

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        ASKED.append(func)
        if func in cls.handlers:
            return cls.handlers[func](*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


tagged = torch.randn(3, 3).as_subclass(Tagged)
Tagged.handlers[F.linear] = lambda x, weight, bias=None: "linear"
Tagged.handlers[F.conv1d] = lambda *args, **kwargs: "conv1d"
Tagged.handlers[torch.Tensor.numpy] = lambda x: "numpy"
artefacts["handlers"] = [
    F.linear(torch.ones(2, 3), tagged),
    F.linear(tagged, weight=torch.ones(3, 3)),
    F.linear(torch.ones(2, 3), torch.ones(3, 3), bias=tagged),
    F.conv1d(tagged, tagged),
    tagged.numpy(),
    type(tagged + 1).__name__,
    type(F.scaled_dot_product_attention(tagged, tagged, tagged)).__name__,
]
weighted = nn.Linear(3, 3, bias=False)
weighted.weight = nn.Parameter(tagged)
artefacts["handlers"].append(weighted(torch.ones(2, 3)))
artefacts["asked for"] = [
    F.linear in ASKED, F.conv1d in ASKED, F.scaled_dot_product_attention in ASKED
]


class Watching(overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        names.append(next((n for n in FUNCTIONS if func is getattr(F, n)), ""))
        return func(*args, **(kwargs or {}))


names, FUNCTIONS = [], ("linear", "gelu", "scaled_dot_product_attention")
with Watching():
    runs["mode"] = net(x)
artefacts["mode"] = [name for name in names if name]
names.clear()
with Watching():
    F.linear(x[0].T, x[1].T)
artefacts["mode, function"] = [name for name in names if name]
with torch.device("cpu"):  # a mode of torch's own
    runs["device"] = net(x)


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        ops.append(func)
        return func(*args, **(kwargs or {}))


ops = []
with Counting():
    net(x)
products = torch.ops.aten.addmm.default, torch.ops.aten.convolution.default
artefacts["dispatch mode"] = [ops.count(product) for product in products]
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    net(x)
artefacts["operations"] = counter.get_total_flops()
"""

END = """
import autoamp
torch.save([artefacts, runs], "result.pt")
"""

ONNX = """
torch.onnx.export(net, (x,), "net.onnx", dynamo={dynamo}, verbose=False)
with open("net.onnx", "rb") as file:
    artefacts["onnx"] = file.read()
import onnx
model = onnx.load("net.onnx")
onnx.checker.check_model(model)
runs["eager"] = net(x)
"""

SCRIPTS = {
    "made": MODEL + MAKE + END,
    "files": MODEL + FILES + END,
    "overrides": MODEL + OVERRIDES + END,
}
if importlib.util.find_spec("onnx"):
    SCRIPTS["onnx"] = MODEL + ONNX.format(dynamo=False) + END
if importlib.util.find_spec("onnxscript"):
    SCRIPTS["onnx, by export"] = MODEL + ONNX.format(dynamo=True) + END


@pytest.fixture(scope="module")
def found(in_children: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What became of each script without autoamp, and with it."""
    fixed = {"PYTHONHASHSEED": "0"}  # TorchScript writes sets in their order
    on = {"AUTO_MIXED_PRECISION": "1", "AUTO_MIXED_PRECISION_DTYPE": "float16"}
    return in_children(SCRIPTS, **fixed), in_children(SCRIPTS, **fixed, **on)


@pytest.mark.parametrize("name", SCRIPTS)
def test_artefacts_are_the_float32_ones_and_run_in_mixed_precision(found: Any, name: str) -> None:
    import torch

    plain, mixed = (outcomes[name] for outcomes in found)
    assert plain.code == mixed.code == 0, (plain.stderr, mixed.stderr)
    (expected, float32), (made, runs) = plain.result, mixed.result
    assert made.keys() == expected.keys()
    assert [key for key in made if made[key] != expected[key]] == []
    for key, value in runs.items():
        torch.testing.assert_close(value, float32[key], rtol=2e-2, atol=2e-2, msg=key)
        assert not torch.equal(value, float32[key]), key
