"""`autoamp policy`: what is printed, for people and programs, and what the process ends with."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autoamp import cli, explain, opnames, plan, policyfile
from autoamp.categories import REFUSED
from autoamp.errors import PolicyError
from autoamp.policy import (
    BASES,
    CUDNN_BENCHMARKS,
    DEVICES,
    FLOAT32_MATMULS,
    LISTS,
    MEMORY_FORMATS,
    MODULE_PRECISIONS,
    OPTIMIZERS,
    PRECISIONS,
    STAND_DOWNS,
    WEIGHT_CACHES,
    LossScaleRule,
    ModuleRule,
    OpRule,
    ParameterRule,
    PerformanceRule,
    Policy,
)
from autoamp.policytext import document, place, plain
from autoamp.resolution import resolved
from autoamp.schema import json_schema

SWITCH = "AUTO_MIXED_PRECISION"
SHIPPED = sorted(policyfile.shipped())
TEAM = """\
extends: torch
devices: {cpu: off}
ops:
  float32: {remove: [F.softmax]}
  lower: {add: [layer_norm]}
  when:
    - {op: leaky_relu, when: {negative_slope: 0.2}, precision: float32}
modules:
  - {name: "decoder.*.attn", precision: float32, steps: {to: 1000}}
parameters: [{regex: "emb.*"}]
fallback: {on_error: float32}
"""
Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Main:
    """`main("list", DTYPE="float16")`: exit code, stdout and stderr, in a folder with team.yaml.

    It runs in this process; variables are named without the prefix.
    """
    for name in [name for name in os.environ if name.startswith(SWITCH)]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "team.yaml").write_text(TEAM)

    def run(*arguments: str, **variables: str) -> tuple[int, str, str]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(SWITCH if name == "SWITCH" else f"{SWITCH}_{name}", value)
            try:
                code = cli.main(["policy", *arguments])
            except SystemExit as end:
                code = end.code
        return code, *capsys.readouterr()

    return run


def rows(text: str) -> dict[str, list[str]]:
    """The table that `explain` prints, by op; columns are two spaces or more apart."""
    table = text.split("\n\n", 1)[1].splitlines()
    starts = [table[0].index(title) for title in TITLES]
    columns = [slice(*ends) for ends in zip(starts, [*starts[1:], None], strict=True)]
    cut = [[line[column].strip() for column in columns] for line in table[1:]]
    return {name: cells for name, *cells in cut}


TITLES = ("op", "list", "computes in", "gives", "carried out by", "origin")


def head(text: str) -> dict[str, list[str]]:
    """What `explain` prints above the table, by label."""
    found: dict[str, list[str]] = {}
    for line in text.split("\n\n", 1)[0].splitlines():
        label, said = line[:11].strip(), line[12:]
        found.setdefault(label or list(found)[-1], []).append(said)
    return found


# list


def test_list_names_every_shipped_policy_says_what_it_is_for_and_where_it_is(main):
    code, out, err = main("list")
    assert (code, err) == (0, "")
    names = [line.split()[0] for line in out.splitlines() if not line.startswith(" ")]
    assert names == SHIPPED
    assert {"default", "torch", "bf16", "fp16"} <= set(names)
    for path in policyfile.shipped().values():
        assert f"  {path}\n" in out
    assert max(len(line) for line in out.splitlines() if "/" not in line) <= 100


def test_list_as_data_has_the_first_paragraph_of_each_file(main):
    listed = {each["name"]: each for each in json.loads(main("list", "--json")[1])}
    assert list(listed) == SHIPPED
    for name, path in policyfile.shipped().items():
        assert listed[name]["path"] == str(path)
        first = path.read_text().splitlines()[0].removeprefix("# ")
        assert listed[name]["about"].startswith(first)
        assert 20 < len(listed[name]["about"]) < 300
        assert "Source:" not in listed[name]["about"]


# show


def test_show_prints_one_file_with_the_place_of_each_rule(main):
    code, out, err = main("show", "team.yaml")
    assert (code, err) == (0, "")
    before, loss_scale, after = re.split(r"^(loss_scale: .*\n)", out, flags=re.MULTILINE)
    assert before == (
        "# All that team.yaml and the files that it extends say, in one file.\n"
        'devices: {cuda: float16, cpu: "off", xpu: bfloat16, mps: float16}\n'
        "ops:\n"
        "  base: {float16: device, bfloat16: device}\n"
        "  lower:\n"
        "    add:\n"
        "      - layer_norm  # team.yaml:5:17\n"
        "  float32:\n"
        "    remove:\n"
        "      - softmax  # team.yaml:4:22\n"
        "  when:\n"
        "    - {op: leaky_relu, when: {negative_slope: 0.2}, precision: float32}"
        "  # team.yaml:7:12\n"
        "  operands: any\n"
        "  results: keep\n"
        'fixups: "off"\n'
        "modules:\n"
        '  - {name: "decoder.*.attn", precision: float32, steps: {to: 1000}}  # team.yaml:9:5\n'
        "parameters:\n"
        '  - {regex: "emb.*"}  # team.yaml:10:14\n'
        "outputs: float32\n"
    )
    assert loss_scale.startswith(
        "loss_scale: {mode: dynamic, init: 65536, growth: 2, backoff: 0.5, interval: 2000, "
        "hysteresis: 1, min: 0, max: .inf"
    )
    assert after == (
        "fallback: {on_error: float32, on_overflow: keep, inspect: false, patience: 3}\n"
        "distributed: {gradients: keep}\n"
        "performance: {memory_format: keep, optimizer: keep, float32_matmul: keep, "
        'cudnn_benchmark: keep, weight_cache: "off", stand_down: "off"}\n'
    )


def test_show_names_the_shipped_file_that_a_rule_comes_from(main, tmp_path):
    (tmp_path / "team.yaml").write_text("extends: safe\nops: {lower: {remove: [linear]}}\n")
    out = main("show", "team.yaml")[1]
    assert "      - conv2d  # safe.yaml:" in out
    assert "      - linear  # team.yaml:2:24\n" in out
    assert str(tmp_path) not in out


def test_show_takes_no_notice_of_variables(main):
    plainly = main("show", "team.yaml")
    assert plainly == main("show", "team.yaml", DTYPE="bfloat16", LOWER_ADD="gelu", NONSENSE="1")


def test_show_as_data_has_every_rule_in_order_with_its_origin(main, tmp_path):
    code, out, _ = main("show", "team.yaml", "--json")
    said = json.loads(out)
    file = str(tmp_path / "team.yaml")
    assert code == 0
    assert (said["name"], said["source"]) == ("team.yaml", file)
    assert said["ops"]["rules"] == [
        {"op": "softmax", "remove": "float32", "origin": f"{file}:4:22"},
        {"op": "layer_norm", "add": "lower", "origin": f"{file}:5:17"},
        {
            "op": "leaky_relu",
            "when": {"negative_slope": 0.2},
            "precision": "float32",
            "origin": f"{file}:7:12",
        },
    ]
    assert said["loss_scale"]["max"] is None
    assert said["fixups"] == "off"
    assert said["fallback"]["on_error"] == "float32"
    assert said["performance"] == asdict(PerformanceRule())


def test_data_hold_no_numbers_that_json_lacks(main, tmp_path):
    rule = "{op: norm, when: {p: .inf}, precision: float32}"
    (tmp_path / "team.yaml").write_text(f"ops: {{when: [{rule}]}}\n")
    for command in (("show", "team.yaml"), ("explain", "team.yaml", "--op", "norm")):
        out = main(*command, "--json")[1]
        json.loads(out, parse_constant=pytest.fail)
        assert '"p": ".inf"' in out


def test_a_policy_that_does_not_exist_is_one_line_on_stderr(main):
    code, out, err = main("show", "defualt")
    assert (code, out) == (1, "")
    assert err.startswith("autoamp policy show: unknown policy 'defualt'. Did you mean 'default'?")
    assert err.count("\n") == 1


# The way back: what `show` prints loads to the same policy.


def without_origins(policy: Policy) -> Policy:
    return replace(
        policy,
        name="",
        source="",
        ops=tuple(replace(rule, origin="") for rule in policy.ops),
        modules=tuple(replace(rule, origin="") for rule in policy.modules),
        parameters=tuple(replace(rule, origin="") for rule in policy.parameters),
    )


def loaded(text: str, folder: Path) -> Policy:
    path = folder / "shown.yaml"
    path.write_text(text, encoding="utf-8")
    return policyfile.load(str(path))


def what_holds(policy: Policy, op: str, category: str) -> tuple[str, dict[Any, str]]:
    """The list of an op that starts in `category`, and its conditions, by the book: one rule after
    the other, later ones win."""
    conditions: dict[Any, str] = {}
    for rule in policy.ops:
        if op not in opnames.resolve(rule.op):
            continue
        if rule.when:
            conditions.pop(frozenset(rule.when), None)
            conditions[frozenset(rule.when)] = rule.into
        elif rule.into:
            category, conditions = rule.into, {}
        elif category == rule.leaves:
            category = ""
    return category, conditions


def assert_same_effect(one: Policy, other: Policy) -> None:
    named = {op for rule in (*one.ops, *other.ops) for op in opnames.resolve(rule.op)}
    refused = {op for op, lists in opnames.table()["ops"].items() if REFUSED in lists.values()}
    for op in named:
        for category in (*LISTS, "", *([REFUSED] if op in refused else [])):
            ours, theirs = (what_holds(policy, op, category) for policy in (one, other))
            assert (ours[0], [*ours[1].items()]) == (theirs[0], [*theirs[1].items()]), op


@pytest.mark.parametrize("name", SHIPPED)
def test_what_show_prints_of_a_shipped_policy_loads_to_the_same_policy(name, tmp_path):
    policy = policyfile.load(name)
    again = loaded(document(policy), tmp_path)
    assert without_origins(again) == without_origins(resolved(policy))
    assert_same_effect(policy, again)


@pytest.mark.parametrize("device", DEVICES)
def test_what_show_prints_runs_every_op_as_the_shipped_policy_does(device, tmp_path):
    for name in SHIPPED:
        policy = policyfile.load(name)
        again = loaded(document(policy), tmp_path)
        ours, theirs = (
            plan.rows(without_origins(each), device, "float16") for each in (policy, again)
        )
        assert ours == theirs
        assert len(ours) > 80


@pytest.mark.parametrize("name", SHIPPED)
def test_nothing_of_a_shipped_policy_is_lost_or_made_up(name):
    """Each rule that counts is one of the policy's, and of those that fall away each is overruled
    by a later one."""
    policy = policyfile.load(name)
    kept = set(resolved(policy).ops)
    assert kept <= set(policy.ops)
    for number, rule in enumerate(policy.ops):
        later = {op for other in policy.ops[number + 1 :] for op in opnames.resolve(other.op)}
        assert rule in kept or set(opnames.resolve(rule.op)) <= later


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
CLASS = st.from_regex(r"[^\W\d]\w*(\.[^\W\d]\w*)?", fullmatch=True).filter(
    lambda name: all(part.isidentifier() for part in name.split("."))
)
VALUE = (
    st.booleans()
    | st.none()
    | st.integers(-(10**17), 10**17)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.sampled_from(["true", "null", "1", "1e-5", ".inf", "off", "~", ""])
)
OPS = (
    *("clamp", "clip", "softmax", "gelu", "binary_cross_entropy"),
    *("norm", "linalg_vector_norm", "sub", "rsub", "subtract"),
    *("interpolate", "upsample_nearest", "upsample_nearest1d", "upsample_bilinear"),
)
WHEN = st.dictionaries(
    st.sampled_from(["p", "dim", "größe", "null"]), VALUE, min_size=1, max_size=2
).map(lambda when: tuple(when.items()))
OP_RULE = (
    st.builds(OpRule, st.sampled_from(OPS), st.sampled_from(LISTS), st.just("a.yaml:1:1"))
    | st.builds(
        lambda op, leaves: OpRule(op, "", "b.yaml:2:2", leaves=leaves),
        st.sampled_from(OPS),
        st.sampled_from(LISTS),
    )
    | st.builds(OpRule, st.sampled_from(OPS), st.sampled_from(LISTS), st.just("c\n.yaml:3:3"), WHEN)
)
STEPS = st.sampled_from([(0, float("inf")), (7, float("inf")), (0, 1), (3, 10**9)])


def module_rule(kind: str, pattern: str, precision: str, steps: tuple[int, float]) -> ModuleRule:
    first, last = steps
    return ModuleRule(precision, "d.yaml:4:4", **{kind: pattern}, first=first, last=last)


POLICY = st.builds(
    Policy,
    devices=st.fixed_dictionaries({name: st.sampled_from(PRECISIONS) for name in DEVICES}),
    base=st.fixed_dictionaries({name: st.sampled_from(BASES) for name in ("float16", "bfloat16")}),
    ops=st.lists(OP_RULE, max_size=8).map(tuple),
    lower_operands=st.sampled_from(["any", "parameter"]),
    lower_results=st.sampled_from(["keep", "float32"]),
    modules=st.lists(
        st.builds(
            module_rule,
            st.just("name"),
            TEXT | st.just(""),
            st.sampled_from(MODULE_PRECISIONS),
            STEPS,
        )
        | st.builds(
            module_rule,
            st.just("regex"),
            TEXT.map(re.escape),
            st.sampled_from(MODULE_PRECISIONS),
            STEPS,
        )
        | st.builds(module_rule, st.just("type"), CLASS, st.sampled_from(MODULE_PRECISIONS), STEPS),
        max_size=3,
    ).map(tuple),
    parameters=st.lists(
        st.builds(lambda name: ParameterRule("e.yaml:5:5", name=name), TEXT)
        | st.just(ParameterRule("f.yaml:6:6", regex=r"a#b: \d+\\ '\"")),
        max_size=3,
    ).map(tuple),
    fixups=st.sampled_from(["on", "off"]),
    outputs=st.sampled_from(["float32", "keep"]),
    gradients=st.sampled_from(["keep", "half"]),
    loss_scale=st.builds(
        LossScaleRule,
        mode=st.sampled_from(["dynamic", "static", "off"]),
        init=st.floats(1e-30, 1e30),
        growth=st.floats(1, 1e300, exclude_min=True),
        backoff=st.floats(0, 1, exclude_min=True, exclude_max=True),
        interval=st.integers(1, 2**31 - 1),
        hysteresis=st.integers(1, 100),
        min=st.floats(0, 1e-30),
        max=st.floats(1e30),
        **{field.name: st.booleans() for field in fields(LossScaleRule) if field.type == "bool"},
    ),
    performance=st.builds(
        PerformanceRule,
        memory_format=st.sampled_from(MEMORY_FORMATS),
        optimizer=st.sampled_from(OPTIMIZERS),
        float32_matmul=st.sampled_from(FLOAT32_MATMULS),
        cudnn_benchmark=st.sampled_from(CUDNN_BENCHMARKS),
        weight_cache=st.sampled_from(WEIGHT_CACHES),
        stand_down=st.sampled_from(STAND_DOWNS),
    ),
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(POLICY)
def test_what_show_prints_of_any_policy_loads_to_the_same_policy(tmp_path, policy):
    try:
        text = document(policy)
    except PolicyError:
        assume(False)
    again = loaded(text, tmp_path)
    assert without_origins(again) == without_origins(resolved(policy))
    assert_same_effect(policy, again)


@pytest.mark.parametrize("name", SHIPPED)
def test_what_show_prints_satisfies_the_schema(name):
    jsonschema.validate(yaml.safe_load(document(policyfile.load(name))), json_schema())


def test_what_show_prints_is_for_every_reader_of_yaml():
    """What YAML 1.1 takes for something else is quoted, or has the point that it wants."""
    when = {"approximate": "off", "null": "1", "eps": 1e-5, "p": float("inf"), "dim": -1}
    rules = (OpRule("gelu", "float32", "a.yaml:1:1", tuple(when.items())),)
    said = yaml.safe_load(document(Policy(devices=dict.fromkeys(DEVICES, "off"), ops=rules)))
    assert said["devices"] == dict.fromkeys(DEVICES, "off")
    assert said["ops"]["when"][0]["when"] == when


def test_of_two_files_with_one_condition_the_later_counts(tmp_path):
    when = (("dim", 1),)
    ops = (
        OpRule("clip", "float32", "a.yaml:1:1", when),
        OpRule("clamp", "lower", "b.yaml:1:1", when),
    )
    assert resolved(Policy(ops=ops)).ops == ops[1:]
    assert_same_effect(Policy(ops=ops), loaded(document(Policy(ops=ops)), tmp_path))


def test_where_an_op_ends_in_a_list_its_way_there_is_not_told():
    ops = (
        OpRule("softmax", "lower", "a.yaml:1:1"),
        OpRule("softmax", "", "b.yaml:1:1", leaves="lower"),
        OpRule("softmax", "float32", "c.yaml:1:1"),
        OpRule("softmax", "", "d.yaml:1:1", leaves="widest"),
    )
    assert resolved(Policy(ops=ops[:2])).ops == tuple(
        OpRule("softmax", "", "b.yaml:1:1", leaves=into) for into in LISTS
    )
    assert resolved(Policy(ops=ops)).ops == ops[2:3]


def test_an_op_that_two_files_call_by_two_names_is_named_once(tmp_path):
    """rsub is added to float32, which outdoes a removal, so `sub` may stand for both."""
    ops = (
        OpRule("subtract", "", "a.yaml:1:1", leaves="lower"),
        OpRule("rsub", "float32", "b.yaml:1:1"),
        OpRule("sub", "", "c.yaml:1:1", leaves="lower"),
    )
    kept = resolved(Policy(ops=ops)).ops
    assert [(rule.op, rule.origin) for rule in kept] == [
        ("sub", "c.yaml:1:1"),
        ("rsub", "b.yaml:1:1"),
    ]
    assert loaded(document(Policy(ops=ops)), tmp_path).ops[0].op == "sub"


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        (
            (
                OpRule("norm", "float32", "a.yaml:1:2"),
                OpRule("nuclear_norm", "lower", "b.yaml:3:4"),
            ),
            "a.yaml:1:2: this holds of aten's norm but not of nuclear_norm, which 'norm' means "
            "too, and a single file cannot say that",
        ),
        (
            (
                OpRule("sub", "", "a.yaml:1:2", leaves="float32"),
                OpRule("rsub", "float32", "b.yaml:3:4"),
            ),
            "a.yaml:1:2: this holds of aten's sub but not of rsub, which 'sub' means too",
        ),
        (
            (
                OpRule("binary_cross_entropy", "float32", "a.yaml:1:2"),
                OpRule("binary_cross_entropy", "", "b.yaml:3:4", leaves="float32"),
            ),
            "b.yaml:3:4: this lets through binary_cross_entropy, which torch refuses, and a "
            "single file cannot say that",
        ),
    ],
)
def test_what_one_file_cannot_say_is_an_error_and_never_another_policy(ops, message):
    with pytest.raises(PolicyError) as caught:
        document(Policy(ops=ops))
    assert str(caught.value).startswith(message)
    assert len(plain(Policy(ops=ops))["ops"]["rules"]) == 2


# validate


def test_validate_says_of_each_file_whether_it_is_a_policy(main, tmp_path):
    (tmp_path / "wrong.yaml").write_text("ops:\n  float32: {add: [sofmax]}\n")
    code, out, err = main("validate", "team.yaml", "wrong.yaml", str(tmp_path / "team.yaml"))
    valid = f"a valid policy (ops of torch {opnames.table()['torch']})"
    assert code == 1
    assert out == f"team.yaml: {valid}\n{tmp_path / 'team.yaml'}: {valid}\n"
    assert err == (
        f"{tmp_path / 'wrong.yaml'}:2:19: unknown op 'sofmax' in ops.float32.add. "
        "Did you mean 'softmax'?\n"
    )


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_policy_is_valid(main, name):
    assert main("validate", str(policyfile.shipped()[name]))[0] == 0


def test_validate_takes_a_file_by_any_name(main, tmp_path):
    (tmp_path / "default").write_text("outputs: sideways\n")
    code, out, err = main("validate", "default")
    assert (code, out) == (1, "")
    assert err.startswith(f"{tmp_path / 'default'}:1:10: outputs is 'sideways'.")


def test_validate_says_that_a_file_is_missing(main, tmp_path):
    code, out, err = main("validate", "nothing.yaml")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"{tmp_path / 'nothing.yaml'}: No such file or directory")


# schema


def test_schema_prints_the_json_schema(main):
    code, out, err = main("schema")
    assert (code, err) == (0, "")
    assert json.loads(out) == json_schema()


# explain


DOCUMENTED = {
    # pytorch/docs/source/amp.md, "CUDA Ops that can autocast to float16" and so on.
    ("cuda", "float16"): {
        "lower": ("matmul", "linear", "conv2d", "bmm", "prelu", "torch.linalg.multi_dot"),
        "float32": ("F.softmax", "layer_norm", "pow", "sum", "exp", "norm", "cdist", "mse_loss"),
        "widest": ("addcdiv", "atan2", "dot", "grid_sample", "index_put", "tensordot"),
        "refused": ("binary_cross_entropy",),
        "as given": ("relu", "add", "cat", "batch_norm", "max_pool2d", "gelu"),
    },
    # The same document, "CPU Ops that can autocast to bfloat16" and so on.
    ("cpu", "bfloat16"): {
        "lower": ("matmul", "linear", "conv2d", "bmm", "scaled_dot_product_attention"),
        "float32": ("mse_loss", "ctc_loss", "torch.fft.fft", "quantile", "binary_cross_entropy"),
        "widest": ("cat", "stack", "index_copy"),
        "as given": ("softmax", "layer_norm", "exp", "pow", "addmv", "dot", "sum"),
    },
    # The same document, "XPU Ops that can autocast to float16" and so on.
    ("xpu", "bfloat16"): {
        "lower": ("addmm", "baddbmm", "conv3d", "linear", "mv"),
        "float32": ("cumsum", "group_norm", "log_softmax", "rsqrt", "kl_div"),
        "widest": ("bilinear", "cross", "scatter_add"),
        "as given": ("relu", "add", "cat"),
    },
    # pytorch/aten/src/ATen/autocast_mode.cpp, TORCH_LIBRARY_IMPL(aten, AutocastMPS, m).
    ("mps", "float16"): {
        "lower": ("conv1d", "conv2d", "linear", "lstm_cell", "chain_matmul"),
        "float32": ("batch_norm", "softmax", "layer_norm", "huber_loss", "cosine_similarity"),
        "widest": ("addcmul", "dot", "tensordot"),
        "as given": ("relu", "add", "binary_cross_entropy"),
    },
}
FIGURES = {
    "float32": ("float32", "float32"),
    "widest": ("widest operand", "widest operand"),
    "refused": ("an error", "an error"),
    "as given": ("as given", "as given"),
}


@pytest.mark.parametrize(("device", "dtype"), DOCUMENTED)
def test_explain_says_what_torch_documents(device, dtype):
    policy = policyfile.load("torch")
    for category, spellings in DOCUMENTED[device, dtype].items():
        for spelling in spellings:
            found = explain.facts(policy, device, ops=opnames.resolve(spelling))
            assert found["dtype"] == dtype
            for op in found["ops"]:
                assert (op["op"], op["list"]) == (op["op"], category)
                assert (op["computes"], op["gives"]) == FIGURES.get(category, (dtype, dtype))
                if category == "as given":
                    assert (op["kernel"], op["origin"][:7]) == ("no kernel", "no list")
                else:
                    assert op["kernel"] == "torch's kernel"
                    assert op["origin"] == f"torch's list for {device}"


def test_explain_prints_a_line_for_each_op(main):
    code, out, err = main("explain", "torch")
    assert (code, err) == (0, "")
    table = rows(out)
    packets = {row.packet for row in plan.rows(policyfile.load("torch"), "cuda", "float16")}
    assert set(table) == packets
    lists = "torch's list for cuda"
    assert table["mm"] == ["lower", "float16", "float16", "torch's kernel", lists]
    assert table["pow"] == ["float32", "float32", "float32", "torch's kernel", lists]
    assert not [line for line in out.splitlines() if line != line.rstrip()]


def test_explain_says_what_its_figures_rest_on(main):
    code, out, _ = main("explain", "team.yaml", LOWER_ADD="gelu", LOSS_SCALE="128", LOG="quiet")
    assert code == 0
    version = sys.modules["torch"].__version__
    assert head(out) == {
        "policy": ["team.yaml"],
        "variables": [f"{SWITCH}_LOSS_SCALE=128", f"{SWITCH}_LOWER_ADD=gelu"],
        "torch": [version],
        "device": ["cuda, float16"],
        "ops": ["torch's lists for cuda, and the policy's rules"],
        "modules": ['name "decoder.*.attn": float32, to step 1000 (team.yaml:9:5)'],
        "parameters": ['regex "emb.*": float32 (team.yaml:10:14)'],
        "outputs": ["float32"],
        "loss scale": ["static, 128"],
        "fallback": ["on_error float32, on_overflow keep, inspect false, patience 3"],
        "gradients": ["between processes: keep"],
        "performance": [
            "memory_format keep, optimizer keep, float32_matmul keep, cudnn_benchmark keep, "
            "weight_cache off, stand_down off"
        ],
    }


def test_explain_shows_what_a_policy_changes_and_who_says_so(main):
    words = ("softmax", "layer_norm", "leaky_relu", "gelu", "exp")
    options = [word for op in words for word in ("--op", op)]
    table = rows(main("explain", "team.yaml", *options, FLOAT32_ADD="gelu")[1])
    assert table == {
        "exp": ["float32", "float32", "float32", "torch's kernel", "torch's list for cuda"],
        "gelu": ["float32", "float32", "float32", "our kernel", f"{SWITCH}_FLOAT32_ADD"],
        "layer_norm": ["lower", "float16", "float16", "our kernel", "team.yaml:5:17"],
        "leaky_relu": ["as given", "as given", "as given", "our kernel", "no list"],
        "where negative_slope=0.2": [*["float32"] * 3, "our kernel", "team.yaml:7:12"],
        "softmax": ["as given", "as given", "as given", "our kernel", "team.yaml:4:22"],
    }


def test_explain_lets_the_variables_name_the_policy(main):
    assert head(main("explain", "--op", "mm")[1])["policy"] == ["default (default.yaml)"]
    assert head(main("explain", "--op", "mm", SWITCH="bf16")[1])["policy"] == ["bf16 (bf16.yaml)"]
    asked = main("explain", "--op", "mm", SWITCH="bf16", POLICY="./team.yaml")
    assert head(asked[1])["policy"] == ["team.yaml"]
    asked = main("explain", "fp16", "--op", "mm", POLICY="./team.yaml")
    assert head(asked[1])["policy"] == ["fp16 (fp16.yaml)"]


def test_explain_takes_the_dtype_from_the_option_the_variable_or_the_policy(main):
    def dtype(*options: str, **variables: str) -> str:
        out = main("explain", "torch", "--op", "mm", *options, **variables)[1]
        computes = rows(out)["mm"][1]
        assert head(out)["device"][0].endswith(f", {computes}")
        return computes

    assert dtype() == "float16"
    assert dtype("--device", "cpu") == "bfloat16"
    assert dtype(DTYPE="bfloat16") == "bfloat16"
    assert dtype("--dtype", "float16", DTYPE="bfloat16") == "float16"


def test_explain_follows_the_lists_that_the_base_names(main, tmp_path):
    """addmv is in torch's list for CUDA, not in that for the CPU."""
    (tmp_path / "team.yaml").write_text("ops: {base: {float16: cuda, bfloat16: none}}\n")
    options = ("explain", "team.yaml", "--device", "cpu", "--op", "addmv", "--op", "mm", "--dtype")
    in_half = rows(main(*options, "float16")[1])
    assert in_half["addmv"] == ["lower", *["float16"] * 2, "our kernel", "torch's list for cuda"]
    assert in_half["mm"] == ["lower", *["float16"] * 2, "torch's kernel", "torch's list for cuda"]
    out = main(*options, "bfloat16")[1]
    assert head(out)["ops"] == ["the policy's rules"]
    assert rows(out)["mm"] == [*["as given"] * 3, "our kernel", "no list"]


