"""What a policy file may say, and what is said about each mistake in one."""

from __future__ import annotations

import os
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoamp import policyfile
from autoamp.errors import PolicyError, SettingsError
from autoamp.grammar import MAX_ARGUMENTS, MAX_ITEMS
from autoamp.policy import (
    DEVICES,
    LossScaleRule,
    ModuleRule,
    OpRule,
    ParameterRule,
    PerformanceRule,
    Policy,
)
from autoamp.settings import Settings

MIXED_DEVICES = {"cuda": "float16", "cpu": "bfloat16", "xpu": "bfloat16", "mps": "float16"}
TORCHS_SCALE = LossScaleRule("dynamic", 65536.0, 2.0, 0.5, 2000, 1, 0.0, float("inf"))
BOUNDED_SCALE = replace(TORCHS_SCALE, min=1.0, max=16777216.0, repeat_first=10)
SHIPPED = {
    "torch": (MIXED_DEVICES, TORCHS_SCALE),
    "default": (MIXED_DEVICES, BOUNDED_SCALE),
    "bf16": (dict.fromkeys(DEVICES, "bfloat16"), BOUNDED_SCALE),
    "fp16": (dict.fromkeys(DEVICES, "float16"), BOUNDED_SCALE),
}


@pytest.fixture
def mine(tmp_path):
    """`mine(text)` writes mine.yaml and loads it."""

    def load(text: str | bytes) -> Policy:
        path = tmp_path / "mine.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return policyfile.load(str(path))

    return load


def message_about(reference: object, origin: str = "AUTO_MIXED_PRECISION") -> str:
    with pytest.raises(PolicyError) as caught:
        policyfile.load(str(reference), origin)
    return str(caught.value)


# --- the shipped ones ----------------------------------------------------------------------------


OTHERS = {"safe", "fast", "tensorflow", "apex-o1", "mxnet", "paddle"}


def test_these_policies_are_shipped():
    assert set(policyfile.shipped()) == {*SHIPPED, *OTHERS}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_policy_is_what_its_file_says(name):
    devices, loss_scale = SHIPPED[name]
    source = str(policyfile.shipped()[name])
    expected = Policy(name, source, devices, loss_scale=loss_scale)
    read = policyfile.load(name)
    besides = {"fixups": "off", "fallback": Policy().fallback, "performance": PerformanceRule()}
    assert replace(read, ops=(), base=expected.base, **besides) == expected
    assert read.fixups == ("off" if name == "torch" else "on")


def test_the_default_policy_runs_float16_by_the_lists_of_cuda_on_every_device():
    assert policyfile.load("default").base == {"float16": "cuda", "bfloat16": "device"}


def test_a_policy_that_says_nothing_is_the_one_in_torch_yaml():
    read = policyfile.load("torch")
    assert replace(read, name="", source="") == Policy()


@pytest.mark.parametrize("name", sorted({*SHIPPED, *OTHERS}))
def test_policies_that_only_imitate_have_no_fixups(name):
    repairs = name in ("default", "fp16", "bf16", "safe", "fast")
    assert policyfile.load(name).fixups == ("on" if repairs else "off")


def test_fixups_are_inherited_and_can_be_said_anew(mine):
    assert mine("extends: default").fixups == "on"
    assert mine("extends: [default, tensorflow]").fixups == "on"
    assert mine("extends: default\nfixups: off").fixups == "off"
    assert mine("fixups: on").fixups == "on"


def test_the_loss_scale_of_policy_torch_is_that_of_grad_scaler():
    theirs = torch.amp.GradScaler("cpu").state_dict()
    ours = policyfile.load("torch").loss_scale
    assert theirs == {
        "scale": ours.init,
        "growth_factor": ours.growth,
        "backoff_factor": ours.backoff,
        "growth_interval": ours.interval,
        "_growth_tracker": 0,
    }


# --- reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "{}"])
def test_an_empty_file_is_policy_torch_under_its_own_name(mine, text, tmp_path):
    path = str(tmp_path / "mine.yaml")
    assert mine(text) == Policy(path, path)


def test_what_a_file_does_not_say_comes_from_the_one_it_extends(mine):
    policy = mine(
        "extends: fp16\ndevices: {cuda: bfloat16, mps: off}\nloss_scale: {init: 128, max: 1024}\n"
    )
    assert policy.devices == {
        "cuda": "bfloat16",
        "cpu": "float16",
        "xpu": "float16",
        "mps": "off",
    }
    assert policy.loss_scale == replace(BOUNDED_SCALE, init=128.0, max=1024.0)


def test_extends_counts_wherever_it_stands_in_the_file(mine):
    policy = mine("loss_scale: {min: 2}\nextends: default\n")
    assert policy.loss_scale == replace(BOUNDED_SCALE, min=2.0)


def test_a_path_in_extends_is_relative_to_the_file_that_says_it(tmp_path, monkeypatch):
    folder, elsewhere = tmp_path / "team", tmp_path / "elsewhere"
    (folder / "base").mkdir(parents=True)
    elsewhere.mkdir()
    (folder / "mine.yaml").write_text("extends: base/a.yaml\nloss_scale: {init: 8}\n")
    (folder / "base" / "a.yaml").write_text("extends: ../b.yaml\noutputs: keep\n")
    (folder / "b.yaml").write_text("extends: bf16\ndevices: {mps: off}\n")
    monkeypatch.chdir(elsewhere)
    policy = policyfile.load(f"..{os.sep}team{os.sep}mine.yaml")
    assert policy.name == "../team/mine.yaml"
    assert (policy.outputs, policy.loss_scale.init, policy.loss_scale.min) == ("keep", 8.0, 1.0)
    assert policy.devices == {**dict.fromkeys(DEVICES, "bfloat16"), "mps": "off"}


def test_a_shipped_policy_needs_no_working_directory(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert policyfile.load("default").name == "default"


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("{init: 1e3}", "init", 1000.0),
        ("{init: '7'}", "init", 7.0),
        ("{interval: +5}", "interval", 5),
        ("{max: .inf}", "max", float("inf")),
        ("{max: +.inf}", "max", float("inf")),
        ("{min: 0}", "min", 0.0),
        ("{hysteresis: 3}", "hysteresis", 3),
        ("{mode: off}", "mode", "off"),
        ("{mode: static}", "mode", "static"),
    ],
)
def test_a_value_of_the_loss_scale_is_read_as(mine, text, field, value):
    policy = mine(f"loss_scale: {text}")
    assert policy.loss_scale == replace(TORCHS_SCALE, **{field: value})
    assert type(asdict(policy.loss_scale)[field]) is type(value)


def test_a_byte_order_mark_is_no_mistake(mine):
    assert mine("\ufeffoutputs: keep").outputs == "keep"


