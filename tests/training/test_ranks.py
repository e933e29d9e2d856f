"""Two ranks that train one model give what they give by hand, or in float32, and stay together."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import autoamp

from .playing import MODES, differences

WORLD = 2
LIMIT = 240
"""Seconds after which ranks are taken to wait for each other for ever."""
Found = list[dict[str, Any]]
HALF = {"float16": 0.01, "bfloat16": 0.04}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Found]:
    """`found(name)[rank][run]`: what each rank found in the runs of a pattern (`ranked.play`)."""
    known: dict[str, Found] = {}

    def of(name: str) -> Found:
        if name not in known:
            known[name] = _play(name, tmp_path_factory.mktemp(name))
        return known[name]

    return of


def _play(name: str, folder: Path) -> Found:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("AUTO_MIXED_PRECISION")}
    kept["PYTHONPATH"] = os.pathsep.join(
        map(str, (Path(autoamp.__file__).parents[1], Path(__file__).parents[1]))
    )
    arguments = [sys.executable, "-m", f"{__package__}.ranked"]
    ranks = [
        subprocess.Popen(
            [*arguments, str(rank), str(WORLD), str(folder), name],
            env={**kept, "OMP_NUM_THREADS": "1"},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        said = [rank.communicate(timeout=LIMIT)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * WORLD, said
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


def scaling(status: dict[str, Any]) -> tuple[Any, ...]:
    return status["steps"], status["loss_scale"]["history"]


@pytest.mark.parametrize("mode", MODES)
def test_data_parallel_equals_its_twin_bit_for_bit(
    found: Callable[[str], Found], mode: str
) -> None:
    """Gradients of a layer that only the other rank has used are true ones."""
    ranks = found("r_ddp")
    for one in ranks:
        assert differences(one[mode], one[f"{mode} by hand"]) == []
    first, second = ranks
    assert differences(first[mode]["parameters"], second[mode]["parameters"]) == []
    assert scaling(first[f"{mode} status"]) == scaling(second[f"{mode} status"])
    skipped = first[f"{mode} status"]["steps"]["skipped"]
    assert {"float16": skipped == 1, "overflows": skipped >= 10, "bfloat16": skipped == 0}[mode]


@pytest.mark.parametrize("mode", HALF)
def test_data_parallel_agrees_with_float32(found: Callable[[str], Found], mode: str) -> None:
    """Until the loss of one rank is NaN: FP16 skips that step, float32 does not."""
    for one in found("r_ddp"):
        for key in ("loss", "gradients", "norm"):
            half, plain = one[mode][key][:20], one["plain"][key][:20]
            torch.testing.assert_close(half, plain, rtol=HALF[mode], atol=HALF[mode])


@pytest.mark.parametrize("mode", HALF)
def test_shards_agree_with_float32(found: Callable[[str], Found], mode: str) -> None:
    for one in found("r_shards"):
        torch.testing.assert_close(one[mode], one["plain"], rtol=HALF[mode], atol=HALF[mode])
        assert differences(one[mode], one["plain"]) != []
        assert one[f"{mode} status"]["steps"] == {"taken": 48, "skipped": 0}


@pytest.mark.parametrize("mode", MODES)
def test_ranks_with_shards_skip_the_same_steps_at_the_same_scale(
    found: Callable[[str], Found], mode: str
) -> None:
    first, second = found("r_shards")
    assert scaling(first[f"{mode} status"]) == scaling(second[f"{mode} status"])
    assert differences(first[mode]["parameters"], second[mode]["parameters"]) == []
    assert all(tensor.isfinite().all() for tensor in first[mode]["parameters"])
    steps = first[f"{mode} status"]["steps"]
    assert steps["taken"] + steps["skipped"] == 48
    assert mode != "overflows" or (steps["skipped"] >= 13 and steps["taken"] >= 10)


@pytest.mark.parametrize("mode", ["float16", "overflows"])
def test_what_one_shard_shows_stops_the_step_of_every_rank(
    found: Callable[[str], Found], mode: str
) -> None:
    """Also where it was clipped, and where a script steps twice on one backward."""
    first, second = found("r_one_shard")
    assert differences(first[mode], second[mode]) == []
    assert scaling(first[f"{mode} status"]) == scaling(second[f"{mode} status"])
    assert all(tensor.isfinite().all() for kind in first[mode]["parameters"] for tensor in kind)
    if mode == "float16":
        assert first[mode]["steps"] == [[True, False, True, False, True]] * 3