def test_explain_says_what_becomes_of_operands_and_results(main, tmp_path):
    (tmp_path / "team.yaml").write_text("ops: {operands: parameter, results: float32}\n")
    out = main("explain", "team.yaml", "--op", "linear", "--op", "exp")[1]
    assert rows(out)["linear"][:4] == ["lower", "float16", "float32", "our kernel"]
    assert rows(out)["exp"][:4] == ["float32", "float32", "float32", "torch's kernel"]
    assert head(out)["ops"][1:] == [
        "those in lower: where a parameter is an operand, else in float32",
        "those in lower: results are cast to float32",
    ]


def test_explain_says_that_a_device_is_off(main):
    code, out, _ = main("explain", "team.yaml", "--device", "cpu")
    assert code == 0
    assert out.endswith("device      cpu, off\nModels on cpu run in float32.\n")
    assert rows(main("explain", "team.yaml", "--device", "cpu", "--dtype", "bfloat16")[1])["mm"]


def test_explain_knows_that_bfloat16_needs_no_loss_scale(main):
    assert head(main("explain", "bf16", "--op", "mm")[1])["loss scale"] == [
        "none, bfloat16 needs none"
    ]


@pytest.mark.parametrize("spelling", ["gelu", "F.gelu", "torch.nn.functional.gelu", "aten::gelu"])
def test_explain_takes_any_spelling_of_an_op_also_of_one_in_no_list(main, spelling):
    expected = {"gelu": ["as given", "as given", "as given", "no kernel", "no list"]}
    assert rows(main("explain", "torch", "--op", spelling)[1]) == expected


