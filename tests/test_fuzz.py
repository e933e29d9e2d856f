"""Anything at all for a policy or a variable: it is understood, or refused in one line.

`FUZZ_EXAMPLES=100000 pytest tests/test_fuzz.py` tries that many of each; docs/security.md says what
was run last.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from autoamp import policyfile, settings, yamlnodes
from autoamp.bootstrap import _explain
from autoamp.errors import AutoampError, PolicyError, SettingsError
from autoamp.policy import Policy
from autoamp.policytext import document
from autoamp.sections import POLICY
from autoamp.settings import SWITCH, VARIABLES

SECONDS = 20
"""More than any of them may take, on a slow machine."""
fuzzed = hypothesis_settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "150")),
    deadline=SECONDS * 1000,
    suppress_health_check=list(HealthCheck),
)
FORBIDDEN = ("compile", "exec", "import", "os.system", "os.exec", "os.posix_spawn", "os.fork")
FORBIDDEN += ("subprocess.Popen", "pickle.find_class", "socket.connect", "ctypes.dlopen")
_seen: list[str] | None = None


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _seen is not None and (event in FORBIDDEN or (event == "open" and args[1] not in _READ)):
        _seen.append(f"{event} {args[:2]}")


_READ = ("r", "rb", None)
sys.addaudithook(_audit)


@contextmanager
def nothing_runs() -> Iterator[None]:
    """No code is compiled or run in here, nothing imported, no file opened but to be read."""
    global _seen
    _seen = seen = []
    try:
        yield
    finally:
        _seen = None
    assert seen == []


def outcome(run: Callable[[], Any]) -> Any:
    """What it gives, or the error of ours that it raises, which is printed as one line."""
    try:
        return run()
    except AutoampError as caught:
        error = caught
    assert str(error).isprintable()
    assert _explain(error).isprintable()
    return error


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy that is tried, beside one that it may extend."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "a.yaml").write_text("extends: torch\nmodules: [{name: a, precision: float32}]\n")
    policyfile.load(str(folder / "a.yaml"))  # what is imported late is imported now
    return folder / "mine.yaml"


def check(file: Path, text: bytes) -> None:
    """What a file of these bytes comes to: a policy that can be shown, or an error with a place."""
    file.write_bytes(text)
    with nothing_runs():
        found = outcome(lambda: policyfile.load(str(file)))
    if isinstance(found, Policy):
        shown = outcome(lambda: document(found))
        assert isinstance(shown, str | PolicyError)
    else:
        assert isinstance(found, PolicyError)
        known = "|".join(map(re.escape, (str(file), OTHER)))  # or the one that it extends
        assert re.match(rf"({known}):\d+:\d+: \S", str(found)), str(found)


# What looks like a policy


def _words(kind: Any) -> set[str]:
    """Every key and word that a section may hold."""
    words = {*getattr(kind, "words", ()), *getattr(kind, "keys", ())}
    below = [*getattr(kind, "keys", {}).values()]
    below += [getattr(kind, part) for part in ("of", "one", "several") if hasattr(kind, part)]
    return words.union(*map(_words, below))


OPS = ["softmax", "F.gelu", "aten::mm", "torch.Tensor.add_", "leaky_relu", "nothing", "p", "dim"]
OTHER = "/etc/passwd"
PATHS = ["./a.yaml", "a.yaml", "mine.yaml", "~x/a.yaml", "..", OTHER, "\0.yaml", "torch"]
TAGS = ["!!python/object/apply:os.system", "!!python/name:os.system", "!include", "!!binary", "!x"]
TAGS += ["!!set", "!!omap", "!!merge", "!!timestamp", "!!str", "!", "!!python/module:antigravity"]
NUMBERS = ["0", "1", "-1", "1e5", "1e-400", "1e400", ".inf", ".nan", "0x10", "1_000", "9" * 5000]
MARKS = ["&a ", "*a", "<<", "? ", "| ", "> ", "- ", "---\n", "...\n", "%YAML 9.9\n", "{", "}", "["]
MARKS += [
    "]",
    ",",
    ": ",
    "#",
    "'",
    '"',
    "\\",
    "\n",
    "\n  ",
    "\t",
    "\r",
    "\x1b[2J",
    "\x85",
    "\u2028",
]
MARKS += ["\ufeff", "\0", "\ud800", "\U0001f600", "\u202e", "(a+)+", "[", "(?P<", "a" * 2000]
WORDS = sorted(_words(POLICY))
word = st.sampled_from([*WORDS, *OPS, *PATHS, *NUMBERS, *TAGS])
leaf = word | st.text(max_size=20) | st.none() | st.booleans() | st.integers() | st.floats()
leaf |= st.binary(max_size=8) | st.dates()
value = st.recursive(
    leaf,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(word | st.text(), inner, max_size=4)
    ),
    max_leaves=20,
)
near = st.dictionaries(st.sampled_from(list(POLICY.keys)), value, max_size=5)
SHIPPED = [path.read_bytes() for path in policyfile.shipped().values()]
cut = st.tuples(
    st.integers(0, 4000), st.integers(0, 40), st.binary(max_size=6) | word.map(str.encode)
)


def _fitting(kind: Any) -> st.SearchStrategy[Any]:
    """What a section may hold, now and then with something else in the place of a part."""
    name = type(kind).__name__
    if name == "Map":
        fits: Any = st.fixed_dictionaries(
            {}, optional={key: _fitting(below) for key, below in kind.keys.items()}
        )
    elif name == "List":
        fits = st.lists(_fitting(kind.of), max_size=3)
    elif name == "Either":
        fits = _fitting(kind.one) | _fitting(kind.several)
    elif name == "Arguments":
        fits = st.dictionaries(st.sampled_from(["dim", "p", "dtype"]), leaf, max_size=3)
    else:
        own = [st.sampled_from(kind.words)] if hasattr(kind, "words") else []
        fits = st.one_of(*own, word, st.booleans(), st.integers(), st.floats())
    return st.integers(0, 19).flatmap(lambda dice: value if dice == 0 else fits)


def dumped(said: Any, flow: bool | None, style: str | None) -> bytes:
    """A value as YAML, in one of the ways to write it."""
    text: bytes = yaml.dump(said, encoding="utf-8", default_flow_style=flow, default_style=style)
    return text


flows, styles = st.sampled_from([None, True, False]), st.sampled_from([None, '"', "'", "|", ">"])


@fuzzed
@given(text=st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_any_bytes(file: Path, text: bytes) -> None:
    check(file, text)


@pytest.fixture(params=sorted({yaml.SafeLoader.__name__, yamlnodes._Loader.__name__}))
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The parser of YAML in C, where PyYAML has it, and the one in Python."""
    monkeypatch.setattr(yamlnodes, "_Loader", getattr(yaml, request.param))
    return str(request.param)


