"""The page of a report: whole, right, and readable on any screen, without a network."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch
from variables import PREFIX

import autoamp
from autoamp import merging, report
from autoamp.__main__ import main
from autoamp.reporting import page
from autoamp.reporting.curves import KEPT, thinned, thinned_steps

SCHEMA = Path(autoamp.__file__).parent / "reporting" / "schema.json"
ON = {PREFIX: "1", f"{PREFIX}_DTYPE": "float16", f"{PREFIX}_REPORT": "run.html"}
# Eight steps: the fifth overflows, and one module adds a constant that float16 does not hold.
TRAIN = """
import atexit, sys
atexit.register(lambda: open("modules", "w").write("\\n".join(sys.modules)))  # the last of all
import torch
from torch import nn

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return self.linear(x) + 1e-9

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Odd(), nn.LayerNorm(8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(12):
    optimizer.zero_grad()
    factor = float("inf") if step == 10 else 0.25
    (model(torch.randn(2, 4)).mean() * factor).backward()
    optimizer.step()
"""
SECTIONS = (
    *(
        "headline",
        "remarks",
        "loss-scale",
        "ops",
        "names",
        "time",
        "modules",
        "demotions",
        "fixups",
    ),
    *("kernels", "policy", "patches"),
)


@pytest.fixture(scope="module")
def made(python_in: Any, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A real run that was asked for a page: its `text`, and the `content` of the JSON beside it."""
    folder = tmp_path_factory.mktemp("page")
    process = python_in(folder)(TRAIN, **ON)
    assert (process.returncode, process.stdout) == (0, "")
    path = folder / "run.html"
    return SimpleNamespace(
        path=path,
        text=path.read_text(),
        content=json.loads((folder / "run.json").read_text()),
        left=sorted(entry.name for entry in folder.iterdir()),
        modules=set((folder / "modules").read_text().split()),
        stderr=process.stderr,
    )


def words(text: str) -> str:
    """What a page says, without its markup."""
    text = re.sub(r"<(style|svg).*?</\1>", " ", text, flags=re.DOTALL)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text)))


def test_one_file_says_all_and_needs_nothing(made: SimpleNamespace) -> None:
    assert made.left == ["modules", "run.html", "run.json", "script.py"]
    assert re.findall(r'<(?:header|section) id="([\w-]+)"', made.text) == list(SECTIONS)
    assert re.findall(r"<(script|link|img|iframe)\b(?! rel=\"icon\")", made.text) == []
    assert re.findall(r'(?:src|href)="(?!#|data:)', made.text) == []
    assert made.text.count("<svg") == 4
    plots = "".join(re.findall(r"<svg.*?</svg>", made.text, re.DOTALL))
    assert re.findall(r"(?:fill|stroke): #\w+", plots) == []  # each colour is the page's
    assert "fill: var(--float16)" in plots
    assert len(re.findall(r'\bid="([^"]+)"', made.text)) == len(
        set(re.findall(r'\bid="([^"]+)"', made.text))
    )


def test_what_the_page_says_is_what_the_report_says(made: SimpleNamespace) -> None:
    content, said = made.content, words(made.text)
    jsonschema.validate(content, json.loads(SCHEMA.read_text()))
    assert content["finished"] is True
    assert content["steps"] == {"taken": 11, "skipped": 1}
    assert content["loss_scale"]["skips"] == [11]
    assert f'on: cpu in float16, policy "default", through {content["door"]}' in said
    assert "steps taken 11 12 model calls" in said.replace("  ", " ")
    assert "steps skipped 1 8.33% of all" in said
    assert "loss scale 32,768 dynamic, from 65,536" in said
    (demotion,) = content["demotions"]
    assert demotion["module"] == "2"
    assert report.demotion_line(demotion) in said
    assert "skipped step (1)" in made.text
    assert "module demoted to float32" in made.text
    for row in content["audit"]["modules"]:
        assert f"{row['type']}" in said
    assert "the largest number counts as beyond every constant out of range" in said  # a fix-up
    assert "operands: any" in said  # the policy in force
    assert "torch.nn:Module.__call__" in said


CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
LOOK = """<body style="margin: 0"><iframe id="f" style="width: {width}px; height: 900px; border: 0"
 srcdoc="{page}"></iframe><pre id="found"></pre><script>
f.onload = () => {{
  const root = f.contentDocument.documentElement;
  const boxes = [...f.contentDocument.querySelectorAll("header, section, h1, h2, p, dl, .scroll")];
  const wide = boxes.filter(b => b.getBoundingClientRect().right > {width}).map(b => b.tagName);
  const flat = [...f.contentDocument.querySelectorAll("svg")].filter(s => s.clientHeight < 40);
  found.textContent = "found " + JSON.stringify(
    {{over: root.scrollWidth - root.clientWidth, wide: wide, flat: flat.length}});
}};
</script>"""


needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: apt-get install chromium brings it"
)


@needs_chromium
@pytest.mark.parametrize("width", [360, 1280])
def test_no_screen_is_too_narrow(made: SimpleNamespace, tmp_path: Path, width: int) -> None:
    around = tmp_path / "around.html"
    around.write_text(LOOK.format(width=width, page=html.escape(made.text, quote=True)))
    looked = subprocess.run(
        [str(CHROMIUM), *_options(tmp_path), "--dump-dom", around.as_uri()],
        capture_output=True,
        text=True,
    )
    found = re.search(r"found (\{.*?\})", html.unescape(looked.stdout))
    assert found is not None, looked.stderr
    assert json.loads(found[1]) == {"over": 0, "wide": [], "flat": 0}
    assert "CONSOLE" not in looked.stderr


@needs_chromium
def test_the_page_is_shown_and_the_browser_does_not_complain(
    made: SimpleNamespace, tmp_path: Path
) -> None:
    picture = tmp_path / "page.png"
    shown = subprocess.run(
        [str(CHROMIUM), *_options(tmp_path), f"--screenshot={picture}", made.path.as_uri()],
        capture_output=True,
        text=True,
    )
    assert "CONSOLE" not in shown.stderr
    assert len(set(_colours(picture))) > 50  # not an empty page


def _options(folder: Path) -> tuple[str, ...]:
    return (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
        *(f"--user-data-dir={folder / 'profile'}", "--window-size=1300,1000"),
    )


def _colours(picture: Path) -> list[Any]:
    image = pytest.importorskip("PIL.Image").open(picture).convert("RGB")
    return [colour for _, colour in image.getcolors(maxcolors=2**24)]


def test_a_bfloat16_run_and_one_that_was_off_have_pages_too(made: SimpleNamespace) -> None:
    content = json.loads(json.dumps(made.content))
    content["loss_scale"] = dict(report._NO_LOSS_SCALE)
    content["devices"]["cpu"]["dtype"] = "bfloat16"
    down = {"type": "Tiny", "saved_us": 1.25, "spent_us": 250.0}
    content["stood_down"] = [down]
    said = words(page.html(content))
    assert f"Models left in float32 {report.standing_line(down)} To force them" in said
    assert "Models left in float32" not in words(page.html(made.content))
    assert "None: nothing ran in float16" in said
    assert "steps skipped" not in said
    off = report.describe_inactive("AUTO_MIXED_PRECISION: unknown policy 'x'.", None)
    said = words(page.html(off))
    assert "off" in said
    assert "AUTO_MIXED_PRECISION: unknown policy 'x'." in said
    aside = {**content, "regions": 0, "devices": {"cpu": {"dtype": "off", "why": "no arithmetic"}}}
    assert page.headline(aside) == {"state": "aside", "text": "cpu: no arithmetic"}


def test_figures_of_ranks_are_a_table(made: SimpleNamespace) -> None:
    parts = {
        rank: {**made.content, "job": [3], "host": f"node{rank}", "regions": 10 + rank}
        for rank in (0, 2)
    }
    content = merging.merged(parts)
    jsonschema.validate(content, json.loads(SCHEMA.read_text()))
    said = words(page.html(content))
    assert "2 of 3 have told" in said
    steps = made.content["steps"]
    assert f"2 node2 12 {steps['taken']} {steps['skipped']}" in said
    assert "have told" not in words(page.html(made.content))


def test_what_is_worth_a_look_is_said_first(made: SimpleNamespace) -> None:
    content = json.loads(json.dumps(made.content))
    rows = content["audit"]["modules"]
    rows[1].update(underflow=0.25, head_room=1.5, gradient_head_room=500.0)
    content["steps"] = {"taken": 90, "skipped": 10}
    said = words(page.html(content))
    assert "10.0% of the steps were skipped" in said
    assert "Sequential 0: 25.0% of its gradients became zero in half precision." in said
    assert "Sequential 0: its largest results are within a factor of 1.5" in said
    assert said.index("25.0%") < said.index("Loss scale")


