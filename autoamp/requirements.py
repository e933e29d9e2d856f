"""What torch must be, checked before any room is loaded that uses what an older one lacks."""

from __future__ import annotations

import re

import torch

from .errors import PatchError

OLDEST_TORCH = (2, 4)


def check_torch() -> None:
    """Refuse a torch that is too old.

    Raises:
        PatchError: with the version found and the one needed.
    """
    version = str(torch.__version__)
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise PatchError(
            f"torch {version} is too old; install torch {oldest} or later, "
            "or unset AUTO_MIXED_PRECISION."
        )
