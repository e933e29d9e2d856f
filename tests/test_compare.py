"""`autoamp compare`: what it measures, what it makes of it, and when it cannot know."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from variables import NOT_INHERITED

import autoamp
from autoamp.doctor import shim_directory
from autoamp.reporting import compare, page, verdict
from autoamp.reporting.playing import Run
from autoamp.reporting.scalars import Scalars, event_files, events, is_no_curve, pairs

Compare = Callable[..., Any]
# Without learning: the loss of step k is 800 k². In float16 the sum leaves the range at step 10.
TRAIN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        nn.init.zeros_(self.linear.weight)
    def forward(self, x, y):
        return nn.functional.mse_loss(self.linear(x), y, reduction="sum")

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
for step in range(1, 21):
    loss = model(torch.ones(8, 4), torch.full((8, 4), 5.0 * step))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    SHOW
"""
HEALTHY = "extends: torch\nloss_scale: {init: 1}\n"
DAMAGED = HEALTHY + "ops: {lower: {add: [mse_loss]}}\n"
FLOAT32 = "import os; FULL = os.environ['AUTO_MIXED_PRECISION'] == '0'\n"


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(NOT_INHERITED)}
    search = os.pathsep.join(map(str, (shim_directory(), Path(autoamp.__file__).parents[1])))
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": search}


@pytest.fixture
def compared(tmp_path: Path) -> Compare:
    """Run `autoamp compare` on a script: its exit code, stdout, stderr, and the data."""

    def run(script: str, *options: str) -> Any:
        (tmp_path / "train.py").write_text(script)
        command = [sys.executable, "-m", "autoamp", "compare", "-o", "out.json", *options]
        process = subprocess.run(
            [*command, "--", sys.executable, "train.py"],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
        )
        data = json.loads((tmp_path / "out.json").read_text())
        return process.returncode, process.stdout, process.stderr, data

    return run


def test_a_damaged_run_disagrees_from_where_it_parts_and_a_healthy_one_agrees(
    compared: Compare, tmp_path: Path
) -> None:
    (tmp_path / "damaged.yaml").write_text(DAMAGED)
    (tmp_path / "healthy.yaml").write_text(HEALTHY)
    script = TRAIN.replace("SHOW", "print(f'step {step} loss {loss.item():.2f}')")
    code, out, err, data = compared(
        script, "--dtype", "float16", "--policy", "healthy.yaml,damaged.yaml", "--repeat", "1"
    )
    assert code == 3, out + err
    healthy, damaged = data["verdicts"]
    assert healthy["word"] == "agrees"
    assert damaged["word"] == "disagrees"
    assert damaged["text"].startswith("damaged.yaml: loss disagrees from step 10 on")
    assert f"DISAGREES  {damaged['text']}" in out
    assert "5% of the float32 value" in out  # the tolerance is named
    full, good, bad = data["variants"]
    assert full["curves"]["loss"] == [[k, 800.0 * k * k] for k in range(1, 21)]
    assert good["agreements"][0]["parted"] is None
    assert bad["agreements"][0]["parted"] == 10
    assert (good["skipped"], good["demotions"]) == (0, [])
    assert [row["steps"] for row in data["variants"]] == [20, 20, 20]
    assert all(
        row["speed"]["median"] > 0 and row["memory"]["process"] > 2**26 for row in (full, good)
    )
    assert good["speed_up"]["low"] <= good["speed_up"]["median"] <= good["speed_up"]["high"]
    assert good["devices"]["cpu"]["dtype"] == "float16"
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
    text = page.comparison(data)
    assert "loss disagrees from step 10 on" in text
    assert text.count("<svg") == 2  # the speeds, and the loss
    assert "nan" not in text[: text.index("<svg")]


def test_a_script_that_fails_in_both_shows_its_own_error_and_runs_no_more(
    compared: Compare,
) -> None:
    script = (
        "import sys\nprint('loss 1')\nprint('before', file=sys.stderr)\nsys.exit('no data here')"
    )
    code, out, err, data = compared(script, "--repeat", "5")
    assert code == 1
    assert data["verdicts"][0]["word"] == "failed"
    assert "the script fails in float32 too, with exit code 1" in out
    assert out.count("no data here") == 2
    assert [row["runs"] for row in data["variants"]] == [1, 1]
    assert "run 2 of 10: default: " in err