def test_explain_tells_about_every_op_that_a_name_means(main):
    table = rows(main("explain", "torch", "--op", "torch.norm")[1])
    assert list(table) == sorted(opnames.resolve("norm"))


def test_explain_does_not_pass_over_what_is_inside_an_op(main):
    """cross_entropy is in no list of CUDA's, but is made of two ops that are."""
    origin = rows(main("explain", "torch", "--op", "cross_entropy")[1])["cross_entropy_loss"][-1]
    assert origin == "no list; made of other ops, which may be in one"


def test_explain_does_not_know_an_unknown_op(main):
    code, out, err = main("explain", "--op", "sofmax")
    assert (code, out) == (2, "")
    assert err.endswith("argument --op: unknown op 'sofmax'. Did you mean 'softmax'?\n")


def test_explain_refuses_a_condition_that_can_never_hold(main, tmp_path):
    rule = "{op: leaky_relu, when: {slope: 0.2}, precision: float32}"
    (tmp_path / "team.yaml").write_text(f"ops: {{when: [{rule}]}}\n")
    code, out, err = main("explain", "team.yaml")
    assert (code, out) == (1, "")
    assert err.startswith(f"{tmp_path / 'team.yaml'}:1:19: leaky_relu has no argument 'slope'")


def test_explain_finds_the_variable_that_is_wrong(main):
    code, out, err = main("explain", "--op", "mm", DTYPE="float8")
    assert (code, out) == (1, "")
    assert err == f"{SWITCH}_DTYPE=float8: use one of: float16, bfloat16.\n"
    err = main("explain", "--op", "mm", FLOAT32_ADD="sofmax")[2]
    assert err == f"{SWITCH}_FLOAT32_ADD: unknown op 'sofmax'. Did you mean 'softmax'?\n"


