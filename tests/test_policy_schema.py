"""The JSON Schema of policy files: itself valid, and of one opinion with the reader."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_policyfile import MISTAKES

from autoamp import grammar, opnames, policyfile
from autoamp.errors import PolicyError
from autoamp.schema import json_schema
from autoamp.sections import POLICY
from autoamp.yamlnodes import Piece, compose, plain_value

SCHEMA = json_schema()
VALIDATOR = jsonschema.Draft202012Validator(
    SCHEMA, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
)


def as_yaml_1_2(path) -> Any:
    """What an editor sees; ``yaml.safe_load`` reads YAML 1.1, where ``off`` is false."""

    def plain(node: yaml.Node) -> Any:
        if isinstance(node, yaml.MappingNode):
            return {plain(key): plain(value) for key, value in node.value}
        if isinstance(node, yaml.SequenceNode):
            return [plain(item) for item in node.value]
        return plain_value(Piece(path, node, "x")) if node.value or node.style else None

    return plain(compose(path, ""))


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert SCHEMA["title"]


def test_the_schema_is_plain_json():
    assert json.loads(json.dumps(SCHEMA, allow_nan=False)) == SCHEMA


def test_every_key_has_a_description():
    def silent(schema: dict[str, Any], where: str) -> list[str]:
        found = [] if schema.get("description") else [where]
        for key, value in schema.get("properties", {}).items():
            found += silent(value, f"{where}.{key}")
        for value in (*schema.get("anyOf", ()), *[schema[k] for k in ("items",) if k in schema]):
            found += silent(value, f"{where}[]")
        return found

    assert silent(SCHEMA, "policy") == []


@pytest.mark.parametrize("name", policyfile.shipped())
def test_a_shipped_policy_fits_the_schema(name):
    VALIDATOR.validate(as_yaml_1_2(policyfile.shipped()[name]))


# What other files say, and what lists say together: no schema can tell.
TOGETHER = (
    *("unknown policy", "is read already", "goes round", "outside min", "'to' must be greater"),
    *(" twice", " too; "),
)
# What is no YAML, or has no like in JSON; and a pattern that Python's validator stumbles over.
YAML_ONLY = (
    *("not valid YAML", "is not allowed in a policy", "which equals nothing", "has no value"),
    *("a key must be", "devices.cuda must be a single word or number, not a map", "too large"),
)
STRUCTURAL = [
    name
    for name, (_, message) in MISTAKES.items()
    if not any(words in message for words in (*TOGETHER, *YAML_ONLY))
]


def test_most_mistakes_are_structural():
    assert len(STRUCTURAL) > 70


@pytest.mark.parametrize("mistake", STRUCTURAL)
def test_what_the_reader_refuses_the_schema_refuses(tmp_path, mistake):
    path = tmp_path / "mine.yaml"
    path.write_text(MISTAKES[mistake][0])
    assert not VALIDATOR.is_valid(as_yaml_1_2(path))


@pytest.mark.parametrize("spelling", [*opnames.spellings(), *opnames.MADE_OF_OTHERS])
def test_an_op_fits_in_the_spellings_that_the_reader_knows(spelling):
    for prefix in (
        "",
        "F.",
        "torch.",
        "torch.linalg.",
        "torch.ops.aten.",
        "aten::",
        "torch.nn.",
        "torch_",
    ):
        op = prefix + spelling.removeprefix("linalg_" if "linalg" in prefix else "")
        document = {"ops": {"lower": {"add": [op]}}}
        assert VALIDATOR.is_valid(document) == bool(opnames.resolve(op)), op


# --- documents made from the grammar, right ones and wrong ones ----------------------------------

NUMBERS = (0, 0.25, 1, 2, 3.5, 1000, 65536, -1, 1e300)


def fits(number: float, kind: grammar.Number) -> bool:
    bounds = kind.bounds
    return (
        bounds.get("minimum", -1e308) <= number <= bounds.get("maximum", 1e308)
        and bounds.get("exclusiveMinimum", -1e308) < number < bounds.get("exclusiveMaximum", 1e308)
        and (isinstance(number, int) or not kind.whole)
    )


def right(kind: grammar.Kind) -> st.SearchStrategy[Any]:
    match kind:
        case grammar.Word():
            return st.sampled_from(kind.words)
        case grammar.Flag():
            return st.booleans()
        case grammar.Number():
            return st.sampled_from([number for number in NUMBERS if fits(number, kind)])
        case grammar.Text():
            return st.just("torch")  # a policy, a glob, a regex, and a class in one
        case grammar.Op():
            return st.sampled_from(["softmax", "F.gelu", "torch.linalg.vecdot", "aten::addmm"])
        case grammar.Arguments():
            values = st.sampled_from([1, 0.5, "tanh", "off", True, None])
            return st.dictionaries(st.sampled_from(["p", "dim"]), values, min_size=1)
        case grammar.Map():
            return right_map(kind)
        case grammar.List():
            return st.lists(right(kind.of), max_size=2)
        case grammar.Either():
            return right(kind.one) | right(kind.several)


@st.composite
def right_map(draw: st.DrawFn, kind: grammar.Map) -> dict[str, Any]:
    free = [key for key in kind.keys if key not in (*kind.needed, *kind.one_of)]
    keys = draw(st.sets(st.sampled_from(free), min_size=kind.some)) if free else set()
    keys |= {*kind.needed, *([draw(st.sampled_from(kind.one_of))] if kind.one_of else [])}
    return {key: draw(right(value)) for key, value in kind.keys.items() if key in keys}


@st.composite
def wrong(draw: st.DrawFn, kind: grammar.Kind) -> Any:
    """One mistake, here or further down."""
    deeper: list[st.SearchStrategy[Any]] = []
    match kind:
        case grammar.Word():
            bad: list[Any] = [None, "zzz", 1, True, [], {}]
        case grammar.Flag():
            bad = [None, "on", "", 1, [], {}]
        case grammar.Number():
            bad = [None, "zzz", True, [], {}, -5]
        case grammar.Text():
            bad = [None, [], {}, *([""] if kind.rule else [])]
        case grammar.Op():
            bad = [None, "sofmax", "softmax.int", "relu_", "F.softmin", 1, [], {}]
        case grammar.Arguments():
            bad = [None, "p", {}, [], {"2p": 1}, {"p": []}, {"p": {}}]
        case grammar.Map():
            bad = [None, "zzz", [], {"zzz": 1}]
            deeper = [wrong_map(kind)]
        case grammar.List():
            bad = [None, "zzz", {}, 1]
            deeper = [wrong(kind.of).map(lambda item: [item])]
        case grammar.Either():
            bad = [None, "" if isinstance(kind.one, grammar.Text) else "zzz"]
            bad += [{}] if isinstance(kind.several, grammar.List) else [[]]
            is_map = isinstance(kind.several, grammar.Map)
            deeper = (
                [wrong_map(kind.several)] if is_map else [wrong(kind.several.of).map(lambda x: [x])]
            )
    return draw(st.one_of(st.sampled_from(bad), *deeper))


@st.composite
def wrong_map(draw: st.DrawFn, kind: grammar.Map) -> dict[str, Any]:
    document = draw(right_map(kind))
    key = draw(st.sampled_from(list(kind.keys)))
    if key in kind.one_of:
        document = {k: v for k, v in document.items() if k not in kind.one_of}
        if draw(st.booleans()):
            document.update(dict.fromkeys(kind.one_of[:2], "torch"))
    elif key in kind.needed and draw(st.booleans()):
        del document[key]
    else:
        document[key] = draw(wrong(kind.keys[key]))
    return document


FEW = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def complaint(tmp_path, document: Any) -> str:
    """What the reader says of a document that is refused for what it is by itself."""
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(document))
    try:
        policyfile.load(str(path))
    except PolicyError as error:
        return "" if any(words in str(error) for words in TOGETHER) else str(error)
    return ""


@FEW
@given(document=right_map(POLICY))
def test_what_the_grammar_allows_the_reader_and_the_schema_take(tmp_path, document):
    VALIDATOR.validate(document)
    assert complaint(tmp_path, document) == ""


@FEW
@given(document=wrong_map(POLICY))
def test_what_it_does_not_allow_both_refuse(tmp_path, document):
    assert not VALIDATOR.is_valid(document)
    assert complaint(tmp_path, document) != ""