def test_a_script_that_only_mixed_precision_breaks_is_told_apart(compared: Compare) -> None:
    code, out, _, data = compared(FLOAT32 + "import sys\nif not FULL: sys.exit(7)\nprint('loss 1')")
    assert (code, data["verdicts"][0]["word"]) == (1, "broken")
    assert "runs in float32, and fails with exit code 7" in out


def test_steps_are_taken_from_the_output_where_it_is_said_how(compared: Compare) -> None:
    script = "for k in range(1, 41): print(f'{k} of 40: err={1 / k}', flush=True)"
    _, out, _, data = compared(script, "--steps-from", r"^(\d+) of", "--repeat", "2")
    assert [row["steps"] for row in data["variants"]] == [40, 40]
    assert [row["runs"] for row in data["variants"]] == [2, 2]
    assert "steps per second" in out
    assert "nothing ran in mixed precision (no model was called)" in out
    _, out, _, _ = compared(script)
    assert "No optimizer of torch stepped: times are those of whole processes." in out


def test_ctrl_c_gives_the_verdict_on_what_there_is_and_v_shows_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        FLOAT32 + "import signal\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "for k in range(4): print(f'loss {4 - k}', flush=True)\n"
        "if not FULL:\n    print('waiting', flush=True)\n    signal.pause()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "autoamp", "compare", "-v", "--", sys.executable, "train.py"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    shown = []
    for line in process.stdout:
        shown.append(line)
        if line == "waiting\n":
            break
    assert shown == ["loss 4\n", "loss 3\n", "loss 2\n", "loss 1\n"] * 2 + ["waiting\n"]
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert "Interrupted: this is about what had run by then." in out
    assert "final loss" in out


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("-o", "x.txt"), "-o x.txt: name a file like compare.html or compare.json"),
        (("-o", "mine.html"), "mine.html exists and is no report, and is left as it is"),
        (("--steps-from", "("), "missing ), unterminated subpattern at position 0"),
    ],
)
def test_a_mistake_costs_one_line_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, options: Any, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.html").write_text("mine")
    from autoamp.__main__ import main

    handler = signal.getsignal(signal.SIGINT)
    assert main(["compare", *options, "--", "nothing"]) == 2
    assert capsys.readouterr() == ("", f"autoamp compare: {line}\n")
    assert signal.getsignal(signal.SIGINT) is handler


# --- what is made of runs ------------------------------------------------------------------------


def run_of(variant: str, values: list[float], repeat: int = 0, **seen: Any) -> Run:
    run = Run(variant, repeat, code=0, seconds=1.0)
    for step, value in enumerate(values, 1):
        run.scalars.read(f"step {step} loss {value}")
    run.report = {
        "steps": {"skipped": 0},
        "demotions": [],
        "stood_down": [],
        "devices": {},
        "regions": 1,
        "reason": "",
    }
    for name, value in seen.items():
        setattr(run, name, value)
    return run


