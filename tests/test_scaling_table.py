"""What docs/scaling.md says that half gradients save is what `scripts/scaling` computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def rows() -> list[str]:
    command = [sys.executable, ROOT / "scripts" / "scaling"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_document_prints_the_table(rows: list[str]) -> None:
    assert "\n".join(rows) in (ROOT / "docs" / "scaling.md").read_text()
    assert len(rows) == 2 + 3 * 3 * 3


def test_the_table_is_that_of_a_ring(rows: list[str]) -> None:
    """By hand, ResNet-50 on 8 ranks at 25 Gbit/s: 14 rounds; 102.4 MB, of which each link carries
    14/8 at 0.9 * 3.125 GB/s, 63.7 ms; and 4 buckets of 14 rounds of 5 us, 0.3 ms."""
    cells = [cell.strip() for cell in rows[2].strip("|").split("|")]
    wire = 1e3 * (14 / 8 * 25.6e6 * 4 / (0.9 * 25e9 / 8) + 4 * 14 * 5e-6)
    assert cells[:4] == ["ResNet-50, 256 images", "8", "25", f"{wire:.0f}"]
