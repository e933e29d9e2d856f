"""The names of modules and parameters, and which of a policy's patterns match them."""

from __future__ import annotations

import difflib
import fnmatch
import gc
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from .policy import ModuleRule, ParameterRule

Module = torch.nn.Module

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Names under which torch's wrappers hold the module that they stand for."""
_WRAPPERS = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
"""These hold it as ``module``, which in other classes may be a name that the script gave."""
_MAX_NAMES = 64
"""Of one module; shared parts of shared parts would have as many as there are paths to them."""


class Patterns:
    """Finds the rules that match a name or class, by index, and remembers which ever did."""

    def __init__(self, rules: Sequence[ModuleRule | ParameterRule]) -> None:
        self._rules = rules
        self._plain: dict[str, list[int]] = {}
        self._globs: list[tuple[int, Callable[[str], Any]]] = []
        self._types: list[tuple[int, str]] = []
        self._matched: set[int] = set()
        self._names: dict[str, None] = {}
        self._classes: dict[str, None] = {}
        for index, rule in enumerate(rules):
            if isinstance(rule, ModuleRule) and rule.type:
                self._types.append((index, rule.type))
            elif rule.regex:
                self._globs.append((index, re.compile(rule.regex).fullmatch))
            elif set(rule.name) & set("*?["):
                self._globs.append((index, re.compile(fnmatch.translate(rule.name)).match))
            else:
                self._plain.setdefault(rule.name, []).append(index)
        self.ask_names = bool(self._plain or self._globs)

    def of_names(self, names: Iterable[str]) -> set[int]:
        """The rules that match any of these names."""
        indices: set[int] = set()
        for name in names:
            indices.update(self._plain.get(name, ()))
            indices.update(index for index, matches in self._globs if matches(name))
            self._names[name] = None
        self._matched |= indices
        return indices

    def of_class(self, cls: type) -> list[int]:
        """The rules that name this class, or one that it is derived from; in order."""
        self._classes[f"{cls.__module__}.{cls.__qualname__}"] = None
        spellings = {
            word
            for base in cls.__mro__
            for word in (base.__name__, f"{base.__module__}.{base.__qualname__}")
        }
        indices = [
            index
            for index, word in self._types
            if word in spellings or ("." in word and _found_at(word) in cls.__mro__)
        ]
        self._matched.update(indices)
        return indices

    def unmatched(self) -> list[int]:
        """The rules that never matched."""
        return [index for index in range(len(self._rules)) if index not in self._matched]

    def complaint(self, index: int) -> str:
        """One line about a rule that never matched: where it stands, and what it may mean."""
        rule = self._rules[index]
        what = "module" if isinstance(rule, ModuleRule) else "parameter"
        if isinstance(rule, ModuleRule) and rule.type:
            word, noun, known = rule.type, "class", list(self._classes)
            if "." not in word:
                known = [name.rpartition(".")[2] for name in known]
        else:
            word, noun, known = rule.regex or rule.name, "name", list(self._names)
        near = difflib.get_close_matches(word, known, 1, 0.4)
        hint = f"; the nearest {noun} is '{near[0]}'" if near else ""
        return f"{rule.origin}: '{word}' matches no {what} of the models that ran{hint}"


def children(module: Module) -> Iterator[tuple[str, Module]]:
    """The named parts of a module, one level down, also of one whose ``__init__`` has not run."""
    for name, child in list(module.__dict__.get("_modules", {}).items()):
        if child is not None:
            yield name, child


def all_below(module: Module) -> list[Module]:
    """A module and what is below it; `Module.modules` may be another thing in a script's class."""
    found = {id(module): module}
    stack = [module]
    while stack:
        for _, child in children(stack.pop()):
            if id(child) not in found:
                found[id(child)] = child
                stack.append(child)
    return list(found.values())


Named = dict[int, tuple[Module, set[str]]]
"""By a module's id: the module, and every name that it has."""


def collect_names(module: Module, found: Named) -> None:
    """Add `module`, called "", and all below it to `found`; wrappers' parts are left out."""
    _collect(module, "", found, set())


def _collect(module: Module, name: str, found: Named, above: set[int]) -> None:
    names = found.setdefault(id(module), (module, set()))[1]
    if id(module) in above or len(names) >= _MAX_NAMES:
        return
    names.add(name)
    above.add(id(module))
    for part, child in children(module):
        is_wrapped = part in _WRAPPED or part == "module"
        if is_wrapped:
            _collect(child, name, found, above)
        if not is_wrapped or (part == "module" and not isinstance(module, _WRAPPERS)):
            _collect(child, f"{name}.{part}" if name else part, found, above)
    above.discard(id(module))


def outermost_owners(module: Module) -> list[Module]:
    """The modules that hold `module`, however deep, and are held by none; itself if none does."""
    holders: dict[int, list[Module]] = {}
    for holder in gc.get_objects():
        if issubclass(type(holder), Module):
            for _, child in children(holder):
                holders.setdefault(id(child), []).append(holder)
    owners, stack, seen = [], [module], {id(module)}
    while stack:
        held = stack.pop()
        above = holders.get(id(held), [])
        if not above:
            owners.append(held)
        stack += [holder for holder in above if id(holder) not in seen]
        seen.update(map(id, above))
    return owners or [module]


def _found_at(path: str) -> Any:
    """What a dotted path leads to in the modules loaded so far; nothing is imported for it."""
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        thing: Any = sys.modules.get(".".join(parts[:cut]))
        for part in parts[cut:]:
            thing = getattr(thing, "__dict__", {}).get(part)
        if thing is not None:
            return thing
    return None