@fuzzed
@given(parts=st.lists(st.sampled_from([*MARKS, *TAGS]) | word, max_size=25))
def test_any_pieces_of_yaml(file: Path, loader: str, parts: list[str]) -> None:
    check(file, "".join(parts).encode("utf-8", "surrogatepass"))


@fuzzed
@given(said=value | near, flow=flows, style=styles)
def test_any_value(file: Path, said: Any, flow: bool | None, style: str | None) -> None:
    check(file, dumped(said, flow, style))


@fuzzed
@given(said=_fitting(POLICY), flow=flows, style=styles)
def test_what_nearly_fits(file: Path, said: Any, flow: bool | None, style: str | None) -> None:
    check(file, dumped(said, flow, style))


@fuzzed
@given(text=st.sampled_from(SHIPPED), cuts=st.lists(cut, min_size=1, max_size=4))
def test_a_shipped_policy_with_parts_replaced(
    file: Path, text: bytes, cuts: list[tuple[int, int, bytes]]
) -> None:
    for start, length, other in cuts:
        at = start % (len(text) + 1)
        text = text[:at] + other + text[at + length :]
    check(file, text)


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 50_000, "- " * 100_000, "? " * 100_000])
def test_any_depth(file: Path, loader: str, text: str) -> None:
    check(file, text.encode())


# The environment

suffix = st.sampled_from(list(VARIABLES)) | st.text(max_size=8)
name = suffix.map(f"{SWITCH}_".__add__) | st.sampled_from([SWITCH, "AUTO_MIXED_PRECISON_LOG"])
said = word | st.lists(word, max_size=4).map(",".join) | st.text(max_size=20)


@fuzzed
@given(environ=st.dictionaries(name, said, max_size=4))
def test_any_environment(file: Path, environ: dict[str, str]) -> None:
    def read() -> Policy:
        asked = settings.read(environ)
        settings.is_excluded(asked.only, "train.py")
        origin = settings.origin_of_policy(environ)
        return policyfile.with_overrides(policyfile.load(asked.policy, origin), asked)

    with nothing_runs():
        found = outcome(read)
    if isinstance(found, SettingsError):
        assert str(found).startswith("AUTO_M")
    else:
        assert isinstance(found, Policy | PolicyError)
