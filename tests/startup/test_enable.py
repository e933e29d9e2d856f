"""From code: enable, disable, and the look at the variable when the first optimizer is made."""

import pytest
from environments import doors

ENABLE = "import autoamp; autoamp.enable()\n"


def test_enable_imports_torch_and_activates(current):
    report = current.report(ENABLE + "import sys; print('torch' in sys.modules)")
    assert report.calls == [{"door": "autoamp.enable", "policy": None, "complete": True}]
    assert (report.phase, report.door, report.printed) == ("active", "autoamp.enable", ["True"])


def test_enable_after_torch_activates(current):
    assert doors(current.report("import torch\n" + ENABLE)) == ["autoamp.enable"]


def test_the_policy_given_in_code_comes_before_the_one_in_the_environment(current):
    report = current.on().report("import autoamp; autoamp.enable('bf16'); import torch")
    assert report.calls == [{"door": "autoamp.enable", "policy": "bf16", "complete": True}]


def test_enable_takes_a_path(current):
    script = "import autoamp, pathlib; autoamp.enable(pathlib.Path('mine.yaml'))"
    assert current.report(script).calls[0]["policy"] == "mine.yaml"


@pytest.mark.parametrize("again", ["enable()", "enable('bf16')"])
def test_enable_again_with_the_same_or_no_policy_changes_nothing(current, again):
    report = current.report(f"import autoamp; autoamp.enable('bf16'); autoamp.{again}")
    assert len(report.calls) == 1


@pytest.mark.parametrize(
    "variables", [{"AUTO_MIXED_PRECISION": "bf16"}, {"AUTO_MIXED_PRECISION_POLICY": "bf16"}]
)
def test_enable_with_the_policy_that_the_environment_has_activated_changes_nothing(
    current, variables
):
    report = current.on(**variables).report("import torch, autoamp; autoamp.enable('bf16')")
    assert doors(report) == [".pth"]


def test_enable_with_another_policy_asks_to_disable_first(current):
    script = (
        "import torch, autoamp\n"
        "try: autoamp.enable('fp16')\n"
        "except RuntimeError as error: print(error)\n"
        "autoamp.disable(); autoamp.enable('fp16')\n"
    )
    report = current.on().report(script)
    message = "autoamp.enable('fp16'): already active with policy 'default'"
    assert report.printed == [f"{message}; call autoamp.disable() first."]
    assert report.calls[1:] == [
        "deactivated",
        {"door": "autoamp.enable", "policy": "fp16", "complete": True},
    ]


def test_the_operator_who_switched_it_off_outranks_enable(current):
    report = current.report(ENABLE, AUTO_MIXED_PRECISION="0")
    assert (report.calls, report.phase, report.stderr) == ([], "off", "")
    assert report.reason == "AUTO_MIXED_PRECISION is off, which outranks autoamp.enable()"
    assert "torch" not in report.modules


def test_enable_without_torch_says_what_to_install(current):
    missing = "import sys; sys.modules['torch'] = None; from autoamp import enable\n"
    report = current.report(missing + "enable()")
    assert report.phase == "failed"
    assert report.stderr == (
        "autoamp: off in this process: torch is not installed (pip install torch); "
        "the program continues in float32\n"
    )


def test_a_failed_enable_costs_one_line_and_can_be_tried_again(current):
    script = ENABLE + "import os; os.environ['STUB_ACTIVATE'] = ''; autoamp.enable()"
    report = current.report(script, STUB_ACTIVATE="raise RuntimeError('half\\nway')")
    assert report.stderr == (
        "autoamp: off in this process: RuntimeError: half way; the program continues in float32\n"
    )
    assert (len(report.calls), report.phase, report.reason) == (2, "active", "")


def test_a_failed_enable_is_raised_where_strictness_is_asked_for(current):
    script = (
        "from autoamp import enable, PolicyError\n"
        "try: enable('mine')\n"
        "except PolicyError as error: print(error)\n"
    )
    fails = "from autoamp.errors import PolicyError; raise PolicyError('mine.yaml:1:1: no')"
    report = current.report(script, STUB_ACTIVATE=fails, AUTO_MIXED_PRECISION_STRICT="1")
    assert (report.printed, report.stderr, report.phase) == (["mine.yaml:1:1: no"], "", "failed")