def test_an_anchor_repeats_a_word_or_a_map(mine):
    policy = mine("devices: {cuda: &half bfloat16, mps: *half}")
    assert policy.devices == dict.fromkeys(DEVICES, "bfloat16")


# --- ops -----------------------------------------------------------------------------------------


def said_of(policy: Policy) -> list[tuple[str, str]]:
    """(op, its list) of every rule in order; ``-list`` for a removal."""
    return [(rule.op, rule.into or f"-{rule.leaves}") for rule in policy.ops]


def test_the_rules_of_a_file_are_removals_then_additions_then_conditions(mine, tmp_path):
    policy = mine(
        """
ops:
  when:
  - {op: torch.Tensor.norm, when: {p: 1}, precision: lower}
  widest: {add: [torch.linalg.vecdot], remove: ['aten::cat']}
  lower: {add: [F.layer_norm, gelu], remove: []}
  float32: {remove: [torch.softmax]}
"""
    )
    path = tmp_path / "mine.yaml"
    assert policy.ops == (
        OpRule("cat", "", f"{path}:5:49", leaves="widest"),
        OpRule("softmax", "", f"{path}:7:22", leaves="float32"),
        OpRule("linalg_vecdot", "widest", f"{path}:5:18"),
        OpRule("layer_norm", "lower", f"{path}:6:17"),
        OpRule("gelu", "lower", f"{path}:6:31"),
        OpRule("norm", "lower", f"{path}:4:10", when=(("p", 1),)),
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.2", 0.2),
        ("1", 1),
        ("+1", 1),
        ("-1", -1),
        ("1.", 1.0),
        (".5", 0.5),
        ("1e-5", 1e-5),
        ("-1.5E+3", -1500.0),
        (".inf", float("inf")),
        ("-.inf", float("-inf")),
        ("1234567890123456789012", 1234567890123456789012.0),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("tanh", "tanh"),
        ("off", "off"),
        ("No", "No"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("''", ""),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
    ],
)
def test_a_value_of_an_argument_is_what_yaml_1_2_makes_of_it(mine, text, value):
    policy = mine(f"ops: {{when: [{{op: gelu, when: {{approximate: {text}}}, precision: lower}}]}}")
    ((name, read),) = policy.ops[0].when
    assert (name, read, type(read)) == ("approximate", value, type(value))


def test_an_op_can_have_several_conditions_and_a_list(mine):
    policy = mine(
        """
ops:
  lower: {add: [leaky_relu]}
  when:
  - {op: leaky_relu, when: {negative_slope: 0.2}, precision: float32}
  - {op: leaky_relu, when: {negative_slope: 0.3}, precision: float32}
  - {op: leaky_relu, when: {negative_slope: 0.3, inplace: true}, precision: widest}
"""
    )
    assert said_of(policy) == [
        ("leaky_relu", "lower"),
        ("leaky_relu", "float32"),
        ("leaky_relu", "float32"),
        ("leaky_relu", "widest"),
    ]
    assert policy.ops[3].when == (("negative_slope", 0.3), ("inplace", True))


@pytest.mark.parametrize(
    ("text", "ops"),
    [
        (
            "{float32: {remove: [softmax]}, lower: {add: [softmax]}}",
            [("softmax", "-float32"), ("softmax", "lower")],
        ),
        (
            "{float32: {remove: [softmax]}, widest: {remove: [softmax]}}",
            [("softmax", "-float32"), ("softmax", "-widest")],
        ),
        (
            "{lower: {add: [interpolate, upsample_bicubic2d]}}",
            [("interpolate", "lower"), ("upsample_bicubic2d", "lower")],
        ),
    ],
    ids=["out of one into another", "out of both", "an op and a name for more than that"],
)
def test_two_lists_of_one_file_may_name_an_op_where_they_agree(mine, text, ops):
    assert said_of(mine(f"ops: {text}")) == ops


def test_a_file_may_contradict_the_one_it_extends(mine, tmp_path):
    (tmp_path / "base.yaml").write_text("ops: {float32: {add: [relu], remove: [exp]}}")
    policy = mine("extends: base.yaml\nops: {lower: {add: [relu]}, float32: {add: [exp]}}")
    assert said_of(policy) == [
        ("exp", "-float32"),
        ("relu", "float32"),
        ("relu", "lower"),
        ("exp", "float32"),
    ]
    assert [rule.origin.split("/")[-1] for rule in policy.ops] == [
        "base.yaml:1:39",
        "base.yaml:1:23",
        "mine.yaml:2:21",
        "mine.yaml:2:45",
    ]


@pytest.mark.parametrize(
    ("text", "base"),
    [
        ("cuda", {"float16": "cuda", "bfloat16": "cuda"}),
        ("none", {"float16": "none", "bfloat16": "none"}),
        ("{float16: cuda}", {"float16": "cuda", "bfloat16": "none"}),
        ("{bfloat16: device, float16: cuda}", {"float16": "cuda", "bfloat16": "device"}),
        ("{}", {"float16": "device", "bfloat16": "none"}),
    ],
)
def test_the_lists_to_start_from_are_one_for_all_or_said_by_precision(mine, tmp_path, text, base):
    (tmp_path / "base.yaml").write_text("ops: {base: {bfloat16: none}}")
    assert mine(f"extends: base.yaml\nops: {{base: {text}}}").base == base


def test_operands_and_results_of_lower(mine, tmp_path):
    (tmp_path / "base.yaml").write_text("ops: {operands: parameter, results: float32}")
    policy = mine("extends: base.yaml\nops: {results: keep}")
    assert (policy.lower_operands, policy.lower_results) == ("parameter", "keep")
    assert (Policy().lower_operands, Policy().lower_results) == ("any", "keep")


# --- modules and parameters ----------------------------------------------------------------------


def test_rules_for_modules_and_parameters_come_in_order(mine, tmp_path):
    policy = mine(
        """
modules:
- {name: "decoder.*.attn", precision: float32}
- {regex: 'decoder[.][0-9]+', precision: lower, steps: {from: 10, to: 1000}}
- {type: torch.nn.LayerNorm, precision: bfloat16, steps: {to: 5}}
- {type: Linear, precision: float16, steps: {from: 5}}
parameters:
- {name: "embed.*"}
- {regex: ".*bias"}
"""
    )
    path = tmp_path / "mine.yaml"
    assert policy.modules == (
        ModuleRule("float32", f"{path}:3:3", name="decoder.*.attn"),
        ModuleRule("lower", f"{path}:4:3", regex="decoder[.][0-9]+", first=10, last=1000),
        ModuleRule("bfloat16", f"{path}:5:3", type="torch.nn.LayerNorm", last=5),
        ModuleRule("float16", f"{path}:6:3", type="Linear", first=5),
    )
    assert policy.parameters == (
        ParameterRule(f"{path}:8:3", name="embed.*"),
        ParameterRule(f"{path}:9:3", regex=".*bias"),
    )