def test_explain_all_tells_about_every_op_that_a_policy_can_name(main):
    told = json.loads(main("explain", "torch", "--all", "--json")[1])["ops"]
    assert {op["op"] for op in told} == set(opnames.table()["ops"])
    listed = [op for op in told if op["list"] != "as given"]
    usual = json.loads(main("explain", "torch", "--json")[1])["ops"]
    assert listed == usual


def test_overloads_that_differ_get_lines_of_their_own(main, tmp_path):
    """Only some forms of `std` take `unbiased`."""
    rule = "{op: std, when: {unbiased: false}, precision: float32}"
    (tmp_path / "team.yaml").write_text(f"ops: {{when: [{rule}], lower: {{add: [std]}}}}\n")
    table = rows(main("explain", "team.yaml", "--op", "std")[1])
    own, rest = (set(name.split(", ")) for name in table if name.startswith("std"))
    assert {"std", "std.dim"} <= own | rest
    assert (own & rest, {"std.dim"} <= own, {"std.correction"} <= rest) == (set(), True, True)
    assert table["where unbiased=False"][0] == "float32"


def test_who_took_an_op_out_of_a_list_is_told_also_beside_what_was_in_none():
    """The CPU's list has only one of the two forms of `_convolution`."""
    policy = Policy(ops=(OpRule("_convolution", "", "a.yaml:1:1", leaves="lower"),))
    for every in (False, True):
        (op,) = explain.facts(policy, "cpu", ops=["_convolution"], every=every)["ops"]
        assert (op["list"], op["origin"]) == ("as given", "a.yaml:1:1")
        assert op["overloads"]["_convolution.deprecated"] == "our kernel"
        assert op["overloads"].get("_convolution", "no kernel") == "no kernel"
        assert ("_convolution" in op["overloads"]) == every


