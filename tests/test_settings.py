"""The environment: each variable, each value that it cannot have, and who wins."""

from __future__ import annotations

import pytest

from autoamp.errors import SettingsError
from autoamp.settings import VARIABLES, Settings, is_excluded, origin_of_policy, read

SWITCH = "AUTO_MIXED_PRECISION"


def message(environ: dict[str, str]) -> str:
    with pytest.raises(SettingsError) as caught:
        read(environ)
    return str(caught.value)


def test_nothing_set_means_the_defaults():
    assert read({"PATH": "/bin", "AUTO_MIXED": "1"}) == Settings(
        policy="default",
        dtype=None,
        loss_scale=None,
        log="notice",
        report=None,
        strict=False,
        only=(),
        lower_add=(),
        lower_remove=(),
        float32_add=(),
        float32_remove=(),
        widest_add=(),
        widest_remove=(),
    )


@pytest.mark.parametrize("word", ["", "1", "true", "ON", "Yes", "0", "false", "off", "no", " 1 "])
def test_a_switch_that_is_no_policy_leaves_the_default_one(word):
    assert read({SWITCH: word}) == Settings()


@pytest.mark.parametrize("reference", ["bf16", "./mine.yaml", "/etc/2.yaml", " bf16 "])
def test_any_other_value_of_the_switch_is_the_policy(reference):
    assert read({SWITCH: reference}) == Settings(policy=reference.strip())


@pytest.mark.parametrize("switch", ["1", "0", "fp16", ""])
def test_policy_counts_more_than_the_switch(switch):
    environ = {SWITCH: switch, f"{SWITCH}_POLICY": "bf16"}
    assert read(environ) == Settings(policy="bf16")
    assert origin_of_policy(environ) == "AUTO_MIXED_PRECISION_POLICY"


@pytest.mark.parametrize("empty", [{}, {f"{SWITCH}_POLICY": " "}])
def test_without_policy_the_switch_is_who_asked(empty):
    environ = {SWITCH: "fp16", **empty}
    assert read(environ) == Settings(policy="fp16")
    assert origin_of_policy(environ) == "AUTO_MIXED_PRECISION"


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("POLICY", "bf16", "policy", "bf16"),
        ("DTYPE", "float16", "dtype", "float16"),
        ("DTYPE", " bfloat16 ", "dtype", "bfloat16"),
        ("LOSS_SCALE", "dynamic", "loss_scale", "dynamic"),
        ("LOSS_SCALE", "128", "loss_scale", 128.0),
        ("LOSS_SCALE", "0.5", "loss_scale", 0.5),
        ("LOSS_SCALE", "1e4", "loss_scale", 10000.0),
        *[("LOG", level, "log", level) for level in ("quiet", "notice", "info", "debug")],
        ("REPORT", "runs/a b.json", "report", "runs/a b.json"),
        ("TENSORBOARD", "runs/tb", "tensorboard", "runs/tb"),
        *[("STRICT", text, "strict", True) for text in ("1", "true", "On", "YES")],
        ("DRY", "1", "dry", True),
        *[("STRICT", text, "strict", False) for text in ("0", "False", "off", "no")],
        ("ONLY", "train*.py", "only", ("train*.py",)),
        ("ONLY", " train*.py , !train_old.py,, ", "only", ("train*.py", "!train_old.py")),
        ("LOWER_ADD", "softmax", "lower_add", ("softmax",)),
        ("LOWER_REMOVE", "mm,bmm", "lower_remove", ("mm", "bmm")),
        (
            "FLOAT32_ADD",
            " F.gelu , torch.Tensor.mm,, ",
            "float32_add",
            ("F.gelu", "torch.Tensor.mm"),
        ),
        ("FLOAT32_REMOVE", "aten::pow", "float32_remove", ("aten::pow",)),
        ("WIDEST_ADD", "mul,mul", "widest_add", ("mul", "mul")),
        ("WIDEST_REMOVE", ",", "widest_remove", ()),
    ],
)
def test_a_variable_is_read_as(name, text, field, value):
    settings = read({f"{SWITCH}_{name}": text})
    assert settings == Settings(**{field: value})
    assert type(getattr(settings, field)) is type(value)


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("blank", ["", "  "])
def test_an_empty_variable_is_an_unset_one(name, blank):
    assert read({f"{SWITCH}_{name}": blank}) == Settings()


NUMBER = "use 'dynamic' or a positive number"
FLAG = "use one of: 1, true, on, yes, 0, false, off, no"
LEVEL = "use one of: quiet, notice, info, debug"


@pytest.mark.parametrize(
    ("name", "text", "remedy"),
    [
        ("DTYPE", "fp16", "use one of: float16, bfloat16"),
        ("DTYPE", "float32", "use one of: float16, bfloat16"),
        ("DTYPE", "off", "use one of: float16, bfloat16"),
        *[("LOSS_SCALE", text, NUMBER) for text in ("static", "0", "-1", "inf", "nan", "1e400")],
        ("LOG", "loud", LEVEL),
        ("LOG", "10", LEVEL),
        ("STRICT", "2", FLAG),
        ("STRICT", "strict", FLAG),
    ],
)
def test_a_value_that_means_nothing_is_refused_with_those_that_do(name, text, remedy):
    assert message({f"{SWITCH}_{name}": text}) == f"AUTO_MIXED_PRECISION_{name}={text}: {remedy}."


