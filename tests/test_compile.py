"""Compiled code runs in the precision of eager code: every backend, one graph, no recompiles."""

from __future__ import annotations

import pytest

SCRIPT = """
import sys
import torch
from torch import nn
if "dynamo first" in sys.argv:
    import torch._dynamo
    import autoamp
    autoamp.enable()

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x):
        return self.second(self.first(x))


net, x = Net(), torch.randn(4, 8)
backend, dtype = sys.argv[1], getattr(torch, sys.argv[2])


def loss_of(x):
    out = net(x)
    assert out.dtype is torch.float32, out.dtype
    return out.pow(2).mean()


def step(function):
    net.zero_grad()
    loss = function(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in net.parameters())]


from torch._dynamo.utils import counters
compiled = torch.compile(loss_of, backend=backend, fullgraph=True)
found = step(compiled)  # compiled before any eager region
for _ in range(3):
    step(compiled)
assert counters["stats"]["unique_graphs"] == 1, counters["stats"]
eager = step(loss_of)
module = torch.compile(net, backend=backend, fullgraph=True)
of_module = step(lambda x: module(x).pow(2).mean())
import autoamp
with autoamp.off():
    plain = step(loss_of)
tolerance = dict(rtol=0, atol=0) if backend != "inductor" else dict(rtol=2e-2, atol=2e-3)
torch.testing.assert_close(found, eager, **tolerance)
torch.testing.assert_close(of_module, eager, **tolerance)
assert not torch.equal(found[0], plain[0]), "the compiled function ran in float32"

seen = []
def note(graph, inputs):
    seen.extend(node.meta["example_value"].dtype for node in graph.graph.nodes
                if "linear" in str(node.target))
    return graph.forward
torch._dynamo.reset()
torch.compile(loss_of, backend=note, fullgraph=True)(x)
assert seen == [dtype, dtype], seen

product = torch.compile(lambda a: a @ a, backend=backend)
a = torch.randn(8, 8)
assert torch.equal(product(a), a @ a), "arithmetic outside modules must stay float32"
scale = autoamp.status()["loss_scale"]["mode"]
assert scale == ("dynamic" if dtype is torch.float16 else "off"), scale
print("same")
"""


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_compiled_functions_and_modules_equal_eager_ones(run_python, backend, dtype) -> None:
    result = run_python(
        SCRIPT, backend, dtype, AUTO_MIXED_PRECISION="torch", AUTO_MIXED_PRECISION_DTYPE=dtype
    )
    assert result.stdout == "same\n", result.stderr


def test_dynamo_imported_before_activation_makes_no_difference(run_python) -> None:
    result = run_python(
        SCRIPT, "aot_eager", "bfloat16", "dynamo first", AUTO_MIXED_PRECISION_DTYPE="bfloat16"
    )
    assert result.stdout == "same\n", result.stderr


COMPILED_STEP = """
import sys
import torch
from torch import nn
import autoamp


def train(compiled):
    torch.manual_seed(0)
    net, x = nn.Linear(4, 4), torch.ones(2, 4)
    optimizer = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.1))
    step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
    for _ in range(12):
        optimizer.zero_grad()
        net(x).pow(2).mean().backward()
        step()
    return net.weight.detach()


eager = train(False)
scale = autoamp.status()["loss_scale"]
autoamp.disable()
autoamp.enable(sys.argv[1])
# In BF16 the step is compiled, and Adam rounds differently there; in FP16 it runs eagerly.
tolerance = 0.0 if scale["mode"] == "dynamic" else 2e-3
torch.testing.assert_close(train(True), eager, rtol=0.0, atol=tolerance)
print(autoamp.status()["loss_scale"] == scale, scale["mode"])
"""


@pytest.mark.parametrize(("dtype", "mode"), [("float16", "dynamic"), ("bfloat16", "off")])
def test_a_compiled_optimizer_step_is_gated_like_an_eager_one(
    run_python, tmp_path, dtype, mode
) -> None:
    """At this scale the first steps overflow."""
    policy = tmp_path / "high.yaml"
    policy.write_text("extends: torch\nloss_scale: {init: 16777216}\n")
    result = run_python(
        COMPILED_STEP,
        str(policy),
        AUTO_MIXED_PRECISION=str(policy),
        AUTO_MIXED_PRECISION_DTYPE=dtype,
    )
    assert result.stdout == f"True {mode}\n", result.stderr


TRACED_BACKWARD = """
import sys
import torch
import torch._dynamo.config as config
import autoamp

config.trace_autograd_ops = True
model = torch.nn.Linear(4, 4)

def step(x):
    loss = (model(x) * 2.0**-24).sum()
    loss.backward()
    return loss.detach()

dtypes = []
def backend(graph, inputs):
    dtypes.extend(node.meta["example_value"].dtype for node in graph.graph.nodes
                  if "linear" in str(node.target))
    return graph.forward

for _ in range(2):
    torch.compile(step, backend=backend, fullgraph=True)(torch.ones(2, 4))
    torch._dynamo.reset()
print(set(dtypes), bool((model.weight.grad == 2.0**-22).all()))
"""


def test_a_backward_in_a_graph_is_float32_in_float16_and_a_line_says_so(run_python) -> None:
    result = run_python(
        TRACED_BACKWARD, AUTO_MIXED_PRECISION="torch", AUTO_MIXED_PRECISION_DTYPE="float16"
    )
    assert result.stdout == "{torch.float32} True\n", result.stderr
    assert result.stderr.count("trace_autograd_ops puts backwards") == 1
    result = run_python(
        TRACED_BACKWARD, AUTO_MIXED_PRECISION="torch", AUTO_MIXED_PRECISION_DTYPE="bfloat16"
    )
    assert result.stdout == "{torch.bfloat16} True\n", result.stderr
