"""Mixed precision trains as well as float32: the final metric stays within the spread of seeds."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_final_metric_agrees_with_float32_within_three_seeds(train: Any, name: str) -> None:
    plain = [train("scripts", name, "--seed", seed).metric for seed in range(3)]
    mixed = train(
        "scripts",
        name,
        "--seed",
        0,
        AUTO_MIXED_PRECISION="1",
        AUTO_MIXED_PRECISION_DTYPE="bfloat16",
    )
    spread = max(plain) - min(plain)
    assert abs(mixed.metric - plain[0]) <= spread, (mixed.metric, plain)
