"""How messages show a wrong word, and the nearest right one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], likeness: float = 0.5) -> str | None:
    """The word of `known` most like `word`, upper and lower case alike; None if none is."""
    lower = {other.lower(): other for other in known}
    near = difflib.get_close_matches(word.lower(), lower, 1, likeness)
    return lower[near[0]] if near else None


def hint(word: str, known: Iterable[str]) -> str:
    """What to write instead of `word`: the nearest one of `known`, or all of them."""
    known = list(known)
    near = nearest(word, known)
    return f"Did you mean '{near}'?" if near else f"Use one of: {', '.join(known)}."


def printable(text: str) -> str:
    """`text` with its line breaks and control characters as escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def one_line(message: str) -> str:
    """`message`, whatever it quotes, without line breaks and not too long to be read."""
    line = printable(message)
    return line if len(line) <= 600 else f"{line[:300]} … {line[-300:]}"