def test_the_empty_name_is_that_of_the_outermost_module(mine, tmp_path):
    """As in `torch.nn.Module.named_modules`."""
    policy = mine("modules: [{name: '', precision: float32}]")
    assert policy.modules == (ModuleRule("float32", f"{tmp_path / 'mine.yaml'}:1:11", name=""),)


def test_a_pattern_that_python_warns_about_is_read_in_silence(mine):
    """A set in a set may mean something else in a later Python; warnings are errors here."""
    assert mine("modules: [{regex: '[[a]', precision: lower}]").modules[0].regex == "[[a]"


# --- several files -------------------------------------------------------------------------------


def written(folder, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)


@pytest.mark.parametrize("quote", ["[{}]", "{}"])
def test_a_list_of_one_is_the_same_as_one_word(mine, quote):
    policy = mine(f"extends: {quote.format('bf16')}")
    assert replace(policy, name="", source="") == replace(
        policyfile.load("bf16"), name="", source=""
    )


def test_an_empty_list_extends_nothing(mine):
    assert replace(mine("extends: []"), name="", source="") == Policy()


def test_later_files_win_over_earlier_ones_in_what_they_say(mine, tmp_path):
    written(
        tmp_path,
        a="devices: {cuda: bfloat16, cpu: off}\noutputs: keep\nloss_scale: {init: 8, growth: 4}\n"
        "ops: {base: {float16: none}, operands: parameter}",
        b="devices: {cpu: float16, mps: off}\nloss_scale: {init: 16, backoff: 0.25}\n"
        "ops: {base: {bfloat16: cuda}}",
    )
    policy = mine("extends: [a.yaml, b.yaml]\nloss_scale: {interval: 7}")
    assert policy.devices == {
        "cuda": "bfloat16",
        "cpu": "float16",
        "xpu": "bfloat16",
        "mps": "off",
    }
    assert policy.outputs == "keep"
    assert policy.loss_scale == replace(
        TORCHS_SCALE, init=16.0, growth=4.0, backoff=0.25, interval=7
    )
    assert policy.base == {"float16": "none", "bfloat16": "cuda"}
    assert policy.lower_operands == "parameter"


def test_a_file_that_says_nothing_of_a_section_does_not_reset_it(mine, tmp_path):
    """Not even to what the files say that it extends: these have been read, and count once."""
    written(tmp_path, team="extends: default\noutputs: keep")
    policy = mine("extends: [bf16, ./team.yaml]")
    assert policy.devices == dict.fromkeys(DEVICES, "bfloat16")
    assert (policy.outputs, policy.loss_scale) == ("keep", BOUNDED_SCALE)


def test_rules_of_ops_are_in_the_order_of_the_files_and_those_of_modules_in_the_reverse(
    mine, tmp_path
):
    rules = (
        "ops: {{lower: {{add: [{op}]}}}}\nmodules: [{{name: {name}, precision: lower}}]\n"
        "parameters: [{{name: {name}}}]\n"
    )
    written(
        tmp_path,
        root=rules.format(op="relu", name="root"),
        a="extends: root.yaml\n" + rules.format(op="gelu", name="a"),
        b="extends: root.yaml\n" + rules.format(op="silu", name="b"),
    )
    policy = mine("extends: [a.yaml, b.yaml]\n" + rules.format(op="mish", name="mine"))
    assert said_of(policy) == [(op, "lower") for op in ("relu", "gelu", "silu", "mish")]
    assert [rule.name for rule in policy.modules] == ["mine", "b", "a", "root"]
    assert [rule.name for rule in policy.parameters] == ["mine", "b", "a", "root"]


def test_a_base_that_two_share_is_read_once_and_may_be_named_first(mine, tmp_path):
    written(tmp_path, root="ops: {lower: {add: [relu]}}", a="extends: root.yaml")
    assert said_of(mine("extends: [root.yaml, a.yaml]")) == [("relu", "lower")]


def test_files_that_only_together_leave_the_bounds_of_the_scale_are_told(mine, tmp_path):
    written(tmp_path, a="loss_scale: {init: 1024}", b="loss_scale: {min: 2048}")
    with pytest.raises(PolicyError) as caught:
        mine("extends: [a.yaml, b.yaml]\noutputs: keep")
    assert str(caught.value) == (
        f"{tmp_path / 'b.yaml'}:1:13: loss_scale.init is 1024, outside min 2048 to max inf; "
        "change init, min or max."
    )
    assert mine("extends: [a.yaml, b.yaml]\nloss_scale: {init: 4096}").loss_scale.init == 4096


def test_a_long_chain_of_files_is_refused(tmp_path):
    for n in range(60):
        (tmp_path / f"f{n}.yaml").write_text(f"extends: f{n + 1}.yaml")
    assert message_about(tmp_path / "f0.yaml") == (
        f"{tmp_path / 'f49.yaml'}:1:10: more than 50 files, each extending the next."
    )


# --- performance ---------------------------------------------------------------------------------


def test_performance_is_what_the_last_file_says_of_each_key(mine, tmp_path):
    written(tmp_path, base="performance: {optimizer: fused, float32_matmul: tf32}")
    policy = mine("extends: base.yaml\nperformance: {optimizer: keep, weight_cache: on}")
    assert policy.performance == PerformanceRule(float32_matmul="tf32", weight_cache="on")


def test_without_a_word_nothing_is_done_for_performance(mine):
    said = (
        "performance: {memory_format: keep, optimizer: keep, float32_matmul: keep, "
        "cudnn_benchmark: keep, weight_cache: off, stand_down: off}"
    )
    assert replace(mine(said), name="", source="") == Policy()
    assert Policy().performance == PerformanceRule()


# --- the environment -----------------------------------------------------------------------------


def test_the_variables_add_removals_then_additions_behind_all_others(mine):
    policy = mine("ops: {float32: {remove: [softmax]}}")
    overridden = policyfile.with_overrides(
        policy,
        Settings(
            lower_add=("torch.softmax", "F.gelu"),
            lower_remove=("addr",),
            float32_add=("aten::relu",),
            float32_remove=("softmax",),
            widest_add=("mul",),
            widest_remove=("cat",),
        ),
    )
    name = "AUTO_MIXED_PRECISION_"
    assert overridden == replace(
        policy,
        ops=(
            *policy.ops,
            OpRule("addr", "", name + "LOWER_REMOVE", leaves="lower"),
            OpRule("softmax", "", name + "FLOAT32_REMOVE", leaves="float32"),
            OpRule("cat", "", name + "WIDEST_REMOVE", leaves="widest"),
            OpRule("softmax", "lower", name + "LOWER_ADD"),
            OpRule("gelu", "lower", name + "LOWER_ADD"),
            OpRule("relu", "float32", name + "FLOAT32_ADD"),
            OpRule("mul", "widest", name + "WIDEST_ADD"),
        ),
    )


