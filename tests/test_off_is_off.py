"""While the variable is unset or 0, autoamp is as good as not installed; armed, almost so."""

from __future__ import annotations

import json
from importlib.metadata import entry_points

import pytest

from autoamp.patches import PATCHES

TARGETS = [patch.target for patch in PATCHES]
EARLY = """
import sys
early = sorted(sys.modules)
finders = [type(finder).__module__ for finder in sys.meta_path]
"""
LOOK = """
import importlib, json, os, torch
def resolve(target):
    module, _, path = target.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found
def is_ours(function):
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and os.path.basename(os.path.dirname(code.co_filename)) == "autoamp"
def ours():
    return [target for target in TARGETS if is_ours(resolve(target))]
Optimizer, before = torch.optim.Optimizer, ours()
Module = torch.nn.Module
original_call = vars(Module)["__call__"] is vars(Module)["_wrapped_call_impl"]
first = is_ours(vars(Optimizer)["__init__"])
wrapped = Optimizer.__init__
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
second = is_ours(vars(Optimizer)["__init__"])
loaded = [name for name in sys.modules if name.partition(".")[0] in ("autoamp", "wrapt", "yaml")]
print(json.dumps({
    "early": early, "finders": finders, "ours": [before, ours()], "call": original_call,
    "look": [first, second], "init": Optimizer.__init__ is getattr(wrapped, "__wrapped__", wrapped),
    "loaded": sorted(loaded), "step": is_ours(vars(torch.optim.SGD)["step"]),
    "late": [type(finder).__module__ for finder in sys.meta_path],
    "vars": sorted(vars(optimizer)),
}))
"""


def autoamps(modules: list[str]) -> list[str]:
    return [name for name in modules if name.partition(".")[0] == "autoamp"]


@pytest.fixture
def look(run_python):
    def run(**variables: str) -> dict:
        result = run_python(f"TARGETS = {TARGETS!r}\n{EARLY}{LOOK}", **variables)
        assert (result.returncode, result.stderr) == (0, "")
        return json.loads(result.stdout)

    return run


installed = pytest.mark.skipif(
    not entry_points(group="torch.backends", name="autoamp"),
    reason="torch learns of autoamp from pip's metadata, and here is none: pip install . brings it",
)


@pytest.mark.parametrize("value", [None, "", "0"])
@installed
def test_a_process_in_which_it_is_off_is_as_without_autoamp(look, value):
    found = look(**({} if value is None else {"AUTO_MIXED_PRECISION": value}))
    assert autoamps(found["early"]) == []
    assert not {"wrapt", "yaml"} & set(found["early"])
    assert autoamps(found["finders"] + found["late"]) == []
    assert found["ours"] == [[], []]
    assert found["call"] is True
    assert found["loaded"] == ["autoamp", "autoamp.bootstrap"]  # what torch's entry point loads
    may_be_set_late = value != "0"  # the first optimizer looks again
    assert found["look"] == [may_be_set_late, False]
    assert found["init"] is True
    assert found["step"] is False
    assert [name for name in found["vars"] if "autoamp" in name] == []


MODULES = "import sys, json; print(json.dumps(sorted(sys.modules)))"


def test_a_process_that_never_imports_torch_pays_for_two_small_modules(run_python):
    armed = run_python(MODULES, AUTO_MIXED_PRECISION="1")
    plain = run_python(MODULES)
    assert (armed.returncode, armed.stderr, plain.stderr) == (0, "", "")
    loaded, before = json.loads(armed.stdout), json.loads(plain.stdout)
    assert autoamps(loaded) == ["autoamp", "autoamp.bootstrap"]
    assert autoamps(before) == []
    assert not {"wrapt", "yaml", "torch", "logging", "dataclasses", "typing"} & {
        name for name in loaded if name not in before
    }
    assert not {"wrapt", "yaml", "torch", "logging", "dataclasses"} & set(loaded)


def test_the_look_at_the_first_optimizer_gives_way_to_somebody_elses_wrapper(run_python):
    result = run_python(
        "import torch\n"
        "from torch.optim import Optimizer\n"
        "ours, calls = Optimizer.__init__, []\n"
        "def theirs(self, *args, **kwargs):\n"
        "    calls.append(1)\n"
        "    ours(self, *args, **kwargs)\n"
        "Optimizer.__init__ = theirs\n"
        "for _ in range(2):\n"
        "    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)\n"
        "print(Optimizer.__init__ is theirs, len(calls))\n"
    )
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "True 2\n")
