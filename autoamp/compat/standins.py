"""Stands in for Apex, whose mixed precision was deleted in 2025: scripts that import it go on.

A finder in front of the others, which asks them first: what is installed is what a script gets.
Only a module that nobody finds is ours (the folder ``apex`` beside this file), and where an Apex is
there, its modules find here the names that they have no more. Nothing is read before a script
imports ``apex``; for every other import this is one comparison.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import wraps
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..session import Session

ROOT = "apex"
FOLDER = Path(__file__).with_name(ROOT)
MODULES: dict[str, tuple[str, ...]] = {
    "apex": (),
    "apex.amp": ("_amp_state", "frontend", "handle", "scaler"),
    "apex.fp16_utils": ("fp16_optimizer", "fp16util", "loss_scaler"),
    "apex.normalization": ("fused_layer_norm",),
    "apex.optimizers": (
        "fused_adagrad",
        "fused_adam",
        "fused_lamb",
        "fused_novograd",
        "fused_sgd",
    ),
    "apex.parallel": ("LARC", "distributed", "optimized_sync_batchnorm", "sync_batchnorm"),
}
"""What there is of Apex here, and the modules of Apex in which the names of each were defined:
scripts and pickles spell those too. They are the same module under other names."""


class StandIns:
    """The finder of one session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.replaced: list[ModuleType] = []
        self.substitutes: dict[str, ModuleType] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What other finders know of a module of Apex, else ours; nothing about others."""
        if name not in MODULES:
            return None
        found = self._found_by_others(name, path, target)
        if found is None:
            return _own(name)
        self._complete_after(found)
        return found

    def _found_by_others(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)  # until 3.11 a finder may lack it
            if finder is not self and find is not None:
                spec: ModuleSpec | None = find(name, path, target)
                if spec is not None:
                    return spec
        return None

    def _complete_after(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        if not isinstance(loader, SourceFileLoader):
            return  # a folder without code, an archive: parts are found, names are not added
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            if self not in sys.meta_path:
                execute(module)
                return
            try:
                execute(module)
            except ImportError as error:  # an old one, made for a torch that is no more
                if module.__name__ == ROOT:
                    raise
                self._replace(module, error)
            else:
                self.complete(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]

    def _replace(self, module: ModuleType, error: ImportError) -> None:
        name = module.__name__
        self.session.speech.notice(
            f"autoamp: {name} is installed but cannot be imported ({error}); autoamp's is used"
        )
        self.replaced.append(module)
        _execute(_own(name), module)

    def complete(self, module: ModuleType) -> None:
        """Have a module of an Apex that is installed find what it has no more, when it is asked."""
        name = module.__name__
        if name == "apex.amp" and hasattr(module, "initialize"):
            self._leave_all_to(module)
        original = vars(module).get("__getattr__", _has_nothing)

        def find(attribute: str) -> Any:
            with suppress(AttributeError):
                return original(attribute)
            return self._missing(name, attribute)

        self.session.ledger.replace(module, "__getattr__", find, f"{name}:__getattr__")

    def _missing(self, name: str, attribute: str) -> Any:
        if name == ROOT:
            part = f"{ROOT}.{attribute}"
            if part in MODULES and _is_ours(find_spec(part)):
                return import_module(part)
        elif not attribute.startswith("_"):  # Python and torch look for such at every turn
            if name not in self.substitutes:
                own = _own(name)
                self.substitutes[name] = module_from_spec(own)
                _execute(own, self.substitutes[name])
            if attribute in self.substitutes[name].__all__:
                return getattr(self.substitutes[name], attribute)
        raise AttributeError(f"module {name!r} has no attribute {attribute!r}")

    def _leave_all_to(self, amp: Any) -> None:
        original = amp.initialize

        @wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            self.session.stand_aside("the script uses the Apex that is installed")
            return original(*args, **kwargs)

        self.session.ledger.replace(amp, "initialize", initialize, "apex.amp:initialize")


def _has_nothing(attribute: str) -> Any:
    raise AttributeError(attribute)


class _Loader(SourceFileLoader):
    """Loads one of ours, under the name that Apex has for it."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if sys.modules.get(module.__name__) is module:
            for alias in MODULES[module.__name__]:
                sys.modules.setdefault(f"{module.__name__}.{alias}", module)


def _own(name: str) -> ModuleSpec:
    path = FOLDER / (f"{name.removeprefix(ROOT + '.')}.py" if name != ROOT else "__init__.py")
    # A package without a place: further parts are nobody's, and fail as they would without us.
    spec = ModuleSpec(name, _Loader(name, str(path)), origin=str(path), is_package=True)
    spec.has_location = True
    return spec


def _execute(spec: ModuleSpec, module: ModuleType) -> None:
    assert spec.loader is not None
    spec.loader.exec_module(module)


def _is_ours(spec: ModuleSpec | None) -> bool:
    return spec is not None and isinstance(spec.loader, _Loader)


def install(session: Session) -> None:
    """From now on `import apex` finds something; one that was imported already is completed."""
    finder = StandIns(session)
    sys.meta_path.insert(0, finder)
    for name in MODULES:
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            finder.complete(module)


def remove() -> None:
    """Forget them: `import apex` is as it was, also for what has been imported meanwhile."""
    ours = [finder for finder in sys.meta_path if isinstance(finder, StandIns)]
    replaced = [module for finder in ours for module in finder.replaced]
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in ours]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == ROOT and (
            module in replaced or _is_ours(getattr(module, "__spec__", None))
        ):
            del sys.modules[name]
    installed = vars(sys.modules.get(ROOT, sys))
    for part in MODULES:
        child = part.removeprefix(ROOT + ".")
        if _is_ours(getattr(installed.get(child), "__spec__", None)):
            del installed[child]