def test_explain_as_data_says_the_same(main):
    found = json.loads(main("explain", "team.yaml", "--op", "leaky_relu", "--json", DTYPE="")[1])
    assert (found["schema"], found["device"], found["dtype"]) == (1, "cuda", "float16")
    assert found["policy"]["name"] == "team.yaml"
    (op,) = found["ops"]
    assert (op["list"], op["overloads"]["leaky_relu"]) == ("as given", "our kernel")
    (condition,) = op["conditions"]
    assert condition["when"] == {"negative_slope": 0.2}
    assert (condition["list"], condition["computes"]) == ("float32", "float32")
    assert condition["origin"].endswith("team.yaml:7:12")


def test_the_last_condition_that_holds_wins_and_is_told_first(tmp_path):
    rules = tuple(
        OpRule("softmax", into, f"a.yaml:{n}:1", (("dim", n),))
        for n, into in enumerate(("lower", "float32"))
    )
    (op,) = explain.facts(Policy(ops=rules), "cpu", ops=["softmax"])["ops"]
    assert [c["origin"] for c in op["conditions"]] == ["a.yaml:1:1", "a.yaml:0:1"]


# Places


def test_places_are_short(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert place(f"{policyfile.shipped()['default']}:12:9") == "default.yaml:12:9"
    assert place(f"{tmp_path}/conf/team.yaml:3:4") == "conf/team.yaml:3:4"
    assert place("/elsewhere/team.yaml:3:4") == "/elsewhere/team.yaml:3:4"
    assert place(f"{SWITCH}_LOWER_ADD") == f"{SWITCH}_LOWER_ADD"
    assert place(f"{tmp_path}/a\nb.yaml:1:1") == r"a\nb.yaml:1:1"


# The process


@pytest.fixture
def process(tmp_path: Path) -> Callable[..., Any]:
    """Run `autoamp policy` in an empty folder, whose modules are found before all others."""

    def run(*arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "autoamp", "policy", *arguments],
            env=environment(**how),
            cwd=tmp_path,
            capture_output=True,
            encoding="utf-8",
            check=False,
        )

    return run


