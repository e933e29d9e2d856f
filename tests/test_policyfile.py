"""What a policy file may say, and what is said about each mistake in one."""

from __future__ import annotations

import os
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoamp import policyfile
from autoamp.errors import PolicyError
from autoamp.policy import DEVICES, LossScaleRule, Policy

MIXED_DEVICES = {"cuda": "float16", "cpu": "bfloat16", "xpu": "bfloat16", "mps": "float16"}
TORCHS_SCALE = LossScaleRule("dynamic", 65536.0, 2.0, 0.5, 2000, 1, 0.0, float("inf"))
BOUNDED_SCALE = replace(TORCHS_SCALE, min=1.0, max=16777216.0)
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


def test_these_policies_are_shipped():
    assert set(policyfile.shipped()) == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_policy_is_what_its_file_says(name):
    devices, loss_scale = SHIPPED[name]
    source = str(policyfile.shipped()[name])
    assert policyfile.load(name) == Policy(name, source, devices, "float32", loss_scale)


def test_a_policy_that_says_nothing_is_the_one_in_torch_yaml():
    read = policyfile.load("torch")
    assert replace(read, name="", source="") == Policy()


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


# --- mistakes ------------------------------------------------------------------------------------

MISTAKES = {
    "unknown key": (
        "outputs: keep\ndevice: {cuda: off}",
        "2:1: unknown key 'device'. Did you mean 'devices'?",
    ),
    "unknown key far from all": (
        "zzz: 1",
        "1:1: unknown key 'zzz'. Use one of: extends, devices, outputs, loss_scale.",
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
    "list for extends": (
        "extends: [torch]",
        "1:10: extends must be a single word or number, not a list.",
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


TAGS = {
    "a word": ("outputs: !!python/name:os.system", "1:10"),
    "a list": ("outputs: !!python/object/apply:os.system ['echo > built']", "1:10"),
    "a map": ("devices: !!python/object/new:os.system {cuda: off}", "1:10"),
    "the whole": ("!!python/object:os.system {outputs: keep}", "1:1"),
    "a key": ("? !!python/object/apply:os.system ['echo > built']\n: x", "1:3"),
    "a module": ("outputs: !!python/module:antigravity", "1:10"),
    "one's own": ("outputs: !mine keep", "1:10"),
    "binary": ("outputs: !!binary a2VlcA==", "1:10"),
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


def test_an_unknown_name_comes_with_who_asked_and_the_nearest_name():
    assert message_about("fp6", "AUTO_MIXED_PRECISION_POLICY") == (
        "AUTO_MIXED_PRECISION_POLICY: unknown policy 'fp6'. Did you mean 'fp16'? "
        "A file is named by its path: ./fp6.yaml"
    )
    assert message_about("mine") == (
        "AUTO_MIXED_PRECISION: unknown policy 'mine'. Use one of: bf16, default, fp16, torch. "
        "A file is named by its path: ./mine.yaml"
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


# --- whatever it is ------------------------------------------------------------------------------

WORDS = (
    "extends devices outputs loss_scale init min max mode interval cuda cpu torch keep off float16 "
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
