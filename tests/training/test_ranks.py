"""Two ranks that train one model give what they give by hand, or in float32, and stay together."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import autoamp

from .playing import MODES, PATTERNS, differences

WORLD = 2
LIMIT = 240
"""Seconds after which ranks are taken to wait for each other for ever."""
Found = list[dict[str, Any]]
HALF = {"float16": 0.01, "bfloat16": 0.04}


TWO = tuple(path.stem for path in PATTERNS.glob("r_*.py") if not path.stem.endswith("_amp"))
"""Patterns that two ranks play one after the other: most of the time goes into starting them."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Found]:
    """`found(name)[rank][run]`: what each rank found in the runs of a pattern (`ranked.play`)."""
    known: dict[tuple[str, int], Found] = {}

    def of(name: str, world: int = WORLD) -> Found:
        if (name, world) not in known:
            names = TWO if world == WORLD else (name,)
            folder = tmp_path_factory.mktemp(name)
            _play(names, world, folder)
            for one in names:
                saved = [folder / f"{one}-{rank}.pt" for rank in range(world)]
                known[one, world] = [torch.load(path, weights_only=False) for path in saved]
        return known[name, world]

    return of


def _play(names: Sequence[str], world: int, folder: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("AUTO_MIXED_PRECISION")}
    kept["PYTHONPATH"] = os.pathsep.join(
        map(str, (Path(autoamp.__file__).parents[1], Path(__file__).parents[1]))
    )
    arguments = [sys.executable, "-m", f"{__package__}.ranked"]
    ranks = [
        subprocess.Popen(
            [*arguments, str(rank), str(world), str(folder), *names],
            env={**kept, "OMP_NUM_THREADS": "1"},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [rank.communicate(timeout=LIMIT)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * world, said


def scaling(status: dict[str, Any]) -> tuple[Any, ...]:
    return status["steps"], status["loss_scale"]["history"]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_data_parallel_equals_its_twin_bit_for_bit(
    found: Callable[..., Found], mode: str, world: int
) -> None:
    """Gradients of a layer that only the other rank has used are true ones."""
    first, *others = ranks = found("r_ddp", world)
    for one in ranks:
        assert differences(one[mode], one[f"{mode} by hand"]) == []
    for other in others:
        assert differences(first[mode]["parameters"], other[mode]["parameters"]) == []
        assert scaling(first[f"{mode} status"]) == scaling(other[f"{mode} status"])
    skipped = first[f"{mode} status"]["steps"]["skipped"]
    assert {"float16": skipped == 1, "overflows": skipped >= 10, "bfloat16": skipped == 0}[mode]


@pytest.mark.parametrize("mode", HALF)
def test_data_parallel_agrees_with_float32(found: Callable[..., Found], mode: str) -> None:
    """Until the loss of one rank is NaN: FP16 skips that step, float32 does not."""
    for one in found("r_ddp"):
        for key in ("loss", "gradients", "norm"):
            half, plain = one[mode][key][:20], one["plain"][key][:20]
            torch.testing.assert_close(half, plain, rtol=HALF[mode], atol=HALF[mode])


@pytest.mark.parametrize("mode", MODES)
def test_every_switch_of_data_parallel_gives_what_it_gives_by_hand(
    found: Callable[..., Found], mode: str
) -> None:
    """Also compiled, and with uneven inputs, until the scale moves: by hand it parts the ranks."""
    first, second = found("r_ddp_kinds")
    for one in (first, second):
        for kind, result in one[mode].items():
            if (kind, mode) != ("uneven", "overflows"):
                assert differences(result, one[f"{mode} by hand"][kind]) == [], kind
        assert differences(one[mode], one["plain"]) != []
    last = [one[f"{mode} status"]["loss_scale"]["final"] for one in (first, second)]
    assert last[0] == last[1]
    if mode == "overflows":
        assert len(first[f"{mode} status"]["loss_scale"]["history"]) > 10


@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_travel_in_half_are_those_of_torchs_own_hooks(
    found: Callable[..., Found], mode: str
) -> None:
    """Also accumulated, after a NaN, with uneven inputs; and a hook of the script's wins."""
    first, second = found("r_half")
    for one in (first, second):
        assert differences(one[mode], one[f"{mode} by hand"]) == []
    for kind in ("none", "views", "early", "late", "builtin"):
        kept = (one[mode][kind]["parameters"] for one in (first, second))
        assert differences(*kept) == []
    if mode != "bfloat16":
        status = first[f"{mode} status"]
        assert status["steps"]["skipped"] >= 1


@pytest.mark.parametrize("mode", ["float16", "overflows"])
def test_gradients_that_a_script_exchanges_itself_skip_the_step_of_every_rank(
    found: Callable[..., Found], mode: str
) -> None:
    """Those of one rank alone are infinite."""
    first, second = found("r_by_hand")
    assert differences(first[mode], second[mode]) == []
    assert scaling(first[f"{mode} status"]) == scaling(second[f"{mode} status"])
    assert all(tensor.isfinite().all() for kind in first[mode]["parameters"] for tensor in kind)
    if mode == "float16":
        assert first[mode]["taken"] == [[True, False, True, True, False, True, True, False]] * 2


@pytest.mark.parametrize("mode", HALF)
def test_ranks_change_no_dtype_before_all_have_agreed(
    found: Callable[..., Found], mode: str
) -> None:
    """One alone meets a constant that FP16 cannot hold, and from step 2 on a layer that raises.

    Both fall back from the next forward on. Layers behind that, which exchange what they are given
    in its own dtype, never meet two.
    """
    first, second = found("r_agree")
    assert first[mode]["met"] == second[mode]["met"]
    full, half = "torch.float32", f"torch.{mode}"
    silent = [half, *[full if mode == "float16" else half] * 5]
    loud = [*[half] * 3, *[full] * 3]
    assert first[mode]["met"] == [
        dtype for pair in zip(silent, loud, strict=True) for dtype in pair
    ]
    assert differences(first[mode]["parameters"], second[mode]["parameters"]) == []
    demotions = [one[f"{mode} status"]["demotions"] for one in (first, second)]
    assert demotions[0] == demotions[1]
    found_in = [(demotion["type"], demotion["step"]) for demotion in demotions[0]]
    assert found_in == [("Silent", 0)] * (mode == "float16") + [("Loud", 2)]


@pytest.mark.parametrize("mode", HALF)
def test_a_module_that_has_exchanged_something_is_not_run_again_by_one_rank(
    found: Callable[..., Found], mode: str
) -> None:
    """What it met silently is left, and its error is the script's."""
    first, second = [one[mode]["late"] for one in found("r_agree")]
    assert first == [True, [2.0, 2.0]] * 2
    assert second == [True, [2.0, 2.0], "expected scalar type Float but found Half", [2.0, 2.0]]


@pytest.mark.parametrize("mode", ["float16", "overflows"])
def test_ranks_have_one_loss_scale_whatever_happens_to_one_of_them(
    found: Callable[..., Found], mode: str
) -> None:
    """A checkpoint that it loads, the overflow of a model that only it trains, `autograd.grad`."""
    first, second = found("r_scale")
    assert first[mode]["scale"] == second[mode]["scale"]
    assert [state["scale"] for state in first[mode]["scale"][6:8]] == [256.0, 256.0]
    assert differences(first[mode]["parameters"], second[mode]["parameters"]) == []
    assert all(p.isfinite().all() for step in second[mode]["own"] for p in step)
    assert second["float16 status"]["steps"] == {"taken": 22, "skipped": 2}


@pytest.mark.parametrize("mode", HALF)
def test_processes_that_only_share_a_group_wait_for_nobody(
    found: Callable[..., Found], mode: str
) -> None:
    """They meet overflows and errors of their own, and end after other numbers of steps."""
    first, second = found("r_alone")
    assert [len(one[mode]["loss"]) for one in (first, second)] == [3, 7]
    causes = [one[f"{mode} status"]["demotions"][0]["cause"] for one in (second,)]
    assert causes == ["expected scalar type Float but found Half"]
    if mode == "float16":
        skipped = [one["float16 status"]["steps"]["skipped"] for one in (first, second)]
        assert skipped == [0, 1]


@pytest.mark.parametrize("mode", HALF)
def test_shards_agree_with_float32(found: Callable[..., Found], mode: str) -> None:
    for one in found("r_shards"):
        torch.testing.assert_close(one[mode], one["plain"], rtol=HALF[mode], atol=HALF[mode])
        assert differences(one[mode], one["plain"]) != []
        assert one[f"{mode} status"]["steps"] == {"taken": 48, "skipped": 0}


@pytest.mark.parametrize("mode", MODES)
def test_ranks_with_shards_skip_the_same_steps_at_the_same_scale(
    found: Callable[..., Found], mode: str
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
    found: Callable[..., Found], mode: str
) -> None:
    """Also where it was clipped, and where a script steps twice on one backward."""
    first, second = found("r_one_shard")
    assert differences(first[mode], second[mode]) == []
    assert scaling(first[f"{mode} status"]) == scaling(second[f"{mode} status"])
    assert all(tensor.isfinite().all() for kind in first[mode]["parameters"] for tensor in kind)
    if mode == "float16":
        assert first[mode]["steps"] == [[True, False, True, False, True]] * 3


@pytest.mark.parametrize("kind", ["fsdp", "fsdp original", "zero", "tensor"])
def test_ranks_that_share_out_a_model_otherwise_skip_a_step_together(
    found: Callable[..., Found], kind: str
) -> None:
    """The older FSDP class, ZeRO's optimizer and tensor parallelism agree with float32, too."""
    first, second = [one["float16"][kind] for one in found("r_other_shards")]
    assert first["taken"] == second["taken"] == [step not in (2, 5) for step in range(8)]
    assert first["seen"] == "torch.float16"
    assert first["scale"] == second["scale"]
    for one, plain in zip((first, second), found("r_other_shards"), strict=True):
        assert all(part.isfinite().all() for part in one["parts"])
        expected = plain["plain"][kind]["loss"][:3]  # then float32 has its first infinite gradient
        assert one["loss"][:3] == pytest.approx(expected, rel=0.01)
    runs = [one["overflows status"] for one in found("r_other_shards")]
    assert scaling(runs[0]) == scaling(runs[1])
    assert runs[0]["steps"]["skipped"] >= 15


@pytest.mark.parametrize("kind", ["fsdp mixed", "shards mixed"])
def test_mixed_precision_that_a_model_is_sharded_with_wins(
    found: Callable[..., Found], kind: str
) -> None:
    for one in found("r_other_shards"):
        for mode in MODES:
            assert one[mode][kind]["seen"] == "torch.bfloat16"
        assert one["bfloat16"][kind]["loss"] == one["plain"][kind]["loss"]


@pytest.mark.parametrize("mode", HALF)
def test_a_pipeline_runs_in_half_and_agrees_with_float32(
    found: Callable[..., Found], mode: str
) -> None:
    for one in found("r_pipeline"):
        assert set(one[mode]["seen"]) == {f"torch.{mode}"}
        for key in ("loss", "gradients", "parameters"):
            torch.testing.assert_close(
                one[mode][key], one["plain"][key], rtol=HALF[mode], atol=HALF[mode]
            )
        assert one[f"{mode} status"]["steps"] == {"taken": 12, "skipped": 0}
