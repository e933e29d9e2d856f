"""What autoamp raises: one base, so that one ``except`` catches it.

Every message says what is wrong, where, and what to do, in that order, in one line.
"""

from __future__ import annotations

from .spelling import printable


class AutoampError(Exception):
    """The base of every error that autoamp raises on purpose."""

    def __str__(self) -> str:
        """One line, whatever it quotes: variables and the names of files may hold anything."""
        return printable(super().__str__())


class SettingsError(AutoampError):
    """An environment variable of autoamp holds something that it cannot mean."""


class PolicyError(AutoampError):
    """A policy cannot be read; the message starts with ``file:line:column``."""


class PatchError(AutoampError):
    """This torch cannot be patched; it is as it was before."""
