"""Modules that half precision breaks run again in float32, and stay there: they are demoted.

The smallest piece first: a module's own code in float32 while the modules that it calls stay as
they are; then all below it; then the module that called it, up to the outermost one.
"""

from __future__ import annotations

import contextlib
import os
import re
import types
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .casting import back_to_half
from .inspection import (
    Finding,
    Probe,
    all_finite,
    is_opaque,
    is_plain,
    none_is_spoilt,
    quietly,
)
from .kernels import FULL
from .naming import Named, collect_names
from .policy import FallbackRule
from .ranks import collectives, has_ranks
from .report import demotion_line
from .snapshots import Snapshot, Watch, checkpoint_frame

if TYPE_CHECKING:
    from .islands import Islands
    from .session import Session

Module = torch.nn.Module
MAX_CLASSES = 8
"""Of calls of one root, by shapes and modes: more are not looked at."""
MAX_FAILURES = 16
"""Of attempts to help, in one call of a root: then the error is raised as it is."""
MAX_LINES = 8
"""Of demotions that are said; the report has all."""

_PRECISION = re.compile(
    r"half|float|dtype|scalar type|data ?type|same type|precision|overflow|finite|\binf\b|\bnan\b"
    r"|powers? of two|not implemented for|cannot be cast|can't be cast|16F|constraint|probabilit"
    r"|positive|definite|singular|converge",
    re.IGNORECASE,
)
"""What errors say that half precision may be the reason of."""
_DTYPES = re.compile(
    r"scalar type|same d?type|type .* should be the same|found dtype"
    r"|not implemented for '(Half|BFloat16)'",
    re.IGNORECASE,
)
"""What errors of a backward say of which it is certainly the reason. Not that a tensor is named: so
does the one about weights that were edited in place."""
_KINDS = (RuntimeError, TypeError, ValueError, ArithmeticError)
_ASSERTIONS = (AssertionError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
"""Errors that a script, or torch for it, raises where numbers are not what they should be."""
_NEVER = (torch.cuda.OutOfMemoryError, RecursionError)

_current_graph_task_id = torch._C._current_graph_task_id


@dataclass(frozen=True, slots=True)
class Demotion:
    """A module that runs in float32 because half precision broke it.

    `module` is its name below the root, empty for the root itself; `below` tells whether all that
    it calls is float32 too; `where` is ``file:line`` of the script, `step` the number of optimizer
    steps before.
    """

    module: str
    type: str
    below: bool
    cause: str
    where: str
    step: int


class Fallback:
    """What one session does about modules that half precision breaks."""

    def __init__(self, session: Session, islands: Islands) -> None:
        self.session = session
        self.islands = islands
        self.rule = session.policy.fallback
        self.is_on = self.rule != FallbackRule(patience=self.rule.patience)
        self._local = session.local
        self._seen: dict[int, set[tuple[Any, ...]]] = session.modules.new_table()
        self._hopeless: set[tuple[type, str]] = set()
        self._looks_for_overflow = self._has_given_up = False
        self._found = 0
        self._lately: deque[int] = deque(maxlen=8)
        if self.rule.on_overflow == "float32":
            session.loss_scale.watch_skips(self.rule.patience, self.look_for_overflow)

    # Asked by the calls of modules

    def may_cure(self, error: BaseException) -> bool:
        """Whether float32 may help the module call that has raised this in a region of ours."""
        local = self._local
        return (
            local.region is not None
            and _current_graph_task_id() == -1
            and (local.watch is not None or checkpoint_frame() is None)
            and torch.is_autocast_enabled(local.region)
            and _nesting() == 1
            and (isinstance(error, Finding) or self._is_about_precision(error))
        )

    def is_new(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a root is called with shapes and in a mode in which it never was."""
        module = args[0]
        self._lately.append(id(module))
        seen = self._seen.get(id(module))
        if seen is None:
            self.session.modules.remember(module)
            seen = self._seen[id(module)] = set()
        is_wanted = self.rule.inspect or self._looks_for_overflow
        if not is_wanted or len(seen) >= MAX_CLASSES:
            return False
        kind = kind_of_call(args, kwargs)
        if kind in seen:
            return False
        seen.add(kind)
        return not is_opaque(module) and torch._C._len_torch_dispatch_stack() == 0 and is_plain()

    def helped(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module call, and in float32 if it raises because of half precision."""
        mark = collectives()
        try:
            return run(args, kwargs)
        except Exception as error:
            if not self.may_cure(error):
                raise
            trouble = error
        return self.again(trouble, args, kwargs, mark)

    def watched(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call of a root under the probe: what it finds is helped in the same call."""
        local, detours = self._local, self.session.detours
        watch = local.watch = Watch(local.region)
        detours.append(True)
        before = watch.snapshot(args[0])
        demotions = self._found
        try:
            with Probe(local.region, self._is_looking):
                result = self.attempt(run, args, kwargs)
        except Finding:
            before.restore()
            result = None
        else:
            self._has_looked(args, kwargs, result, demotions)
            return result
        finally:
            local.watch = None
            detours.pop()
        return run(args, kwargs)

    def attempt(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module call while a root is watched."""
        module, watch = args[0], self._local.watch
        before = watch.snapshot(module)
        around, mark = watch.mark, collectives()
        watch.mark = mark
        try:
            with _disable_current_modes() if is_opaque(module) else _NOTHING:
                result = run(args, kwargs)
        except (Exception, Finding) as error:
            if not self.may_cure(error):
                raise
            trouble: BaseException = error
        else:
            if not self._is_spoilt(args, kwargs, result):
                return result
            trouble = _NotFinite("its result is not finite, its arguments are")
        finally:
            watch.mark = around
        try:
            return self.again(trouble, args, kwargs, mark, before)
        except _NotFinite:  # in float32 neither
            watch.is_in_doubt = True
            return result

    def gives_up_backward(self, error: Exception) -> bool:
        """Whether a backward is lost because of half precision: the next one will be float32's.

        What has run lately is demoted as a whole: nobody knows which forward the graph is of.
        """
        is_ours = self.rule.on_error == "float32" and _DTYPES.search(str(error)) is not None
        if not is_ours or has_ranks() or _is_of_the_compiler(error):
            return False
        modules = self.session.modules
        found = [root for root in map(modules.living, self._lately) if root is not None]
        roots = [root for root in found if not modules.demoted(root)]
        for root in roots:
            self._keep(root, True, modules.demoted(root), error)
        return bool(roots)

    def look_for_overflow(self) -> None:
        """Steps are skipped again and again: the next calls of roots are watched."""
        self._looks_for_overflow = True
        self._seen.clear()

    def again(
        self,
        error: BaseException,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mark: int,
        before: Snapshot | None = None,
    ) -> Any:
        """The call (module, *its arguments) once more, in float32 as far as it takes.

        Not where ranks have exchanged something since it began, when `mark` was what
        `ranks.collectives` says: the others would not take part again.

        Raises:
            the error: float32 does not help either.
        """
        module, rules = args[0], self.session.modules
        was = rules.demoted(module)
        for below in self._stages(module, was):
            if collectives() != mark:
                break
            if before is not None:
                before.restore()
            rules.demote(module, below)
            try:
                result = self.islands.call_demoted(args, kwargs)
            except (Exception, Finding):  # noqa: BLE001 - what is raised in the end is the first error
                self._local.failures += 1
                continue
            if isinstance(error, _NotFinite) and not none_is_spoilt(result):
                continue
            if self._keep(module, below, was, error):
                return result
            return back_to_half(result, (args[1:], kwargs))  # what others see has not changed yet
        rules.demote(module, was)
        if has_ranks() and isinstance(error, Finding) and not isinstance(error, _NotFinite):
            with _disable_current_modes():  # the caller may not begin again: as it would have been
                return self.islands.call_demoted(args, kwargs)
        if module is self._local.root and not isinstance(error, Finding):
            self._hopeless.add((type(error), str(error)))
        raise error

    # How it is done

    def _stages(self, module: Module, was: bool | None) -> tuple[bool, ...]:
        if was or self._local.failures >= MAX_FAILURES:
            return ()
        return (True,) if was is False or not _calls_modules(module) else (False, True)

    def _is_about_precision(self, error: BaseException) -> bool:
        if self.rule.on_error != "float32" or isinstance(error, _NEVER):
            return False
        if not isinstance(error, (*_KINDS, *_ASSERTIONS)) or _is_of_the_compiler(error):
            return False
        if self._local.failures >= MAX_FAILURES or (type(error), str(error)) in self._hopeless:
            return False
        return isinstance(error, _ASSERTIONS) or _PRECISION.search(str(error)) is not None

    def _is_looking(self) -> bool:
        """Whether the op that the probe sees is a forward's, in lower precision and our region.

        Not asked of torch: in front of a dispatch mode autocast is off.
        """
        is_lower = self._local.precision not in FULL and _nesting() == 1
        may_run_again = collectives() == self._local.watch.mark
        return is_lower and may_run_again and _current_graph_task_id() == -1

    def _is_spoilt(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """Whether a result is not finite though what it was made from is.

        Where float32 did not help the first module that this is true of, only the root is asked.
        """
        is_root = args[0] is self._local.root
        if self._local.watch.is_in_doubt and not is_root:
            return False
        if not torch.is_autocast_enabled(self._local.region) or _nesting() != 1:
            return False
        with quietly():
            return not none_is_spoilt(result) and all_finite((args[1:], kwargs))

    def _has_looked(self, args: Any, kwargs: Any, result: Any, demotions: int) -> None:
        """What the look for overflows has come to."""
        if not self._looks_for_overflow:
            return
        scale = self.session.loss_scale
        if self._found > demotions:
            self._looks_for_overflow = False
            if not has_ranks():
                scale.restore()
        elif scale.is_at_floor() and not self.session.modules.demoted(args[0]):
            self._looks_for_overflow = False
            if all_finite(result):
                error = Finding("gradients overflow at the least loss scale")
                self._keep(args[0], True, self.session.modules.demoted(args[0]), error)
            elif not self._has_given_up:
                self._has_given_up = True
                self.session.speech.notice(
                    "autoamp: the results of the model are not finite, in float32 neither; look "
                    "for inf and nan in its parameters and in the data"
                )

    def _keep(self, module: Module, below: bool, was: bool | None, error: BaseException) -> bool:
        """Have a module stay in float32; as it `was` until all ranks that share it have agreed.

        Returns whether it does so already.
        """
        session, root = self.session, self._local.root
        root = module if root is None else root
        self._found += 1
        demotion = self._describe(root, module, below, error)
        if session.agreement.shares(root):
            session.modules.demote(module, was)
            session.agreement.wish(module, demotion)
            return False
        session.modules.demote(module, below)
        self._note(demotion)
        return True

    def grant(self, demotion: Demotion) -> None:
        """Demote what all ranks have agreed on, by its name below whatever has been called here."""
        modules, is_new = self.session.modules, False
        for root in filter(None, map(modules.living, list(self._seen))):
            found: Named = {}
            collect_names(root, found)
            for module, names in found.values():
                is_it = demotion.module in names and type(module).__name__ == demotion.type
                if is_it and not (was := modules.demoted(module)) and was is not demotion.below:
                    modules.demote(module, demotion.below)
                    is_new = True
        if is_new:
            self._note(demotion)

    def _describe(
        self, root: Module, module: Module, below: bool, error: BaseException
    ) -> Demotion:
        found: Named = {}
        collect_names(root, found)
        names = found.get(id(module), (module, {type(module).__name__}))[1]
        cause = str(error).partition("\n")[0] or type(error).__name__
        steps = self.session.modules.steps()
        return Demotion(min(names), type(module).__name__, below, cause, _place(error), steps)

    def _note(self, demotion: Demotion) -> None:
        """Say and keep that a module stays in float32."""
        session = self.session
        session.demotions.append(demotion)
        if session.dry is not None:  # told at the end
            return
        if len(session.demotions) <= MAX_LINES:
            session.speech.notice(f"autoamp: {demotion_line(asdict(demotion))}")
        elif len(session.demotions) == MAX_LINES + 1:
            session.speech.notice("autoamp: more modules run in float32; the report names all")


def kind_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What tells calls (module, *its arguments) apart of which one is looked at: shapes, modes."""
    kind: list[Any] = [args[0].training, torch.is_grad_enabled()]
    for value in (*args[1:], *kwargs.values()):
        if isinstance(value, torch.Tensor):
            kind.append((value.dtype, value.dim(), int(value.numel()).bit_length()))
    return tuple(kind)


Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""A call of a module: ((module, *its arguments), those by keyword)."""


class _NotFinite(Finding):
    """A module's result is not finite; whether half precision is the reason has to be tried."""


_NOTHING: contextlib.nullcontext[None] = contextlib.nullcontext()


def _is_of_the_compiler(error: BaseException) -> bool:
    """Whether torch.compile has raised this for itself, not for an op that it traced."""
    kind = type(error)
    return kind.__module__ == "torch._dynamo.exc" and kind.__name__ != "TorchRuntimeError"


def _calls_modules(module: Module) -> bool:
    return any(child is not None for child in module._modules.values())


def _nesting() -> int:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


_OURS = os.path.dirname(__file__) + os.sep
_TORCHS = os.path.dirname(torch.__file__) + os.sep


def _place(error: BaseException) -> str:
    """``file:line`` of the script's innermost frame that an error came through."""
    found, trace = "", error.__traceback__
    while trace is not None:
        code: types.CodeType = trace.tb_frame.f_code
        if not code.co_filename.startswith((_OURS, _TORCHS, "<")):
            found = f"{code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
