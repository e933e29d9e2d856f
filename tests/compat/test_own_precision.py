"""Scripts that have mixed precision of their own get what they get without autoamp, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

LOOP = """
import sys, warnings
import torch
from torch import nn
warnings.simplefilter("ignore")  # some spellings are deprecated
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))
CONTEXT = {context}
scaler = {scaler}
{setup}
seen = []
for step in range(6):
    optimizer.zero_grad()
    with CONTEXT():
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    seen += [out.detach(), loss.detach()]
    if {evaluates}:
        with torch.no_grad():
            seen.append(model(x))  # in float32: outside the context
torch.save([seen, model.state_dict(), optimizer.state_dict(), scaler and scaler.state_dict()],
           "result.pt")
"""

BF16 = 'lambda: torch.autocast("cpu", torch.bfloat16)'
FP16 = 'lambda: torch.autocast("cpu", torch.float16)'
OFF = 'lambda: torch.autocast("cpu", enabled=False)'
SCALER = 'torch.amp.GradScaler("cpu", init_scale=2.0**{power}, growth_interval=2)'
NO_SCALER = 'torch.amp.GradScaler("cpu", enabled=False)'
AS_DECORATOR = """
from contextlib import nullcontext as CONTEXT
model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
call = torch.autocast("cpu", torch.bfloat16)(model.__call__)
plain, model = model, lambda x: call(x)
model.parameters, model.state_dict = plain.parameters, plain.state_dict
"""
STACKED = """
import contextlib
enter, CONTEXT = CONTEXT, contextlib.ExitStack
def stacked():
    stack = contextlib.ExitStack()
    stack.enter_context(enter())
    return stack
CONTEXT = stacked
"""
STANDS_ASIDE = "autoamp 0.1.0 stands aside: the script has its own torch.autocast"
STAYS = "autoamp: what the script runs in its torch.autocast(enabled=False) stays float32"

OWN = {
    "bfloat16": ({"context": BF16}, STANDS_ASIDE),
    "bfloat16, evaluation outside": ({"context": BF16, "evaluates": True}, STANDS_ASIDE),
    "float16 and a scaler": ({"context": FP16, "scaler": SCALER.format(power=16)}, STANDS_ASIDE),
    "float16 and a scale that overflows, evaluation outside": (
        {"context": FP16, "scaler": SCALER.format(power=28), "evaluates": True},
        STANDS_ASIDE,
    ),
    "an ExitStack": ({"context": BF16, "setup": STACKED, "evaluates": True}, STANDS_ASIDE),
    "a decorator": ({"context": BF16, "setup": AS_DECORATOR}, STANDS_ASIDE),
    "torch.cpu.amp": (
        {
            "context": "lambda: torch.cpu.amp.autocast(dtype=torch.float16)",
            "scaler": "torch.cpu.amp.GradScaler()",
            "evaluates": True,
        },
        STANDS_ASIDE,
    ),
    "torch.cuda.amp, without a GPU": (
        {"context": "torch.cuda.amp.autocast", "scaler": "torch.cuda.amp.GradScaler()"},
        STAYS,
    ),
    "its own flag is off": ({"context": OFF, "scaler": NO_SCALER}, STAYS),
}


BLANKS = {"scaler": "None", "setup": "", "evaluates": False}
HALF_MODEL = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4)).{half}()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
x, y = torch.randn(32, 8).{half}(), torch.randint(0, 4, (32,))
seen = []
for step in range(5):
    optimizer.zero_grad()
    out = model(x)
    assert out.dtype is x.dtype
    loss = nn.functional.cross_entropy(out.float(), y)
    (loss * 128).backward()
    for parameter in model.parameters():
        parameter.grad /= 128
    optimizer.step()
    seen += [out.detach(), loss.detach()]
torch.save([seen, model.state_dict(), optimizer.state_dict()], "result.pt")
"""