def test_speeds_and_speed_up_are_those_worked_out_by_hand() -> None:
    """Ten steps, the first two left out; the one twice as fast in the second half."""
    steady = [[float(k), 0.5 * k] for k in range(1, 12)]
    faster = [[float(k), 0.25 * k if k <= 6 else 1.5 + (k - 6) * 0.125] for k in range(1, 12)]
    runs = [run_of("float32", [1.0, 1.0], times=steady), run_of("x", [1.0, 1.0], times=faster)]
    full, mixed = compare.told(runs, ["float32", "x"], "train", 1)["variants"]
    assert full["speeds"] == [2.0] * 8
    assert mixed["speeds"] == [4.0] * 3 + [8.0] * 5
    assert full["speed"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert mixed["speed_up"] == {"median": 4.0, "low": 2.0, "high": 4.0}


def test_skipped_steps_demotions_and_memory_of_all_runs_are_told() -> None:
    found = {"module": "a", "type": "A", "below": True, "cause": "b", "where": "", "step": 3}
    down = {"type": "Tiny", "saved_us": 1.25, "spent_us": 250.0}
    report = {"steps": {"skipped": 2}, "demotions": [found], "devices": {}, "regions": 1}
    report |= {"reason": "", "stood_down": [down]}
    runs = [run_of("float32", [2, 1], peak=100, devices={"cuda:0": 10})]
    runs += [run_of("x", [2, 1], 0, report=report, peak=80, devices={"cuda:0": 5})]
    runs += [run_of("x", [2, 1], 1, report=report, peak=90, devices={"cuda:0": 6, "cuda:1": 1})]
    content = compare.told(runs, ["float32", "x"], "train", 2)
    full, mixed = content["variants"]
    assert (
        "x: Tiny stays float32: lower precision would add about 250 us to a call, and save 1.25."
    ) in content["notes"]
    assert (mixed["skipped"], mixed["demotions"]) == (4, [found])
    assert full["memory"] == {"process": 100, "devices": {"cuda:0": 10}}
    assert mixed["memory"] == {"process": 90, "devices": {"cuda:0": 6, "cuda:1": 1}}


def test_a_script_that_prints_no_loss_is_told_what_cannot_be_judged() -> None:
    runs = [run_of("float32", []), run_of("x", [])]
    (verdict,) = compare.told(runs, ["float32", "x"], "train", 1)["verdicts"]
    assert verdict["word"] == "unknown"
    assert "prints no loss repeatedly (no number that it shows more than once)" in verdict["text"]
    for run in runs:
        for epoch in range(3):
            run.scalars.read(f"epoch {epoch} accuracy {epoch / 3}")
    (verdict,) = compare.told(runs, ["float32", "x"], "train", 1)["verdicts"]
    assert verdict["word"] == "unknown"
    assert "prints no loss repeatedly (only accuracy)" in verdict["text"]


def test_a_baseline_that_is_really_tf32_is_named() -> None:
    runs = [
        run_of("float32", [2, 1], tf32=["convolutions"]),
        run_of("x", [2, 1], tf32=["convolutions"]),
    ]
    content = compare.told(runs, ["float32", "x"], "train", 1)
    assert content["notes"][0].startswith("The float32 baseline is really TF32 for convolutions:")
    assert content["notes"][0] in compare.lines(content, page.size)


def test_a_run_in_which_autoamp_stood_aside_is_no_comparison() -> None:
    report = {"steps": {"skipped": 0}, "demotions": [], "regions": 0, "reason": ""}
    report["stood_down"] = []
    report["devices"] = {"cpu": {"dtype": "off", "why": "this CPU has no bfloat16 arithmetic"}}
    runs = [run_of("float32", [2, 1]), run_of("x", [2, 1], report=report)]
    (verdict,) = compare.told(runs, ["float32", "x"], "train", 1)["verdicts"]
    assert verdict == {
        "word": "unknown",
        "text": "x: nothing ran in mixed precision (cpu: this CPU has no bfloat16 arithmetic)",
    }


def curve(length: int, noise: float, seed: int) -> list[list[float]]:
    draw = random.Random(seed)
    return [[k, 2 * math.exp(-k / 30) + 0.5 + draw.gauss(0, noise)] for k in range(1, length + 1)]


def test_noise_is_no_disagreement_and_a_drift_is() -> None:
    for seed in range(20):
        full = curve(200, 0.05, seed)
        other = curve(200, 0.05, seed + 1000)
        found = verdict.compare("loss", [full], [other])
        assert found is not None
        assert found.agrees, (seed, found)
        drifting = [[k, v + max(0, k - 100) * 0.004] for k, v in other]
        found = verdict.compare("loss", [full], [drifting])
        assert found is not None
        assert not found.agrees
        assert found.parted is not None
        assert 105 <= found.parted <= 150  # 0.05 to 0.2 beyond a loss of about 0.55


@pytest.mark.parametrize(
    ("mixed", "agrees", "parted"),
    [
        ([4, 3, 2, 1], True, None),
        ([4, 3.1, 2.05, 1.02], True, None),  # 3.3 %, 2.5 % and 2 %
        ([4, 3, 2, 1.06], False, 4),  # 6 %, without any noise
        ([4, 4, 4, 4], False, 2),
        ([4, 3, math.nan, 1], False, 3),
        ([math.inf] * 4, False, 1),
    ],
)
def test_the_rule_on_curves_without_noise(mixed: list[float], agrees: bool, parted: Any) -> None:
    full = [[k, v] for k, v in enumerate([4.0, 3.0, 2.0, 1.0], 1)]
    found = verdict.compare("loss", [full], [[[k, v] for k, v in enumerate(mixed, 1)]])
    assert found is not None
    assert (found.agrees, found.parted) == (agrees, parted)


def test_only_steps_that_both_have_are_compared() -> None:
    full = [[k, 1.0] for k in range(10)]
    assert verdict.compare("loss", [full], [[[k + 0.5, 9.0] for k in range(10)]]) is None
    found = verdict.compare("loss", [full], [[[k, 1.0] for k in (3, 5)] + [[99, 7.0]]])
    assert found is not None
    assert found.agrees


# --- what scripts show ---------------------------------------------------------------------------

LINES = {
    "loss: 0.123": {"loss": 0.123},
    "Loss 0.123": {"loss": 0.123},
    "step 20 loss 0.1234 lr 3.00e-03": {"loss": 0.1234},
    "Epoch [1/10], Step [100/600], Loss: 0.2345": {"loss": 0.2345},
    "{'loss': 0.5, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 1.0}": {
        "loss": 0.5,
        "grad_norm": 1.2,
    },
    " 37%|###7   | 37/100 [00:04<00:07,  8.91it/s, loss=0.41, acc=0.9]": {"loss": 0.41, "acc": 0.9},
    "Train Epoch: 1 [640/60000 (1%)]\tLoss: 1.234567": {"loss": 1.234567},
    "iter 10: loss 2.3456, time 12.34ms": {"loss": 2.3456},
    "step 2 loss 0.1 loss_g 0.7 D(x) 0.4 D(G(z)) 0.3": {
        "loss": 0.1,
        "loss_g": 0.7,
        "d(x)": 0.4,
        "d(g(z))": 0.3,
    },
    "epoch 3 train/total_loss=1e-3 val_loss -.5": {"train/total_loss": 1e-3, "val_loss": -0.5},
    "INFO 10:00:00,123 loss=tensor(0.5)": {"loss": 0.5},
    "[1,  2000] loss: 2.173": {"loss": 2.173},
    "saved to runs/2024-01-02/model.pt": {},
    "loss_scale 65536 eta 12 memory: 300": {},
}


@pytest.mark.parametrize("line", LINES)
def test_numbers_are_picked_up_from(line: str) -> None:
    found = {name: value for name, value in pairs(line) if not is_no_curve(name)}
    assert found == LINES[line]


def test_curves_go_by_the_step_that_lines_name_by_the_bar_or_by_their_order() -> None:
    scalars = Scalars()
    for line in ("step 10 loss 3", "step 20 loss 2", "step 30 loss nan", "loss_b: 5", "loss_b: 4"):
        scalars.read(line)
    for shown in (" 50%|# | 1/2 [00:01<00:01, loss_c=9]", " 50%|# | 1/2 [00:01<00:01, loss_c=8]"):
        scalars.read(shown)
    scalars.read("100%|##| 2/2 [00:02<00:00, loss_c=7]")
    curves = scalars.repeated()
    assert curves["loss"][:2] == [[10, 3], [20, 2]]
    assert math.isnan(curves["loss"][2][1])
    assert curves["loss_b"] == [[1, 5], [2, 4]]
    assert curves["loss_c"] == [[1, 8], [2, 7]]
    for line in ("epoch 1 iter 1 x 1", "epoch 1 iter 2 x 2", "epoch 2 iter 1 x 3"):
        scalars.read(line)
    assert scalars.curves["x"] == [[1, 1], [2, 2], [3, 3]]  # a counter that starts again


def test_tensorboards_files_are_read_without_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    started = time.time() - 1
    with SummaryWriter(str(tmp_path / "runs" / "a")) as writer:
        for step in range(5):
            writer.add_scalar("train/loss", 2.0 - step / 4, step * 300)
        writer.add_text("note", "no number")
    (path,) = event_files(tmp_path, started)
    assert list(events(path)) == [("train/loss", k * 300, 2.0 - k / 4) for k in range(5)]
    assert event_files(tmp_path, time.time() + 60) == []
    path.write_bytes(path.read_bytes()[:-100])  # a run that was killed
    assert len(list(events(path))) >= 3