def test_variables_that_are_not_set_change_nothing(mine):
    policy = mine("ops: {float32: {remove: [softmax]}}")
    assert policyfile.with_overrides(policy, Settings()) == policy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"lower_add": ("relu", "sofmax")},
            "LOWER_ADD: unknown op 'sofmax'. Did you mean 'softmax'?",
        ),
        (
            {"widest_remove": ("F.softmin",)},
            "WIDEST_REMOVE: 'F.softmin' is made of other ops; name those: neg, softmax.",
        ),
        (
            {"lower_add": ("softmax",), "float32_add": ("F.softmax",)},
            "FLOAT32_ADD: op 'F.softmax' ('softmax') is in AUTO_MIXED_PRECISION_LOWER_ADD too; "
            "an op is in one list: keep one.",
        ),
        (
            {"float32_add": ("softmax",), "float32_remove": ("softmax",)},
            "FLOAT32_REMOVE: op 'softmax' is in AUTO_MIXED_PRECISION_FLOAT32_ADD too; keep one.",
        ),
        (
            {"widest_add": ("mul", "multiply")},
            "WIDEST_ADD: op 'multiply' ('mul') is twice in AUTO_MIXED_PRECISION_WIDEST_ADD; "
            "keep one.",
        ),
    ],
)
def test_a_variable_that_cannot_be_meant_is_named(settings, message):
    with pytest.raises(SettingsError) as caught:
        policyfile.with_overrides(Policy(), Settings(**settings))
    assert str(caught.value) == f"AUTO_MIXED_PRECISION_{message}"


# --- mistakes ------------------------------------------------------------------------------------