def environment(**variables: str) -> dict[str, str]:
    ours = (SWITCH, "PYTHON", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    return {**{k: v for k, v in os.environ.items() if not k.startswith(ours)}, **variables}


def test_policy_alone_prints_its_help_and_fails(process):
    result = process()
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("usage: autoamp policy ")
    for command in ("list", "show", "validate", "explain", "schema"):
        assert f"\n    {command} " in result.stderr


@pytest.mark.parametrize(
    "arguments", [("list",), ("show", "safe"), ("validate", "safe"), ("schema",)]
)
def test_only_explain_imports_torch(process, tmp_path, arguments):
    (tmp_path / "torch.py").write_text("import os; os._exit(99)")
    result = process(*arguments)
    assert (result.returncode, result.stderr) == (0, "")
    assert process("explain").returncode == 99


def test_explain_says_clearly_that_torch_is_missing(process, tmp_path):
    missing = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    (tmp_path / "torch.py").write_text(missing)
    result = process("explain")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == ("autoamp policy explain: torch is not installed (pip install torch)\n")


def test_explain_is_not_changed_by_autoamp_itself(process):
    """Switched on, it would put kernels into the torch that is asked for its own."""
    result = process("explain", "--json", AUTO_MIXED_PRECISION="tensorflow")
    assert (result.returncode, result.stderr) == (0, "")
    assert (
        json.loads(result.stdout)["ops"]
        == explain.facts(policyfile.load("tensorflow"), "cuda")["ops"]
    )


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGPIPE")
def test_a_pipe_that_nobody_reads_ends_it_quietly():
    command = [sys.executable, "-m", "autoamp", "policy", "schema"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        process.stdout.close()  # as `head` does once it has enough
        assert process.stderr.read() == b""
    assert process.returncode == -signal.SIGPIPE


@pytest.mark.skipif(os.name == "nt", reason="Windows has no FIFOs")
def test_ctrl_c_ends_it_quietly(tmp_path):
    os.mkfifo(tmp_path / "slow.yaml")
    command = [sys.executable, "-m", "autoamp", "policy", "validate", "slow.yaml"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), cwd=tmp_path
    )
    with (tmp_path / "slow.yaml").open("wb"):  # open as soon as the command reads it
        process.send_signal(signal.SIGINT)
        assert process.communicate() == (b"", b"")
    assert process.returncode == -signal.SIGINT


def test_what_the_terminal_cannot_show_is_escaped(process, tmp_path):
    (tmp_path / "team.yaml").write_text('modules: [{name: "größe", precision: float32}]\n', "utf-8")
    result = process("show", "team.yaml", PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stderr) == (0, "")
    (tmp_path / "shown.yaml").write_text(result.stdout)
    (rule,) = policyfile.load(str(tmp_path / "shown.yaml")).modules
    assert rule.name == "größe"
