"""Mixed precision trains as well as float32: the final metric stays within the spread of seeds."""

from __future__ import annotations

from concurrent import futures
from statistics import mean
from typing import Any

import pytest

from .conftest import SCRIPTS

MIXED = {"AUTO_MIXED_PRECISION": "1", "AUTO_MIXED_PRECISION_DTYPE": "bfloat16"}
SEEDS = {"digits_dcgan": 8}
"""How many, where not 3: the spread of three runs of a GAN says little about the next three."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_final_metric_agrees_with_float32_within_the_spread_of_seeds(train: Any, name: str) -> None:
    """The mean over the seeds moves by less than float32 itself does from seed to seed."""
    seeds = range(SEEDS.get(name, 3))
    with futures.ThreadPoolExecutor(2) as pool:  # what waits is a thread, what works a process
        plain, mixed = (
            [
                outcome.metric
                for outcome in pool.map(
                    lambda seed, variables=variables: train(
                        "scripts", name, "--seed", seed, **variables
                    ),
                    seeds,
                )
            ]
            for variables in ({}, MIXED)
        )
    assert abs(mean(mixed) - mean(plain)) <= max(plain) - min(plain), (mixed, plain)
    assert mixed != plain


def test_an_fp16_run_reaches_the_float32_metric_with_its_scale_in_motion(train: Any) -> None:
    """The VAE's summed loss overflows at 65536: the scale has to find its place by itself."""
    plain = [train("scripts", "digits_vae", "--seed", seed).metric for seed in range(3)]
    mixed = train(
        "scripts",
        "digits_vae",
        AUTO_MIXED_PRECISION="1",
        AUTO_MIXED_PRECISION_DTYPE="float16",
    )
    assert abs(mixed.metric - plain[0]) <= max(plain) - min(plain), (mixed.metric, plain)
    assert " 0 skipped" not in mixed.stderr