MISTAKES = {
    "unknown key": (
        "outputs: keep\ndevice: {cuda: off}",
        "2:1: unknown key 'device'. Did you mean 'devices'?",
    ),
    "unknown key far from all": (
        "zzz: 1",
        "1:1: unknown key 'zzz'. Use one of: extends, devices, ops, fixups, modules, parameters, "
        "outputs, loss_scale, fallback, distributed, performance.",
    ),
    "unknown key inside": (
        "loss_scale:\n  mode: static\n  intervall: 5",
        "3:3: unknown key 'intervall'. Did you mean 'interval'?",
    ),
    "unknown device": (
        "devices: {cuda: off, cuba: off}",
        "1:22: unknown key 'cuba'. Did you mean 'cuda'?",
    ),
    "duplicate key": (
        "outputs: keep\noutputs: keep",
        "2:1: key 'outputs' is written twice; keep one.",
    ),
    "duplicate device": (
        "devices:\n  cpu: off\n  cpu: bfloat16",
        "3:3: key 'cpu' is written twice; keep one.",
    ),
    "list for a map": (
        "devices: [cuda]",
        "1:10: devices must be a map (key: value), not a list.",
    ),
    "word for a map": (
        "loss_scale: 128",
        "1:13: loss_scale must be a map (key: value), not a single value.",
    ),
    "list for the whole": (
        "- outputs",
        "1:1: the policy must be a map (key: value), not a list.",
    ),
    "word for the whole": (
        "float16",
        "1:1: the policy must be a map (key: value), not a single value.",
    ),
    "map for a word": (
        "outputs: {a: b}",
        "1:10: outputs must be a single word or number, not a map.",
    ),
    "list for a word": (
        "devices: {cuda: [float16]}",
        "1:17: devices.cuda must be a single word or number, not a list.",
    ),
    "list for a number": (
        "loss_scale: {init: [1]}",
        "1:20: loss_scale.init must be a single word or number, not a list.",
    ),
    "map for extends": (
        "extends: {torch: 1}",
        "1:10: extends must be one word or a list, not a map.",
    ),
    "list in extends": (
        "extends: [torch, [fp16]]",
        "1:18: extends[1] must be a single word or number, not a list.",
    ),
    "no extends": (
        "extends:",
        "1:9: extends is empty; give it a value or remove the key.",
    ),
    "null in extends": (
        "extends: [torch, ~]",
        "1:18: extends[1] is empty; give it a value or remove the key.",
    ),
    "unknown base in a list": (
        "extends: [torch, fp17]",
        "1:18: unknown policy 'fp17'. Did you mean 'fp16'? A file is named by its path: "
        "./fp17.yaml",
    ),
    "a base twice": (
        "extends: [fp16, fp16]",
        "1:17: 'fp16' is read already, for one before it, and would change nothing here; "
        "remove it or put it first.",
    ),
    "a base after what extends it": (
        "extends: [fp16, default]",
        "1:17: 'default' is read already, for one before it, and would change nothing here; "
        "remove it or put it first.",
    ),
    "list for a key": (
        "? [a]\n: b",
        "1:3: a key must be a single word or number, not a list.",
    ),
    "unknown dtype": (
        "devices: {cpu: bfloat}",
        "1:16: devices.cpu is 'bfloat'. Did you mean 'bfloat16'?",
    ),
    "dtype far from all": (
        "devices: {cpu: int8}",
        "1:16: devices.cpu is 'int8'. Use one of: float16, bfloat16, off.",
    ),
    "unknown outputs": ("outputs: kep", "1:10: outputs is 'kep'. Did you mean 'keep'?"),
    "no outputs": ("outputs:", "1:9: outputs is ''. Use one of: float32, keep."),
    "unknown mode": (
        "loss_scale: {mode: statik}",
        "1:20: loss_scale.mode is 'statik'. Did you mean 'static'?",
    ),
    "unknown base": (
        "extends: dafault",
        "1:10: unknown policy 'dafault'. Did you mean 'default'? "
        "A file is named by its path: ./dafault.yaml",
    ),
    "undefined alias": ("outputs: *x", "1:10: not valid YAML: found undefined alias"),
    "two documents": ("outputs: keep\n---\noutputs: keep", "2:1: not valid YAML: "),
    "open bracket": ("outputs: keep\ndevices: {cuda: float16\n", "3:1: not valid YAML: "),
    "open quote": ("outputs: 'keep", "1:15: not valid YAML: found unexpected end of stream"),
    "a map that merges": (
        "loss_scale: {<<: {init: 2}}",
        "1:14: tag 'tag:yaml.org,2002:merge' is not allowed in a policy; write a plain value.",
    ),
    "an anchor of another section": (
        "loss_scale: &a {init: 2}\ndevices: *a",
        "1:17: unknown key 'init'. Use one of: cuda, cpu, xpu, mps.",
    ),
    "an anchor inside itself": (
        "devices: &a {cuda: *a}",
        "1:10: devices.cuda must be a single word or number, not a map.",
    ),
    # ops
    "null for a map": ("ops:", "1:5: ops must be a map (key: value), not null."),
    "unknown list": (
        "ops: {lowe: {add: [softmax]}}",
        "1:7: unknown key 'lowe'. Did you mean 'lower'?",
    ),
    "list for a map of lists": (
        "ops: {lower: [softmax]}",
        "1:14: ops.lower must be a map (key: value), not a list.",
    ),
    "unknown change": (
        "ops: {lower: {adds: [softmax]}}",
        "1:15: unknown key 'adds'. Did you mean 'add'?",
    ),
    "word for a list": (
        "ops: {lower: {add: layer_norm}}",
        "1:20: ops.lower.add must be a list, not a single value; write [layer_norm].",
    ),
    "map for a list": (
        "ops: {lower: {add: {layer_norm: 1}}}",
        "1:20: ops.lower.add must be a list, not a map.",
    ),
    "null for a list": (
        "ops: {lower: {add: ~}}",
        "1:20: ops.lower.add must be a list, not null.",
    ),
    "list for an op": (
        "ops: {lower: {add: [[softmax]]}}",
        "1:21: ops.lower.add[0] must be a single word or number, not a list.",
    ),
    "unknown op": (
        "ops:\n  float32:\n    add: [relu, sofmax]",
        "3:17: unknown op 'sofmax' in ops.float32.add. Did you mean 'softmax'?",
    ),
    "a class for an op": (
        "ops: {float32: {remove: [torch.nn.LayerNorm]}}",
        "1:26: unknown op 'torch.nn.LayerNorm' in ops.float32.remove. Did you mean 'layer_norm'?",
    ),
    "an op like no other": (
        "ops: {widest: {add: [zzz]}}",
        "1:22: unknown op 'zzz' in ops.widest.add. Use the name of a function in "
        "torch.nn.functional or torch, like softmax.",
    ),
    "a function made of ops": (
        "ops: {float32: {add: [F.normalize]}}",
        "1:23: 'F.normalize' in ops.float32.add is made of other ops; name those: norm, "
        "clamp_min, div.",
    ),
    "an overload": (
        "ops: {lower: {add: ['aten::softmax.int']}}",
        "1:21: 'aten::softmax.int' in ops.lower.add is an overload; name the op, for all of "
        "them: 'softmax'.",
    ),
    "an in-place form": (
        "ops: {lower: {add: [relu_]}}",
        "1:21: 'relu_' in ops.lower.add is an in-place form; name the op: 'relu'.",
    ),
    "an op twice": (
        "ops: {lower: {add: [softmax, relu, softmax]}}",
        "1:36: op 'softmax' is twice in ops.lower.add; keep one.",
    ),
    "an op twice by two names": (
        "ops: {float32: {remove: [divide, aten::div]}}",
        "1:34: op 'aten::div' ('divide') is twice in ops.float32.remove; keep one.",
    ),
    "an op in two lists": (
        "ops:\n  lower: {add: [relu, softmax]}\n  float32: {add: [gelu, softmax]}",
        "3:25: op 'softmax' is in ops.lower.add too; an op is in one list: keep one.",
    ),
    "an op in two lists by two names": (
        "ops: {widest: {add: [upsample_nearest2d]}, lower: {add: [F.interpolate]}}",
        "1:58: op 'F.interpolate' ('upsample_nearest2d') is in ops.widest.add too; an op is in "
        "one list: keep one.",
    ),
    "an op added and removed": (
        "ops: {float32: {add: [softmax], remove: [softmax]}}",
        "1:42: op 'softmax' is in ops.float32.add too; keep one.",
    ),
    "unknown lists to start from": (
        "ops: {base: cudaa}",
        "1:13: ops.base is 'cudaa'. Did you mean 'cuda'?",
    ),
    "lists to start from in a list": (
        "ops: {base: [cuda]}",
        "1:13: ops.base must be one word or a map, not a list.",
    ),
    "unknown dtype to start from": (
        "ops: {base: {fp16: cuda}}",
        "1:14: unknown key 'fp16'. Did you mean 'float16'?",
    ),
    "unknown lists for a dtype": (
        "ops: {base: {float16: off}}",
        "1:23: ops.base.float16 is 'off'. Use one of: device, cuda, none.",
    ),
    "unknown operands": (
        "ops: {operands: parameters}",
        "1:17: ops.operands is 'parameters'. Did you mean 'parameter'?",
    ),
    "unknown results": (
        "ops: {results: float16}",
        "1:16: ops.results is 'float16'. Did you mean 'float32'?",
    ),
    # ops, under a condition
    "a condition that is a map": (
        "ops: {when: {op: relu}}",
        "1:13: ops.when must be a list, not a map.",
    ),
    "a condition without an op": (
        "ops: {when: [{when: {p: 1}, precision: lower}]}",
        "1:14: ops.when[0] has no 'op'; add it.",
    ),
    "a condition without arguments": (
        "ops: {when: [{op: norm, precision: lower}]}",
        "1:14: ops.when[0] has no 'when'; add it.",
    ),
    "a condition without a list": (
        "ops: {when: [{op: norm, when: {p: 1}}]}",
        "1:14: ops.when[0] has no 'precision'; add it.",
    ),
    "an unknown op under a condition": (
        "ops: {when: [{op: nrm, when: {p: 1}, precision: lower}]}",
        "1:19: unknown op 'nrm' in ops.when[0].op. Did you mean 'norm'?",
    ),
    "a condition on nothing": (
        "ops: {when: [{op: norm, when: {}, precision: lower}]}",
        "1:31: ops.when[0].when is empty; name an argument and the value it must have.",
    ),
    "a condition that is a word": (
        "ops: {when: [{op: norm, when: p, precision: lower}]}",
        "1:31: ops.when[0].when must be a map (key: value), not a single value.",
    ),
    "a condition on a list": (
        "ops: {when: [{op: norm, when: {dim: [1]}, precision: lower}]}",
        "1:37: ops.when[0].when.dim must be a single word or number, not a list.",
    ),
    "a condition without a value": (
        "ops:\n  when:\n  - op: norm\n    when:\n      dim:\n    precision: lower",
        "5:11: ops.when[0].when.dim has no value; write the one that the argument must have.",
    ),
    "a condition that never holds": (
        "ops: {when: [{op: norm, when: {p: .NaN}, precision: lower}]}",
        "1:35: ops.when[0].when.p is '.NaN', which equals nothing; write another value.",
    ),
    "an argument that is no name": (
        "ops: {when: [{op: norm, when: {2p: 1}, precision: lower}]}",
        "1:31: ops.when[0].when names '2p', which is no argument.",
    ),
    "an argument twice": (
        "ops: {when: [{op: norm, when: {p: 1, p: 2}, precision: lower}]}",
        "1:38: key 'p' is written twice; keep one.",
    ),
    "unknown precision under a condition": (
        "ops: {when: [{op: norm, when: {p: 1}, precision: float16}]}",
        "1:50: ops.when[0].precision is 'float16'. Did you mean 'float32'?",
    ),
    "a condition twice": (
        "ops:\n  when:\n  - {op: sub, when: {alpha: 2, other: 1}, precision: lower}\n"
        "  - {op: subtract, when: {other: 1, alpha: 2}, precision: float32}",
        "4:10: op 'subtract' has this condition twice; keep one.",
    ),
    # modules and parameters
    "map for rules": (
        "modules: {name: x, precision: lower}",
        "1:10: modules must be a list, not a map.",
    ),
    "word for a rule": (
        "modules: [encoder]",
        "1:11: modules[0] must be a map (key: value), not a single value.",
    ),
    "a module without a precision": (
        "modules:\n- {name: a, precision: lower}\n- {name: b}",
        "3:3: modules[1] has no 'precision'; add it.",
    ),
    "a module that is not told": (
        "modules: [{precision: lower}]",
        "1:11: modules[0] needs one of: name, regex, type.",
    ),
    "a module told twice": (
        "modules: [{name: a, type: Linear, precision: lower}]",
        "1:11: modules[0] has name and type; keep one of them.",
    ),
    "unknown precision": (
        "modules: [{name: a, precision: fp16}]",
        "1:32: modules[0].precision is 'fp16'. Did you mean 'float16'?",
    ),
    "a precision far from all": (
        "modules: [{name: a, precision: off}]",
        "1:32: modules[0].precision is 'off'. Use one of: float32, lower, float16, bfloat16.",
    ),
    "a precision in capitals": (
        "modules: [{name: a, precision: Float32}]",
        "1:32: modules[0].precision is 'Float32'. Did you mean 'float32'?",
    ),
    "no precision": (
        "modules: [{name: a, precision: ~}]",
        "1:32: modules[0].precision is '~'. Use one of: float32, lower, float16, bfloat16.",
    ),
    "empty extends": (
        "extends: ['']",
        "1:11: extends[0] is empty; write a name or remove the key.",
    ),
    "no name": (
        "modules: [{precision: lower, name: ~}]",
        "1:36: modules[0].name is empty; give it a value or remove the key.",
    ),
    "no regex": (
        "parameters: [{regex: null}]",
        "1:22: parameters[0].regex is empty; give it a value or remove the key.",
    ),
    "an empty name of a parameter": (
        "parameters: [{name: ' '}]",
        "1:21: parameters[0].name is empty; write a name or remove the key.",
    ),
    "an empty regex": (
        "modules: [{regex: '', precision: lower}]",
        "1:19: modules[0].regex is empty and would match nothing; write a regular expression or "
        "remove the key.",
    ),
    "a broken regex": (
        "modules: [{regex: 'a[b', precision: lower}]",
        "1:19: modules[0].regex is not a regular expression: unterminated character set at "
        "position 1; correct it.",
    ),
    "a regex that counts too far": (
        "modules: [{regex: 'a{99999999999}', precision: lower}]",
        "1:19: modules[0].regex is not a regular expression: the repetition number is too large; "
        "correct it.",
    ),
    "no class": (
        "modules: [{type: 'nn.Layer Norm', precision: lower}]",
        "1:18: modules[0].type is 'nn.Layer Norm', which is no class; write a class name like "
        "torch.nn.LayerNorm.",
    ),
    "no steps": (
        "modules: [{name: a, precision: lower, steps: {}}]",
        "1:46: modules[0].steps is empty; give it from or to.",
    ),
    "number for steps": (
        "modules: [{name: a, precision: lower, steps: 5}]",
        "1:46: modules[0].steps must be a map (key: value), not a single value.",
    ),
    "steps that end before they begin": (
        "modules: [{name: a, precision: lower, steps: {from: 5, to: 5}}]",
        "1:46: steps go from 5 to 5; 'to' must be greater than 'from'.",
    ),
    "steps that end at once": (
        "modules: [{name: a, precision: lower, steps: {to: 0}}]",
        "1:51: modules[0].steps.to is '0'; use a whole number of 1 or more.",
    ),
    "negative steps": (
        "modules: [{name: a, precision: lower, steps: {from: -1}}]",
        "1:53: modules[0].steps.from is '-1'; use a whole number of 0 or more.",
    ),
    "half steps": (
        "modules: [{name: a, precision: lower, steps: {from: 1.5}}]",
        "1:53: modules[0].steps.from is '1.5'; use a whole number of 0 or more.",
    ),
    "a parameter that is not told": (
        "parameters: [{}]",
        "1:14: parameters[0] needs one of: name, regex.",
    ),
    "a parameter told twice": (
        "parameters: [{name: a, regex: b}]",
        "1:14: parameters[0] has name and regex; keep one of them.",
    ),
    "a parameter by type": (
        "parameters: [{type: Linear}]",
        "1:15: unknown key 'type'. Use one of: name, regex.",
    ),
    "a parameter with a precision": (
        "parameters: [{name: a, precision: float32}]",
        "1:24: unknown key 'precision'. Use one of: name, regex.",
    ),
    "a broken regex of a parameter": (
        "parameters: [{regex: '*.bias'}]",
        "1:22: parameters[0].regex is not a regular expression: nothing to repeat at position 0; "
        "correct it.",
    ),
    # sections of a later version
    "unknown way to fall back": (
        "fallback: {on_error: fp32}",
        "1:22: fallback.on_error is 'fp32'. Did you mean 'float32'?",
    ),
    "no patience": (
        "fallback: {patience: 0}",
        "1:22: fallback.patience is '0'; use a whole number from 1 to 2147483647.",
    ),
    "unknown memory format": (
        "performance: {memory_format: channel_last}",
        "1:30: performance.memory_format is 'channel_last'. Did you mean 'channels_last'?",
    ),
    "a switch for a word": (
        "performance: {stand_down: True}",
        "1:27: performance.stand_down is 'True'. Use one of: auto, off.",
    ),
    "unknown gradients": (
        "distributed: {gradients: float16}",
        "1:26: distributed.gradients is 'float16'. Use one of: keep, half.",
    ),
    # what is quoted
    "a word of two lines": (
        'outputs: "ke\\nep"',
        "1:10: outputs is 'ke\\nep'. Did you mean 'keep'?",
    ),
    "a long word": (
        f"outputs: {'k' * 1000}",
        f"1:10: outputs is '{'k' * 288} … {'k' * 271}'. Use one of: float32, keep.",
    ),
}
FINITE, OVER_1, UP_TO_1 = (
    "a number that float32 can hold and invert",
    "a number above 1",
    "between 0 and 1",
)
NUMBERS = {
    "init": (FINITE, ["0", "-1", ".inf", ".nan", "abc", "0x10", "1e400", "''"]),
    "growth": (OVER_1, ["1", "0.5", ".inf", ".nan", "double"]),
    "backoff": (f"a number {UP_TO_1}", ["0", "1", "-0.5", ".nan", "half"]),
    "interval": ("a whole number from 1 to 2147483647", ["0", "-3", "1.5", "1e3", ".inf", "often"]),
    "hysteresis": ("a whole number from 1 to 2147483647", ["0", "2.0", "off"]),
    "min": ("a number of 0 or more", ["-1", ".nan", "-.inf"]),
    "max": ("a number above 0", ["0", "-1", ".nan"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_by_file_line_and_column_with_what_to_write(mine, mistake, tmp_path):
    text, expected = MISTAKES[mistake]
    with pytest.raises(PolicyError) as caught:
        mine(text)
    where, message = str(tmp_path / "mine.yaml"), str(caught.value)
    if expected.endswith(("YAML: ", "alias", "stream")):  # the rest are words of the YAML parser
        assert message.startswith(f"{where}:{expected}")
        assert message.endswith(".")
        assert "\n" not in message
    else:
        assert message == f"{where}:{expected}"


@pytest.mark.parametrize(
    ("field", "text"), [(field, text) for field, row in NUMBERS.items() for text in row[1]]
)
def test_a_number_out_of_range_is_refused_with_the_range(mine, tmp_path, field, text):
    with pytest.raises(PolicyError) as caught:
        mine(f"outputs: keep\nloss_scale:\n  {field}: {text}\n")
    where, shown = f"{tmp_path / 'mine.yaml'}:3:{len(field) + 5}", text.strip("'")
    assert (
        str(caught.value) == f"{where}: loss_scale.{field} is '{shown}'; use {NUMBERS[field][0]}."
    )


@pytest.mark.parametrize("text", ["1e39", "1e-46", "1e-39"])
def test_a_loss_scale_that_float32_cannot_hold_or_invert_is_refused(mine, text):
    """float32 makes infinity, zero and a number without reciprocal of them: NaN gradients."""
    with pytest.raises(PolicyError, match=rf"mine\.yaml:1:20: loss_scale\.init is '{text}'"):
        mine(f"loss_scale: {{init: {text}}}")


def test_an_interval_that_torch_cannot_count_is_refused(mine):
    """`torch._amp_update_scale_` takes 64 bits: it would fail at the first optimizer step."""
    with pytest.raises(PolicyError, match=r"mine\.yaml:1:24: loss_scale\.interval is '1000000"):
        mine("loss_scale: {interval: 1000000000000000000000}")


@pytest.mark.parametrize(
    ("text", "where", "numbers"),
    [
        ("loss_scale: {init: 1, min: 2}", "1:13", "1, outside min 2 to max inf"),
        ("outputs: keep\nloss_scale: {max: 2}", "2:13", "65536, outside min 0 to max 2"),
        (
            "extends: default\nloss_scale: {init: 0.5}",
            "2:13",
            "0.5, outside min 1 to max 1.67772e+07",
        ),
    ],
)
def test_a_loss_scale_that_starts_outside_its_bounds_is_refused(
    mine, tmp_path, text, where, numbers
):
    with pytest.raises(PolicyError) as caught:
        mine(text)
    end = f"loss_scale.init is {numbers}; change init, min or max."
    assert str(caught.value) == f"{tmp_path / 'mine.yaml'}:{where}: {end}"


def test_a_tab_is_named_with_the_remedy(mine):
    with pytest.raises(PolicyError, match=r"mine\.yaml:2:1: .*tab.*spaces"):
        mine("devices:\n\tcuda: float16\n")


# --- text that is none ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "where"),
    [(b"outputs: keep\ncaf\xe9: 1", "2:4"), (b"\x80\x04K\x01.", "1:1"), (b"PK\x03\x04\xff", "1:5")],
)
def test_what_is_not_utf_8_is_refused_with_line_and_column(mine, tmp_path, text, where):
    with pytest.raises(PolicyError) as caught:
        mine(text)
    end = "not UTF-8 text; save the file as UTF-8."
    assert str(caught.value) == f"{tmp_path / 'mine.yaml'}:{where}: {end}"


@pytest.mark.parametrize("character", ["\x00", "\x07", "\x1b"])
def test_a_control_character_is_refused_with_line_and_column(mine, character):
    with pytest.raises(PolicyError, match=r"mine\.yaml:2:5: not valid YAML: .*character"):
        mine(f"outputs: keep\ndevi{character}ces: {{}}")


def test_a_file_that_is_too_large_is_refused_unread(mine, tmp_path):
    with pytest.raises(PolicyError) as caught:
        mine(b"#" * (1 << 20) + b"\n")
    path = tmp_path / "mine.yaml"
    assert str(caught.value) == f"{path}: larger than 1048576 bytes; this is not a policy."


def test_a_file_of_the_largest_size_is_read(mine):
    assert mine(b"outputs: keep" + b" " * ((1 << 20) - 13)).outputs == "keep"


@pytest.mark.parametrize("text", ["[" * 5000, "{a: " * 5000, "- " * 5000, "? " * 5000])
def test_deep_nesting_is_refused(mine, text):
    with pytest.raises(PolicyError, match=r"mine\.yaml:1:"):
        mine(text)


def test_aliases_that_multiply_cost_nothing(mine):
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 40)]
    with pytest.raises(PolicyError, match=r"mine\.yaml:1:1: unknown key 'l0'"):
        mine("\n".join(["l0: &l0 [x]", *levels]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "ops:\n  when:\n  - &a {op: relu, when: {"
            + ", ".join(f"a{i}: 1" for i in range(51))
            + "}, "
            "precision: lower}\n" + "  - *a\n" * 5000,
            "3:25: ops.when[0].when names more than 50 arguments.",
        ),
        (
            "modules:\n- &a {name: x, precision: lower}\n" + "- *a\n" * MAX_ITEMS,
            "2:1: modules has more than 10000 entries.",
        ),
        (
            "ops: {lower: {add: [" + ", ".join(["relu"] * (MAX_ITEMS + 1)) + "]}}",
            "1:20: ops.lower.add has more than 10000 entries.",
        ),
    ],
    ids=["arguments", "rules", "ops"],
)
def test_more_than_anyone_would_write_is_refused(mine, tmp_path, text, message):
    with pytest.raises(PolicyError) as caught:
        mine(text)
    assert str(caught.value) == f"{tmp_path / 'mine.yaml'}:{message}"


