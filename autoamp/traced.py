"""What code that `torch.compile` traces may take for granted about modules.

It asks once, while it is traced, and is used for other modules too unless it guards. To guard on a
module itself has it compiled once more for every module: only where that is needed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from .naming import Named, children

Module = torch.nn.Module


class Parts:
    """Which modules their class alone tells all about, and which are special.

    By the ids of modules and classes; those of dead ones are taken out by who owns this.
    """

    def __init__(self) -> None:
        self.edition = "0"
        """Changes when modules of one class may no longer be treated alike: code guards on it."""
        self.is_mixed = False
        """Whether eager code is in a module with special parts: guarded, so that the others share
        what is compiled."""
        self.inside = 0
        """The id of the module without special parts that eager code is in, if it is in one."""
        self.mixed: dict[int, bool] = {}
        """The modules with special parts below them."""
        self.plain: dict[int, bool] = {}
        """The outermost modules without, in modules with some."""
        self._special: dict[int, bool] = {}
        self._told_apart: dict[int, bool] = {}
        self._limits: tuple[int, int] | None = None
        self.tables: tuple[dict[int, Any], ...] = (
            self.mixed,
            self.plain,
            self._special,
            self._told_apart,
        )

    def note_special(self, module: Module) -> None:
        """The class of this module does not tell what holds for it."""
        self._special[id(module)] = True
        if id(type(module)) not in self._told_apart:
            self._told_apart[id(type(module))] = True
            self.edition = str(int(self.edition) + 1)

    def sort(self, found: Named) -> None:
        """Find the modules that hold special ones, and in those the outermost that do not."""
        holders: dict[int, list[int]] = {}
        for key, (module, _) in found.items():
            for _, child in children(module):
                holders.setdefault(id(child), []).append(key)
        mixed: dict[int, bool] = {}
        stack = [key for key in found if key in self._special]
        while stack:
            above = [key for key in holders.get(stack.pop(), ()) if key not in mixed]
            mixed.update(dict.fromkeys(above, True))
            stack += above
        self.mixed.update(mixed)
        for key in mixed:
            self.plain.pop(key, None)
        for key in mixed:
            self._mark_plain(found[key][0], found)

    def _mark_plain(self, holder: Module, found: Named) -> None:
        for _, child in children(holder):
            key = id(child)
            if key in found and key not in self.mixed and key not in self.plain:
                if next(children(child), None) is not None:
                    self.plain[key] = True
                if is_never_called(child):
                    self._mark_plain(child, found)

    def are_told_apart(self, cls: type) -> bool:
        """Whether modules of this class have to be asked one by one, where parts are mixed."""
        if id(cls) not in self._told_apart:
            return False
        self.raise_limits(len(self.mixed))
        return True

    def raise_limits(self, count: int) -> None:
        """Let Dynamo compile this many modules one by one.

        Beyond its limits, meant for code that is compiled again and again, modules would run
        uncompiled or, with ``fullgraph=True``, not at all.
        """
        config: Any = sys.modules["torch._dynamo.config"]
        if self._limits is None:
            self._limits = config.cache_size_limit, config.accumulated_cache_size_limit
        each, together = (limit + count for limit in self._limits)
        config.cache_size_limit = max(each, config.cache_size_limit)
        config.accumulated_cache_size_limit = max(together, config.accumulated_cache_size_limit)

    def close(self) -> None:
        """Put Dynamo's limits back."""
        if self._limits is not None:
            config: Any = sys.modules["torch._dynamo.config"]
            config.cache_size_limit, config.accumulated_cache_size_limit = self._limits


def is_never_called(module: Module) -> bool:
    """Whether this only holds modules, as `nn.ModuleList`: its class has no ``forward``."""
    definer = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    return definer is Module
