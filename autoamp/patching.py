"""Puts replacements into torch and takes them out again: all or nothing, presence as well as value.

The only room that assigns attributes on objects which autoamp does not own. What is replaced is
data (`patches`).
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import wrapt

from .errors import PatchError
from .policy import Policy

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Patch:
    """One torch name that is replaced.

    `target` is ``module:attribute.path``; `factory` takes (original, session) and returns a plain
    function, or a property; `when` is asked once whether the policy needs it; `optional` names may
    be absent in some versions of torch.
    """

    target: str
    factory: Callable[[Any, Any], Any]
    why: str
    when: Callable[[Policy], bool] = lambda policy: True
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """What became of one patch: ``applied``, ``not needed`` or ``absent``."""

    target: str
    outcome: str
    why: str


@dataclass(frozen=True, slots=True)
class _Applied:
    target: str
    owner: Any
    name: str
    before: Any
    installed: Any

    def is_in_place(self) -> bool:
        return vars(self.owner).get(self.name, _ABSENT) is self.installed


_KINDS: dict[type, Callable[..., Any]] = {
    staticmethod: staticmethod,
    classmethod: classmethod,
    types.ClassMethodDescriptorType: classmethod,
}


class Ledger:
    """What was put in, and what was there before; `restore` is the exact inverse of `apply`."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._applied: list[_Applied] = []

    def apply(self, patches: Sequence[Patch], policy: Policy, session: Any) -> None:
        """Apply the rows in order.

        Raises:
            PatchError: a name is missing in this torch; everything applied before is restored.
        """
        try:
            for patch in patches:
                outcome = self._apply(patch, session) if patch.when(policy) else "not needed"
                self.entries.append(Entry(patch.target, outcome, patch.why))
        except BaseException:
            self.restore()
            raise

    def _apply(self, patch: Patch, session: Any) -> str:
        module, _, path = patch.target.partition(":")
        try:
            owner, name, original = wrapt.resolve_path(module, path)
        except (ImportError, AttributeError):
            if patch.optional:
                return "absent"
            raise PatchError(
                f"{patch.target} does not exist in torch {torch.__version__}; "
                "use a torch version that autoamp supports, or report this."
            ) from None
        original = getattr(original, "__func__", original)
        replacement = patch.factory(original, session)
        if not isinstance(replacement, property):
            named_like(replacement, original, owner, name)
        self.replace(owner, name, replacement, patch.target)
        return "applied"

    def replace(self, owner: Any, name: str, replacement: Any, target: str = "") -> None:
        """Put one replacement in place, to be restored with the rest."""
        before = vars(owner).get(name, _ABSENT)
        # What is a static method or a class method, in Python or in C, stays one.
        kind = _KINDS.get(type(inspect.getattr_static(owner, name, None)))
        installed = kind(replacement) if kind is not None else replacement
        setattr(owner, name, installed)
        self._applied.append(
            _Applied(
                target or f"{owner.__module__}:{owner.__qualname__}.{name}",
                owner,
                name,
                before,
                installed,
            )
        )

    def restore(self) -> list[str]:
        """Put everything back but what someone else has replaced since; those targets return."""
        left = []
        while self._applied:
            applied = self._applied.pop()
            if applied.is_in_place():
                self.put_back(applied.owner, applied.name, applied.before)
            else:
                left.append(applied.target)
        return left

    def put_back(self, owner: Any, name: str, before: Any) -> None:
        """Restore presence as well as value: what lived on a base class is deleted, not set."""
        if before is _ABSENT:
            delattr(owner, name)
        elif vars(owner).get(name) is not before:
            setattr(owner, name, before)

    def lift(self, target: str) -> None:
        """Put the original back for a moment; `lower` ends it."""
        for applied in self._applied:
            if applied.target == target and applied.is_in_place():
                self.put_back(applied.owner, applied.name, applied.before)

    def lower(self, target: str) -> None:
        """Put the replacement in again after `lift`."""
        for applied in self._applied:
            if (
                applied.target == target
                and vars(applied.owner).get(applied.name, _ABSENT) is applied.before
            ):
                setattr(applied.owner, applied.name, applied.installed)

    def replaced_since(self) -> list[str]:
        """The targets where our replacement is no longer what torch finds."""
        return [applied.target for applied in self._applied if not applied.is_in_place()]


def named_like(
    replacement: Callable[..., Any], original: Any, owner: Any, name: str
) -> Callable[..., Any]:
    """`replacement` dressed as `original`, located where it is installed: it pickles by that name.

    Idempotent and without descriptors: a plain function is what `torch.compile`, pickle and
    `inspect` understand.
    """
    place = getattr(owner, "__qualname__", "")
    attributes = {
        "__module__": getattr(owner, "__module__", None) or owner.__name__,
        "__name__": getattr(original, "__name__", name),
        "__qualname__": getattr(original, "__qualname__", f"{place}.{name}" if place else name),
        "__doc__": original.__doc__,
        "__wrapped__": original,
    }
    if not place:
        attributes.update(__module__=owner.__name__, __name__=name, __qualname__=name)
    for key, value in attributes.items():
        setattr(replacement, key, value)
    return replacement