def test_as_much_as_is_allowed_is_read(mine):
    arguments = ", ".join(f"a{i}: 1" for i in range(MAX_ARGUMENTS))
    rules = "- &a {name: x, precision: lower}\n" + "- *a\n" * (MAX_ITEMS - 1)
    policy = mine(
        f"ops: {{when: [{{op: relu, when: {{{arguments}}}, precision: lower}}]}}\nmodules:\n{rules}"
    )
    assert (len(policy.ops[0].when), len(policy.modules)) == (MAX_ARGUMENTS, MAX_ITEMS)


TAGS = {
    "a word": ("outputs: !!python/name:os.system", "1:10"),
    "a list": ("outputs: !!python/object/apply:os.system ['echo > built']", "1:10"),
    "a map": ("devices: !!python/object/new:os.system {cuda: off}", "1:10"),
    "the whole": ("!!python/object:os.system {outputs: keep}", "1:1"),
    "a key": ("? !!python/object/apply:os.system ['echo > built']\n: x", "1:3"),
    "a module": ("outputs: !!python/module:antigravity", "1:10"),
    "one's own": ("outputs: !mine keep", "1:10"),
    "binary": ("outputs: !!binary a2VlcA==", "1:10"),
    "a list of ops": ("ops: {lower: {add: !!set [relu]}}", "1:20"),
    "an op": ("ops: {lower: {add: [!op relu]}}", "1:21"),
    "a list of files": ("extends: !!python/tuple [torch]", "1:10"),
    "an argument": ("ops: {when: [{op: norm, when: {p: !!python/name:os.system }}]}", "1:14"),
    "a rule": ("parameters: [!!omap {name: a}]", "1:14"),
    "a pattern": ("parameters: [{regex: !regex a}]", "1:22"),
}


