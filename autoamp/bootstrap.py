"""Is autoamp wanted in this process, and when? Waits for torch, then activates.

Every Python process may run this file when it starts: standard library only, nothing costly (no
`typing`, `threading`, `logging`), and nothing raises out of here except Ctrl-C and the stop that
AUTO_MIXED_PRECISION_STRICT=1 asks for.

The doors: the start files (`autoamp.pth`, `autoamp.start`), `sitecustomize`, torch's own
`torch.backends` entry point, and `autoamp.enable()`. Each fails somewhere the others work, so
several may come in one process, or one twice (a venv runs each .pth twice): the first one counts.

    start()           at startup         activates if torch is loaded, else waits for torch
    start_in_torch()  in `import torch`  activates, or looks again at the first optimizer
    enable()          in user code       imports torch and activates
"""

from __future__ import annotations

import os
import sys
from _thread import RLock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

SUPPORTED = sys.version_info >= (3, 10)
ON = ("1", "true", "on", "yes")
OFF = ("0", "false", "off", "no")
DEPENDENCIES = {"torch": "torch", "wrapt": "wrapt", "yaml": "pyyaml"}  # module: what pip calls it

door: str | None = None  # the first door that found autoamp wanted
phase = "idle"  # idle -> armed -> active | failed | off
reason = ""  # why failed or off

_policy: str | None = None  # the name or path that the active policy was asked for by
_waiting: list[Callable[[], None]] = []  # what takes our waiting posts out of Python and torch
_lock = RLock()  # taken only where torch is loaded or being loaded by this very thread


def switch(environ: Mapping[str, str] | None = None) -> str | None:
    """Read AUTO_MIXED_PRECISION: None when unset or empty, 'off', or the policy asked for."""
    value = (os.environ if environ is None else environ).get("AUTO_MIXED_PRECISION", "").strip()
    if value.lower() in OFF:
        return "off"
    return "default" if value.lower() in ON else value or None


def has_rights_of_another() -> bool:
    """Whether the user who set the variables lacks rights that this process has (setuid, setgid).

    A policy is a path to read, a report one to write: not with rights that are not theirs.
    """
    if not hasattr(os, "getuid"):
        return False
    return os.getuid() != os.geteuid() or os.getgid() != os.getegid()


def start(door: str = ".start") -> None:
    """Activate as soon as torch is loaded, if autoamp is wanted; for files that run at startup."""
    if not SUPPORTED or phase != "idle" or not _is_wanted():
        return
    if sys.modules.get("torch") is None or _is_being_imported("torch"):
        _wait_for_torch(door)
    else:
        _activate(door)


def start_in_torch() -> None:
    """Serve the `torch.backends` entry point, which torch calls near the end of its import.

    It alone sees a variable that the script has set, and comes at no cost to other processes.
    """
    if not SUPPORTED or phase not in ("idle", "armed") or _torch.executing:
        return  # when executing: the watcher activates after torch's very last line
    if _is_wanted():
        _activate("torch.backends")
    elif switch() is None and not _waiting:
        _wait_for_optimizer()


def enable(policy: str | os.PathLike[str] | None = None) -> None:
    """Turn autoamp on from code, with this policy or the environment's, importing torch if needed.

    AUTO_MIXED_PRECISION=0 outranks it. A failure costs one line on stderr and the program goes on
    in float32; with AUTO_MIXED_PRECISION_STRICT=1 it is raised instead. Raises RuntimeError when
    autoamp is already active with another policy.
    """
    global door, phase, reason
    wanted = None if policy is None else os.fspath(policy)
    if switch() == "off":
        if phase != "active":
            phase, reason = "off", "AUTO_MIXED_PRECISION is off, which outranks autoamp.enable()"
        return
    if phase != "active":
        phase = "off"  # the other doors leave this import alone: the policy asked for here counts
        _stop_waiting()
        try:
            __import__("torch")
        except BaseException as error:
            _give_up(error, "autoamp.enable")
            return
        door, phase = None, "idle"
    _activate("autoamp.enable", wanted)
    if phase == "active" and wanted not in (None, _policy):
        raise RuntimeError(
            f"autoamp.enable({wanted!r}): already active with policy {_policy!r}; "
            "call autoamp.disable() first."
        )


def disable() -> None:
    """Put torch back as it was; only `enable()` turns autoamp on again in this process."""
    global phase, reason
    with _lock:
        was_active = phase == "active"
        phase, reason = "off", "autoamp.disable() was called"
        _stop_waiting()
        if was_active:
            from autoamp import activation

            activation.deactivate()


def _is_wanted() -> bool:
    return switch() not in (None, "off") and not has_rights_of_another()


def _is_being_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return getattr(spec, "_initializing", False)


def _activate(through: str, policy: str | None = None) -> None:
    """Turn autoamp on, at most once; `policy` None means the environment's."""
    global door, phase, reason, _policy
    with _lock:
        if phase not in ("idle", "armed"):
            return
        _stop_waiting()
        door = door or through
        phase, reason = "active", ""  # before the work, which may knock at another door
        asked = policy or os.environ.get("AUTO_MIXED_PRECISION_POLICY", "").strip() or switch()
        _policy = asked or "default"
        import gc

        # What is made here stays: looking for garbage in all of torch takes longer than the rest.
        collects = gc.isenabled()
        gc.disable()
        try:
            from autoamp import activation

            declined = activation.activate(door=door, policy=policy)
        except BaseException as error:
            _give_up(error, through)
        else:
            if declined:
                phase, reason = "off", declined
        finally:
            if collects:
                gc.enable()


