"""What is said of the loss scale while a run lasts: in the log, and in TensorBoard's files."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import autoamp
from autoamp import speech
from autoamp.reporting.scalars import event_files, events

Mixed = Callable[..., Any]
SIX = (0.25, 0.25, float("inf"), 0.25, 0.25, float("inf"))  # the third and the sixth overflow


def train(factors: tuple[float, ...]) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for factor in factors:
        optimizer.zero_grad()
        (model(torch.ones(2, 4)).mean() * factor).backward()
        optimizer.step()


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if re.match("autoamp: step ", line)]


def test_info_says_which_step_was_skipped_and_what_became_of_the_scale(
    mixed: Mixed, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed("torch", LOG="info")
    train(SIX)
    assert said(capsys) == [
        "autoamp: step 3: skipped, its gradients are not finite; loss scale 65536 -> 32768",
        "autoamp: step 6: skipped, its gradients are not finite; loss scale 32768 -> 16384",
    ]
    mixed("torch", LOG="info", LOSS_SCALE="128")
    train(SIX[:3])
    assert said(capsys) == [
        "autoamp: step 3: skipped, its gradients are not finite; loss scale stays 128"
    ]
    mixed("torch")
    train(SIX)
    assert said(capsys) == []


def test_a_scale_that_grows_is_said(
    mixed: Mixed, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    policy = tmp_path / "quick.yaml"
    policy.write_text("extends: torch\nloss_scale: {init: 8, interval: 3}\n")
    session = mixed(str(policy), LOG="info")
    train((0.25,) * 4)
    session.loss_scale.read_back()
    assert said(capsys) == ["autoamp: step 3: loss scale 8 -> 16"]


def test_very_many_lines_are_not_all_said(
    mixed: Mixed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(speech.time, "monotonic", lambda: clock[0])
    session = mixed("torch", LOG="info")
    for number in range(5000):
        session.speech.info(f"autoamp: step {number}")
    assert len(said(capsys)) == speech.FREELY
    clock[0] += speech.PAUSE + 1
    for _ in range(3):
        session.speech.info("autoamp: step later")
    assert said(capsys) == ["autoamp: step later (4,980 more lines like this left out)"]
    clock[0] += speech.PAUSE + 1
    session.speech.info("autoamp: step last")
    assert said(capsys) == ["autoamp: step last (2 more lines like this left out)"]


def test_tensorboard_gets_the_scale_the_skipped_steps_and_each_overflow(
    mixed: Mixed, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    mixed("torch", TENSORBOARD=str(tmp_path / "board"))
    train((*SIX, 0.25))
    autoamp.disable()
    (path,) = event_files(tmp_path, 0.0)
    found: dict[str, list[tuple[int, float]]] = {}
    for tag, step, value in events(path):
        found.setdefault(tag, []).append((step, value))
    assert found == {
        "autoamp/loss_scale": [
            *((1, 65536), (2, 65536), (3, 32768), (5, 32768), (6, 16384)),
            (7, 16384),
        ],
        "autoamp/skipped": [(1, 0), (3, 1), (6, 2)],
        "autoamp/overflow": [(3, 1), (6, 1)],
    }


def test_without_tensorboard_a_line_says_what_to_install(
    mixed: Mixed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    mixed("torch", TENSORBOARD="board")
    train(SIX)
    lines = [line for line in capsys.readouterr().err.splitlines() if "TENSORBOARD" in line]
    assert len(lines) == 1
    assert lines[0].endswith(
        "board: tensorboard is not installed (pip install tensorboard); "
        "nothing more is written there"
    )


def test_a_folder_that_cannot_be_written_costs_one_line(
    mixed: Mixed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    mixed("torch", TENSORBOARD=str(tmp_path / "file" / "board"))
    train(SIX)
    lines = [line for line in capsys.readouterr().err.splitlines() if "TENSORBOARD" in line]
    assert len(lines) == 1
    assert "Not a directory" in lines[0]