@pytest.mark.parametrize("place", TAGS)
def test_a_tag_builds_nothing_and_is_refused(mine, place, tmp_path, monkeypatch):
    text, where = TAGS[place]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "system", lambda command: (tmp_path / "built").touch())
    with pytest.raises(PolicyError, match=rf"mine\.yaml:{where}: "):
        mine(text)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


# --- files and names that are not there ----------------------------------------------------------


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "none.yaml"
    assert message_about(path) == (
        f"{path}: No such file or directory; give the path of a readable policy file."
    )


def test_a_directory_is_named(tmp_path):
    path = tmp_path / "folder.yaml"
    path.mkdir()
    assert message_about(path) == (
        f"{path}: Is a directory; give the path of a readable policy file."
    )


def test_a_file_asked_for_in_a_folder_that_is_gone_is_named(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert message_about("./none.yaml") == (
        "none.yaml: No such file or directory; give the path of a readable policy file."
    )


def test_an_unknown_name_comes_with_who_asked_and_the_nearest_name():
    assert message_about("fp6", "AUTO_MIXED_PRECISION_POLICY") == (
        "AUTO_MIXED_PRECISION_POLICY: unknown policy 'fp6'. Did you mean 'fp16'? "
        "A file is named by its path: ./fp6.yaml"
    )
    assert message_about("zzz") == (
        "AUTO_MIXED_PRECISION: unknown policy 'zzz'. "
        f"Use one of: {', '.join(policyfile.shipped())}. A file is named by its path: ./zzz.yaml"
    )


@pytest.mark.parametrize("base", ["./none.yaml", "."], ids=["missing", "a directory"])
def test_a_base_that_cannot_be_read_is_named_where_it_is_asked_for(mine, tmp_path, base):
    (tmp_path / "folder.yaml").mkdir()
    text = f"outputs: keep\nextends: {base if base != '.' else './folder.yaml'}\n"
    with pytest.raises(PolicyError) as caught:
        mine(text)
    assert str(caught.value).startswith(f"{tmp_path / 'mine.yaml'}:2:10: ")


@pytest.mark.parametrize("reference", ["~nobody-of-this-name/a.yaml", "a\0.yaml", "a\ud800.yaml"])
def test_a_path_that_cannot_exist_is_a_policy_error(reference):
    assert message_about(reference).endswith("; give the path of a readable policy file.")


def test_a_mistake_in_the_base_is_named_in_the_base(mine, tmp_path):
    (tmp_path / "base.yaml").write_text("outputs: kep\n")
    with pytest.raises(PolicyError) as caught:
        mine("extends: base.yaml\n")
    assert str(caught.value) == (
        f"{tmp_path / 'base.yaml'}:1:10: outputs is 'kep'. Did you mean 'keep'?"
    )


@pytest.mark.parametrize(
    "files",
    [
        {"mine.yaml": "mine.yaml"},
        {"mine.yaml": "a.yaml", "a.yaml": "b.yaml", "b.yaml": "mine.yaml"},
        {"mine.yaml": "a.yaml", "a.yaml": "./a.yaml"},
        {"mine.yaml": "sub/../mine.yaml", "sub/x.yaml": "torch"},
        {"mine.yaml": "sub/x.yaml", "sub/x.yaml": "../mine.yaml"},
    ],
    ids=["itself", "three", "the base itself", "by another path", "through a folder"],
)
def test_a_circle_of_extends_is_refused(tmp_path, files):
    for name, base in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"extends: {base}\n")
    message = message_about(tmp_path / "mine.yaml")
    assert message.endswith(":1:10: 'extends' goes round in a circle; remove one reference.")