def _give_up(error: BaseException, through: str) -> None:
    """Say in one line that this process runs without autoamp, and stop it if that was asked for."""
    global phase, reason
    phase, reason = "failed", _explain(error)
    strict = os.environ.get("AUTO_MIXED_PRECISION_STRICT", "").strip().lower() in ON
    if isinstance(error, KeyboardInterrupt) or (strict and through == "autoamp.enable"):
        raise error
    end = "the program continues in float32"
    if strict:
        end = "stopped (AUTO_MIXED_PRECISION_STRICT=1)"
    try:
        sys.stderr.write(f"autoamp: off in this process: {reason.rstrip('.')}; {end}\n")
        sys.stderr.flush()
    except Exception:  # noqa: S110 - a closed stderr, or none (pythonw): nobody is listening
        pass
    if strict and _is_being_imported("site"):
        os._exit(2)  # Python answers a SystemExit there with a crash report; no user code has run
    if strict:
        raise SystemExit(2) from None  # torch rewords any Exception as a failed backend extension


def _explain(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, getattr(sys.modules.get("autoamp.errors"), "AutoampError", ())):
        text = str(error)
    elif isinstance(error, ModuleNotFoundError) and error.name in DEPENDENCIES:
        text = f"{error.name} is not installed (pip install {DEPENDENCIES[error.name]})"
    text = " ".join(text.split())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class WhenImported:
    """Runs `before()` and `after(succeeded)` around the code of module `name`, when it runs next.

    A finder on `sys.meta_path`, in front of the others once installed. It stays until the module
    has executed without error: finding a spec is not importing (transformers looks for torch that
    way first), and an import may fail and be tried again. Neither callable may raise for less than
    a reason to fail the import.
    """

    def __init__(
        self,
        name: str,
        before: Callable[[], object] | None = None,
        after: Callable[[bool], object] | None = None,
    ) -> None:
        self.name = name
        self.before = before
        self.after = after
        self.executing = False

    def install(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        finders = list(sys.meta_path)
        if self not in finders:
            return None
        for finder in finders[finders.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)  # until 3.11 a finder may lack it
            spec: ModuleSpec | None = find and find(name, path, target)
            if spec is not None:
                self._watch(spec.loader)
                return spec
        return None

    def _watch(self, loader: Any) -> None:
        """Shadow exec_module on this one loader, which keeps its type and identity."""
        if not hasattr(loader, "exec_module") or not hasattr(loader, "__dict__"):
            return  # nothing to hold on to: for torch, the entry point remains
        original, shadowed = loader.exec_module, vars(loader).get("exec_module")

        def exec_module(module: ModuleType) -> None:
            ours = module.__name__ == self.name  # zipimport has one loader for all it finds
            if ours and vars(loader).get("exec_module") is exec_module:
                if shadowed is None:
                    del loader.exec_module
                else:
                    loader.exec_module = shadowed
            if ours and self in sys.meta_path and not self.executing:
                self._execute(original, module)
            else:
                original(module)

        loader.exec_module = exec_module

    def _execute(self, exec_module: Callable[[ModuleType], object], module: ModuleType) -> None:
        self.executing = True
        succeeded = False
        try:
            if self.before is not None:
                self.before()
            exec_module(module)
            succeeded = True
        finally:
            self.executing = False
            if succeeded:
                self.remove()
            if self.after is not None:
                self.after(succeeded)


def _wait_for_torch(through: str) -> None:
    global door, phase
    door, phase = through, "armed"
    _torch.install()
    _waiting.append(_torch.remove)


def _torch_was_imported(succeeded: bool) -> None:
    global door, phase
    if not succeeded:
        return
    if _is_wanted():
        _activate("import torch")
    elif phase == "armed":  # the script has taken the variable back meanwhile
        door, phase = None, "idle"


_torch = WhenImported("torch", after=_torch_was_imported)


def _wait_for_optimizer() -> None:
    """Look at the variable again when the first optimizer is made: the script may set it late."""
    try:
        from functools import wraps

        from torch.optim import Optimizer
    except Exception:
        return  # not the torch that we know; an entry point that raises fails `import torch`
    owned = "__init__" in vars(Optimizer)
    original = Optimizer.__init__

    def remove() -> None:
        if vars(Optimizer).get("__init__") is not look:
            return  # somebody wrapped it: what stays in their chain only passes on
        if owned:
            Optimizer.__init__ = original  # type: ignore[method-assign]
        else:
            del Optimizer.__init__

    @wraps(original)
    def look(self: Any, *args: Any, **kwargs: Any) -> None:
        remove()
        if _is_wanted():
            _activate("Optimizer.__init__")
        original(self, *args, **kwargs)

    Optimizer.__init__ = look  # type: ignore[method-assign]
    _waiting.append(remove)


def _stop_waiting() -> None:
    while _waiting:
        _waiting.pop()()