WINS_LOCALLY = """
import torch
from torch import nn
import autoamp
from torch._dynamo import config


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):  # a few lines of a model
            x = self.a(x)
            assert x.dtype is torch.bfloat16
        return self.b(x.float())


model, x = Inner(), torch.ones(2, 4)
for _ in range(2):
    model(x).sum().backward()
torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=False).sum().backward()
torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=True).sum().backward()
torch.compile(model, backend="aot_eager", fullgraph=True)(x)
torch.compile(model, backend="eager")(x)
product = nn.Linear(4, 4)
product(x)
if autoamp.status()["active"]:
    print(end=autoamp.status()["devices"]["cpu"]["dtype"])
"""

SCRIPTED = """
import torch


class Scripted(torch.nn.Module):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x


import warnings
warnings.simplefilter("ignore")
torch.save(torch.jit.script(Scripted())(torch.ones(2, 2)), "result.pt")
"""

ENABLED_IN_CODE = """
import torch
import autoamp
autoamp.enable("bf16")
model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
with torch.autocast("cpu", torch.float16):
    model(x)
model(x)
print(autoamp.status()["regions"])
"""


SCRIPTS = {
    **{name: LOOP.format(**{**BLANKS, **parts}) for name, (parts, _) in OWN.items()},
    **{f"a {half} model": HALF_MODEL.format(half=half) for half in ("half", "bfloat16")},
    "contexts inside": WINS_LOCALLY,
    "scripted": SCRIPTED,
}
MODES = ("float16", "bfloat16")


@pytest.fixture(scope="module")
def found(in_children: Any) -> dict[str, Any]:
    """By mode ("" is without autoamp): what became of each script."""
    on = {
        dtype: {"AUTO_MIXED_PRECISION": "1", "AUTO_MIXED_PRECISION_DTYPE": dtype} for dtype in MODES
    }
    return {mode: in_children(SCRIPTS, **on.get(mode, {})) for mode in ("", *MODES)}


def agree(found: Any, name: str, dtype: str) -> list[str]:
    """The script left the same with autoamp and without, to the bit; what autoamp said."""
    import torch

    expected, mixed = found[""][name], found[dtype][name]
    assert (expected.code, expected.stderr) == (0, ""), expected.stderr
    assert (mixed.code, mixed.stdout) == (0, ""), mixed.stderr
    torch.testing.assert_close(mixed.result, expected.result, rtol=0.0, atol=0.0)
    said: list[str] = mixed.said
    return said


@pytest.mark.parametrize("dtype", MODES)
@pytest.mark.parametrize("name", OWN)
def test_a_script_with_its_own_mixed_precision_keeps_it(found: Any, name: str, dtype: str) -> None:
    assert agree(found, name, dtype) == [OWN[name][1]]


@pytest.mark.parametrize("dtype", MODES)
@pytest.mark.parametrize("half", ["half", "bfloat16"])
def test_a_model_that_is_half_already_is_left_alone(found: Any, half: str, dtype: str) -> None:
    word = {"half": "float16"}.get(half, half)
    line = f"autoamp: a model with torch.{word} parameters is left as it is"
    assert agree(found, f"a {half} model", dtype) == [line]


@pytest.mark.parametrize("dtype", MODES)
def test_torchscript_compiles_the_script_s_own_contexts(found: Any, dtype: str) -> None:
    assert agree(found, "scripted", dtype) == []


@pytest.mark.parametrize("dtype", MODES)
def test_contexts_inside_models_and_those_that_torch_opens_win_where_they_are(
    found: Any, dtype: str
) -> None:
    outcome = found[dtype]["contexts inside"]
    assert (outcome.code, outcome.stdout) == (0, dtype), outcome.stderr
    assert len(outcome.said) == 1


def test_who_switches_it_on_in_code_gets_both(run_script: Any) -> None:
    result = run_script(ENABLED_IN_CODE, AUTO_MIXED_PRECISION_DTYPE="bfloat16")
    assert (result.returncode, result.stdout) == (0, "1\n"), result.stderr