def test_a_circle_is_named_where_it_closes(tmp_path):
    written(
        tmp_path,
        mine="extends: [torch, a.yaml]",
        a="outputs: keep\nextends: [fp16, b.yaml,\n  mine.yaml]",
        b="extends: torch",
    )
    assert message_about(tmp_path / "mine.yaml") == (
        f"{tmp_path / 'a.yaml'}:3:3: 'extends' goes round in a circle; remove one reference."
    )


def test_a_base_with_a_path_that_cannot_be_is_named_where_it_is_asked_for(mine, tmp_path):
    with pytest.raises(PolicyError) as caught:
        mine('extends: "a\\0.yaml"')
    assert str(caught.value).startswith(f"{tmp_path / 'mine.yaml'}:1:10: ")
    assert str(caught.value).endswith("; give the path of a readable policy file.")


# --- whatever it is ------------------------------------------------------------------------------

WORDS = (
    "extends devices outputs loss_scale init min max mode interval cuda cpu torch keep off float16 "
    "ops base lower float32 widest add remove when op precision operands results relu softmax p "
    "modules parameters name regex type steps from to fallback patience performance distributed "
    "./a.yaml ~x/a.yaml mine.yaml ../ 1 .inf : { } [ ] & * ! - ? | > ' \" % @ # , << --- ... \\x00"
)
PIECES = st.sampled_from((*WORDS.split(), ": ", "\n", "\n  ", "\t", " ", "\0", "\ufeff", "\u2028"))


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.lists(PIECES, max_size=12).map("".join) | st.text(max_size=40))
def test_no_text_raises_anything_but_policy_error(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        outcome: object = policyfile.load(str(path))
    except PolicyError as error:
        outcome = error
    assert isinstance(outcome, Policy) or str(outcome).startswith(str(path))
