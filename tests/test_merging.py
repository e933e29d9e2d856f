"""Ranks put their reports together without waiting for each other."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoamp import merging, report

DEMOTION = {"module": "head", "type": "Linear", "below": True, "cause": "", "where": "", "step": 3}
Tell = Callable[..., None]


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tell:
    """`tell(rank, world, regions)`: a rank ends."""
    monkeypatch.setenv("MASTER_PORT", "29500")

    def add(rank: int, world: int, regions: int, *demotions: dict[str, Any]) -> None:
        content = {
            "regions": regions,
            "steps": {"taken": 2, "skipped": rank},
            "loss_scale": {"final": 128.0},
            "demotions": list(demotions),
        }
        path = str(tmp_path / "run.json")
        merging.add(path, (rank, world), content, time.time(), report.write)

    return add


def told(folder: Path) -> list[tuple[int, int]]:
    content = json.loads((folder / "run.json").read_text())
    return [(row["rank"], row["regions"]) for row in content["ranks"]["told"]]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_whoever_comes_last_completes_the_report(
    tell: Tell, tmp_path: Path, order: tuple[int, ...]
) -> None:
    for rank in order:
        tell(rank, 3, 10 + rank)
        assert (tmp_path / "run.json").exists() == (0 in order[: order.index(rank) + 1])
    assert told(tmp_path) == [(0, 10), (1, 11), (2, 12)]
    content = json.loads((tmp_path / "run.json").read_text())
    assert (content["regions"], content["ranks"]["world"]) == (10, 3)
    assert content.keys() == {"regions", "steps", "loss_scale", "demotions", "ranks"}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_rank_that_was_killed_is_missing_and_no_more(tell: Tell, tmp_path: Path) -> None:
    tell(0, 3, 10)
    tell(2, 3, 12)
    assert told(tmp_path) == [(0, 10), (2, 12)]


def test_parts_of_other_runs_do_not_count(
    tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(1, 3, 99)
    old = time.time() - 3600
    os.utime(tmp_path / "run.json.rank1", (old, old))
    monkeypatch.setenv("MASTER_PORT", "29501")
    tell(2, 3, 98)
    monkeypatch.setenv("MASTER_PORT", "29500")
    tell(0, 3, 10)
    assert told(tmp_path) == [(0, 10)]


def test_what_one_rank_alone_has_demoted_is_in_the_report(tell: Tell, tmp_path: Path) -> None:
    tell(1, 2, 11, DEMOTION, {**DEMOTION, "module": "body"})
    tell(0, 2, 10, DEMOTION)
    demotions = json.loads((tmp_path / "run.json").read_text())["demotions"]
    assert [demotion["module"] for demotion in demotions] == ["head", "body"]