def test_disable_deactivates_once_and_no_door_opens_again(current):
    script = "import torch, autoamp; autoamp.disable(); autoamp.disable()\n"
    doors_again = "from autoamp.bootstrap import start, start_in_torch; start(); start_in_torch()"
    report = current.on().report(script + doors_again + "; torch.optim.SGD()")
    assert report.calls[1:] == ["deactivated"]
    assert (report.phase, report.reason) == ("off", "autoamp.disable() was called")


def test_disable_before_torch_keeps_it_off(current):
    report = current.on().report("import autoamp; autoamp.disable(); import torch")
    assert (report.calls, report.phase) == ([], "off")
    assert "WhenImported" not in report.finders


OPTIMIZER = "import os, torch; Optimizer = torch.optim.Optimizer; real = Optimizer.__init__\n"
SET = "os.environ['AUTO_MIXED_PRECISION'] = 'bf16'\n"


def test_a_variable_set_after_torch_counts_until_the_first_optimizer(current):
    script = OPTIMIZER + SET + "print(torch.optim.SGD([1]).parameters)"
    report = current.report(script)
    assert (doors(report), report.door) == (["Optimizer.__init__"], "Optimizer.__init__")
    assert report.printed == ["[1]"]


def test_the_look_at_the_first_optimizer_removes_itself(current):
    script = OPTIMIZER + (
        "real = Optimizer.__init__.__wrapped__\n"
        "torch.optim.SGD(); print(Optimizer.__init__ is real, '__init__' in vars(Optimizer))\n"
    )
    report = current.report(script + SET + "torch.optim.SGD()")
    assert report.printed == ["True True"]
    assert (report.calls, report.phase) == ([], "idle")


def test_the_look_is_deleted_where_the_class_had_no_init_of_its_own(own):
    base = "class Base:\n    def __init__(self, parameters=()): pass\n"
    optimizers = base + "class Optimizer(Base): pass\nclass SGD(Optimizer): pass\n"
    (own.site / "torch" / "optim.py").write_text(optimizers)
    script = OPTIMIZER + SET + "torch.optim.SGD(); print('__init__' in vars(Optimizer))"
    report = own.report(script)
    assert report.printed == ["False"]
    assert doors(report) == ["Optimizer.__init__"]


def test_the_look_passes_on_under_somebody_elses_wrapper(current):
    wrap = "def theirs(self, *a): print('theirs'); real(self, *a)\nOptimizer.__init__ = theirs\n"
    script = OPTIMIZER + wrap + SET + "torch.optim.SGD(); torch.optim.SGD()\n"
    report = current.report(script + "print(Optimizer.__init__ is theirs)")
    assert report.printed == ["theirs", "theirs", "True"]
    assert doors(report) == ["Optimizer.__init__"]


@pytest.mark.parametrize("value", ["0", "1"])
def test_there_is_no_look_where_the_question_is_already_answered(current, value):
    report = current.report(
        OPTIMIZER + "print(hasattr(real, '__wrapped__'))", AUTO_MIXED_PRECISION=value
    )
    assert report.printed == ["False"]


def test_enable_and_disable_take_the_look_away(current):
    script = OPTIMIZER + "import autoamp; autoamp.{}()\n"
    script += "print(Optimizer.__init__ is real.__wrapped__)"
    for function in ("enable", "disable"):
        assert current.report(script.format(function)).printed == ["True"]


def test_a_torch_without_optimizers_is_still_imported(own):
    (own.site / "torch" / "optim.py").write_text("")
    assert own.report("import torch").stderr == ""


def test_activation_may_decline_and_says_why(current):
    report = current.on(STUB_DECLINES="AUTO_MIXED_PRECISION_ONLY excludes x.py").report(
        "import torch"
    )
    assert (report.phase, report.stderr) == ("off", "")
    assert report.reason == "AUTO_MIXED_PRECISION_ONLY excludes x.py"


def test_the_package_serves_its_names_and_no_others(current):
    script = (
        "import autoamp\n"
        "print(autoamp.__version__, autoamp.PolicyError.__name__)\n"
        "print(set(autoamp.__all__) <= set(dir(autoamp)), hasattr(autoamp, 'nothing'))\n"
    )
    assert current.report(script).printed == ["0.1.0 PolicyError", "True False"]
