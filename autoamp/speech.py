"""What autoamp says: single lines on stderr, from one process of a job. stdout is the user's."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import time

from .spelling import one_line

LEVELS = {
    "quiet": logging.CRITICAL + 10,
    "notice": 25,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}


FREELY = 20
"""So many lines of what happens are said as they come."""
PAUSE = 10.0
"""Then one in as many seconds."""


class _Stderr(logging.Handler):
    """Writes to whatever ``sys.stderr`` is at the time; a closed or missing one is no error.

    One line, whatever it quotes: a module may be named by what a script has read somewhere.
    """

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is nobody to tell
            sys.stderr.write(one_line(record.getMessage()) + "\n")


class Speech:
    """The logger ``autoamp``, at the level of ``AUTO_MIXED_PRECISION_LOG``."""

    def __init__(self, level: str) -> None:
        self.logger = logging.getLogger("autoamp")
        self.logger.setLevel(LEVELS[level])
        self.logger.propagate = False
        self._handler = _Stderr()
        self.logger.addHandler(self._handler)
        self.has_spoken = False
        self._infos = self._left_out = 0
        self._next_info = 0.0

    def notice(self, line: str) -> None:
        """One of the few lines that a run prints unless it is quiet."""
        if speaks_for_the_job():
            self.has_spoken = True
            self.logger.log(LEVELS["notice"], line)

    def info(self, line: str) -> None:
        """Something that happened, for ``AUTO_MIXED_PRECISION_LOG=info``; not all of very many."""
        if not self.logger.isEnabledFor(logging.INFO) or not speaks_for_the_job():
            return
        now = time.monotonic()
        self._infos += 1
        if self._infos > FREELY and now < self._next_info:
            self._left_out += 1
            return
        more = f" ({self._left_out:,} more lines like this left out)" if self._left_out else ""
        self._left_out, self._next_info = 0, now + PAUSE
        self.logger.info(line + more)

    def debug(self, line: str) -> None:
        """How autoamp works here, for ``AUTO_MIXED_PRECISION_LOG=debug``; every process speaks."""
        self.logger.debug(line)

    def close(self) -> None:
        """Take the handler off the logger again."""
        self.logger.removeHandler(self._handler)


def place_in_job() -> tuple[int, int]:
    """The rank of this process, and how many there are: torch's, or what a launcher has said."""
    import torch  # loaded long before anyone speaks; `status()` must not load it

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    return _number(rank, 0), _number(os.environ.get("WORLD_SIZE", "1"), 1)


def _number(text: str, otherwise: int) -> int:
    return int(text) if text.isdecimal() else otherwise


def speaks_for_the_job() -> bool:
    """Whether this process speaks: rank 0, no DataLoader worker, main process or first child."""
    import torch  # loaded long before anyone speaks; `status()` must not load it

    identity: tuple[int, ...] = getattr(multiprocessing.current_process(), "_identity", ())
    return (
        place_in_job()[0] == 0
        and torch.utils.data.get_worker_info() is None
        and identity in ((), (1,))
    )