@pytest.mark.parametrize("text", ["1e39", "1e-46", "1e-39"])
def test_a_loss_scale_that_float32_cannot_hold_or_invert_is_refused(text):
    """float32 makes infinity, zero and a number without reciprocal of them: NaN gradients."""
    assert message({f"{SWITCH}_LOSS_SCALE": text}).startswith(
        f"AUTO_MIXED_PRECISION_LOSS_SCALE={text}: use 'dynamic' or "
    )


KNOWN = (
    "Known: POLICY, DTYPE, LOSS_SCALE, LOG, REPORT, TENSORBOARD, STRICT, DRY, ONLY, LOWER_ADD, "
    "LOWER_REMOVE, FLOAT32_ADD, FLOAT32_REMOVE, WIDEST_ADD, WIDEST_REMOVE."
)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("DTYP", "Did you mean AUTO_MIXED_PRECISION_DTYPE?"),
        ("LOSSSCALE", "Did you mean AUTO_MIXED_PRECISION_LOSS_SCALE?"),
        ("STRICKT", "Did you mean AUTO_MIXED_PRECISION_STRICT?"),
        ("FLOAT32_AD", "Did you mean AUTO_MIXED_PRECISION_FLOAT32_ADD?"),
        ("LOWER_DELETE", "Did you mean AUTO_MIXED_PRECISION_LOWER_REMOVE?"),
        ("log", "Did you mean AUTO_MIXED_PRECISION_LOG?"),
        ("Z", KNOWN),
        ("", KNOWN),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest_right_one(name, hint):
    for text in ("1", ""):
        assert message({f"{SWITCH}_{name}": text}) == f"{SWITCH}_{name}: unknown variable. {hint}"


def test_the_first_mistake_by_name_is_told():
    environ = {f"{SWITCH}_STRICT": "x", f"{SWITCH}_LOG": "x", f"{SWITCH}_DTYPE": "float16"}
    assert message(environ).startswith("AUTO_MIXED_PRECISION_LOG=x: ")


def test_settings_cannot_be_changed():
    with pytest.raises(AttributeError):
        read({}).dtype = "float16"


@pytest.mark.parametrize(
    ("globs", "script", "excluded"),
    [
        ("", "train.py", False),
        ("train.py", "train.py", False),
        ("train.py", "/home/me/train.py", False),
        ("train.py", "eval.py", True),
        ("train*.py,run_*", "run_glue.py", False),
        ("train*.py,run_*", "/usr/bin/pip", True),
        ("run_?", "run_12", True),
        ("run_[ab]", "run_b", False),
        ("home", "/home/train.py", True),
        ("train.py", "", True),
        ("!eval*.py", "train.py", False),
        ("!eval*.py", "eval_mnist.py", True),
        ("!eval*.py,!pip", "pip", True),
        ("!eval*.py,eval_b.py", "eval_b.py", False),
        ("train*.py,!train_old.py", "train.py", False),
        ("train*.py,!train_old.py", "train_old.py", True),
        ("train*.py,!train_old.py", "other.py", True),
        ("!train_old.py,train*.py", "train_old.py", False),
    ],
)
def test_only_goes_by_the_file_name_and_the_last_match_wins(globs, script, excluded):
    assert is_excluded(read({f"{SWITCH}_ONLY": globs}).only, script) is excluded


def slips(name: str) -> set[str]:
    """`name` with one letter left out, doubled, wrong, or in the place of its neighbour."""
    cuts = [(name[:i], name[i], name[i + 1 :]) for i in range(len(name))]
    return {
        typed
        for before, letter, after in cuts
        for typed in (
            before + after,
            before + letter * 2 + after,
            f"{before}X{after}",
            before + after[:1] + letter + after[1:],
        )
    }


@pytest.mark.parametrize("right", [SWITCH, *(f"{SWITCH}_{name}" for name in VARIABLES)])
def test_a_slip_in_any_variable_is_told_with_the_right_word(right):
    wrong = {*slips(right), right.lower()} - {right}
    for name in sorted(wrong):
        told = message({SWITCH: "1", name: "1"})
        assert told == f"{name}: unknown variable. Did you mean {right}?"


def test_a_slip_of_two_letters_is_told_too():
    assert message({"AUTO_MIX_PRECISION_DTYPE": "float16"}) == (
        "AUTO_MIX_PRECISION_DTYPE: unknown variable. Did you mean AUTO_MIXED_PRECISION_DTYPE?"
    )


@pytest.mark.parametrize(
    "name",
    [
        "AUTO_MIXED_PRECISION",
        "AUTO_MERGE",
        "TF_AUTO_MIXED_PRECISION",
        "TF_ENABLE_AUTO_MIXED_PRECISION_LOG",
        "MIXED_PRECISION",
        "USE_MIXED_PRECISION",
        "AMP_MIXED_PRECISION",
        "ACCELERATE_MIXED_PRECISION",
        "MY_AUTO_MIXED_PRECISION_LOG",
    ],
)
def test_variables_of_others_are_nobodys_slips(name):
    assert read({SWITCH: "1", name: "1"}) == read({SWITCH: "1"})