def test_names_of_the_script_are_no_markup(made: SimpleNamespace) -> None:
    content = json.loads(json.dumps(made.content))
    content["script"] = "<script>alert(1)</script>"
    content["demotions"][0]["cause"] = "<b>&"
    text = page.html(content)
    assert "<script>" not in text
    assert "&lt;b&gt;&amp;" in text


# --- autoamp report ------------------------------------------------------------------------------


def test_a_page_is_made_of_a_report_later(
    made: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "later.html"
    data = made.path.with_suffix(".json")
    assert main(["report", str(data), "--html", str(out)]) == 0
    assert capsys.readouterr() == ("", "")
    assert words(out.read_text()) == words(made.text)
    out.write_text("something of mine")
    assert main(["report", str(data), "--html", str(out)]) == 1
    assert out.read_text() == "something of mine"
    assert "is no report, and is left as it is" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text('{"schema": 1}')
    assert main(["report", str(tmp_path / "bad.json"), "--html", str(tmp_path / "x.html")]) == 1
    assert "this is no complete report (KeyError: 'audit')" in capsys.readouterr().err


def test_the_schema_is_printed_and_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["properties"]["schema"]["const"] == report.SCHEMA
    jsonschema.validate(report.describe_inactive("no", None), schema)


def test_without_the_extra_the_report_is_there_and_a_line_says_what_to_install(
    mixed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    lacks = "raise ModuleNotFoundError('no', name='matplotlib')"
    (tmp_path / "matplotlib.py").write_text(lacks)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = tmp_path / "run.html"
    mixed("torch", REPORT=str(path))
    torch.nn.Linear(2, 2)(torch.ones(1, 2))
    autoamp.disable()
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"autoamp: AUTO_MIXED_PRECISION_REPORT={path}: no page made: matplotlib is not "
        f"installed (pip install 'autoamp[report]'); the report is in {tmp_path}/run.json"
    )
    assert json.loads((tmp_path / "run.json").read_text())["regions"] == 1
    assert not path.exists()


def test_nothing_of_plotting_comes_into_the_process_of_a_script(made: SimpleNamespace) -> None:
    assert "torch" in made.modules
    assert not made.modules & {"matplotlib", "jinja2", "rich", "tensorboard"}


# --- long runs -----------------------------------------------------------------------------------


def test_a_million_steps_stay_under_a_megabyte_with_their_extremes(made: SimpleNamespace) -> None:
    from autoamp.policy import LossScaleRule
    from autoamp.scaling import LossScale

    scale = LossScale(LossScaleRule())
    current = 65536.0
    for step in range(1, 1_000_001):  # the scale moves at every step, a third of them skipped
        before, current = current, 65536.0 * (1 + step % 7)
        current = 2.0**-20 if step == 123_456 else 2.0**40 if step == 765_432 else current
        scale._note(step % 3 == 0, before, current)
    assert (scale.taken, scale.skipped) == (666_667, 333_333)
    assert len(scale.history) <= 4 * KEPT + 1
    content = {**made.content, "loss_scale": {**made.content["loss_scale"]}}
    content["steps"] = {"taken": scale.taken, "skipped": scale.skipped}
    content["loss_scale"].update(
        history=thinned(scale.history), skips=thinned_steps(scale.skips), final=current
    )
    history = content["loss_scale"]["history"]
    assert history[0] == [0, 65536.0]
    assert history[-1][0] >= 999_999
    assert [123_456, 2.0**-20] in history
    assert [765_432, 2.0**40] in history
    assert [point[0] for point in history] == sorted(point[0] for point in history)
    skips = content["loss_scale"]["skips"]
    assert (len(skips), skips[0], skips[-1]) == (KEPT, 3, 999_999)
    assert len(json.dumps(content, indent=1)) < 1_000_000
    assert len(page.html(content)) < 1_000_000


@pytest.mark.parametrize("length", [1, 2, KEPT - 1, KEPT, KEPT + 1, 5 * KEPT])
def test_thinned_curves_keep_ends_extremes_and_order(length: int) -> None:
    points = [[step, float((step * 7919) % 1009)] for step in range(length)]
    kept = thinned(points)
    assert len(kept) <= KEPT
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert kept == sorted(kept)
    assert {max(kept, key=lambda p: p[1])[1], min(kept, key=lambda p: p[1])[1]} == {
        max(points, key=lambda p: p[1])[1],
        min(points, key=lambda p: p[1])[1],
    }
    if length <= KEPT:
        assert kept == points
