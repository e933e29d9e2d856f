"""Turns everything on, or back off: the only place where all parts meet."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from dataclasses import replace

from . import requirements

requirements.check_torch()

# ruff: noqa: E402 - what follows needs a torch that is not too old
from . import (
    agreement,
    bootstrap,
    interop,
    modules,
    overflow,
    plan,
    policyfile,
    region,
    report,
    settings,
    standing,
    stepping,
)
from .compat import standins
from .errors import AutoampError
from .fusing import Fusing
from .kernels import Kernels, Local
from .patches import patches_for, patches_for_dry_run
from .patching import Ledger
from .policy import Policy
from .reporting.live import Live
from .reporting.watching import Watch
from .scaling import LossScale
from .session import Session
from .speech import Speech
from .weights import WeightCasts

_session: Session | None = None
_fork_hook_is_set = False


def session() -> Session | None:
    """The active session, if there is one."""
    return _session


def activate(door: str, policy: str | None = None) -> str | None:
    """Patch torch by `policy` (None: the environment's), all or nothing.

    Returns:
        Why this process is left alone, or None: autoamp is active.

    Raises:
        AutoampError: a setting, the policy or this torch cannot be used; torch is as it was.
    """
    global _session
    asked = settings.read()
    script = getattr(sys, "argv", [""])[0]
    if settings.is_excluded(asked.only, script):
        only = ",".join(asked.only)
        return f"AUTO_MIXED_PRECISION_ONLY={only} leaves {os.path.basename(script)} out"
    if asked.report:
        report.check_path(asked.report)
        # Where the program stands now: it may go elsewhere before it ends.
        asked = replace(asked, report=os.path.abspath(asked.report))
    if asked.tensorboard:
        asked = replace(asked, tensorboard=os.path.abspath(asked.tensorboard))
    try:
        _session = _open(asked, _policy(asked, policy), door)
    except AutoampError as error:
        if asked.report:
            report.save(asked.report, report.describe_inactive(str(error), door))
        raise
    return None


def deactivate() -> None:
    """Put torch back as it was, by identity and presence."""
    global _session
    closing, _session = _session, None
    if closing is not None:
        atexit.unregister(_finish)
        _finish(closing)
        _close(closing)


def _policy(asked: settings.Settings, reference: str | None) -> Policy:
    origin = "autoamp.enable" if reference is not None else settings.origin_of_policy()
    policy = policyfile.load(reference or asked.policy, origin)
    return policyfile.with_overrides(policy, asked).forced(asked.dtype, asked.loss_scale)


def _open(asked: settings.Settings, policy: Policy, door: str) -> Session:
    plan.check(policy)
    local = Local()
    weights = WeightCasts(local, policy.performance.weight_cache == "on")
    opened = Session(
        asked,
        policy,
        door,
        Speech(asked.log),
        LossScale(policy.loss_scale),
        Ledger(),
        Kernels(local, weights),
        local,
        weights,
        Fusing(policy.performance.optimizer),
    )
    opened.spoilt = overflow.Spoilt()
    opened.live = Live(opened, asked.tensorboard)
    opened.loss_scale.heard = opened.live.heard
    if asked.report:
        opened.watch = Watch(opened, functools.partial(report.write_unfinished, opened))
    opened.modules = modules.Rules(opened)
    opened.agreement = agreement.Agreement(opened)
    if policy.performance.stand_down == "auto" and asked.dtype is None:
        opened.stand_down = standing.StandDown(opened)
    opened.regions = region.Regions(opened)
    opened.gates = stepping.Gates(opened)
    try:
        if asked.dry:
            opened.ledger.apply(patches_for_dry_run(), policy, opened)
        else:
            _apply(opened)
        _hide_from_dynamo(opened)
    except BaseException:
        _close(opened)
        raise
    _forget_parent_after_fork()
    atexit.register(_finish, opened)
    for entry in opened.ledger.entries:
        opened.speech.debug(f"autoamp: {entry.target}: {entry.outcome} ({entry.why})")
    return opened


def _apply(opened: Session) -> None:
    opened.ledger.apply(patches_for(opened.policy), opened.policy, opened)
    for optimizer in stepping.hooked_classes():
        opened.ledger.replace(optimizer, "step", opened.gates.gated(vars(optimizer)["step"]))
    standins.install(opened)


def _finish(closing: Session) -> None:
    closing.modules.close()
    report.finish(closing)
    if closing.live is not None and os.getpid() == closing.pid:
        closing.live.close()


def _close(closing: Session) -> None:
    closing.active = False
    interop.unhook()
    standins.remove()
    if closing.dynamo_watch is not None:
        closing.dynamo_watch.remove()
    for target in closing.ledger.restore():
        closing.speech.notice(
            f"autoamp: {target} has been replaced by someone else and is left; ours only passes on"
        )
    for optimizer in stepping.hooked_classes():  # classes that torch has wrapped meanwhile
        closing.ledger.put_back(optimizer, "step", stepping.ungated(vars(optimizer)["step"]))
    closing.kernels.remove()
    closing.fusing.end()
    while closing.undo:
        closing.undo.pop()()
    closing.speech.close()


def _hide_from_dynamo(opened: Session) -> None:
    """Let Dynamo see the original ``Module.__call__`` while it is first imported.

    It remembers what it finds there and skips that when it traces; ours would be skipped, and
    compiled functions that call models would silently run in float32 (torch/_dynamo/utils.py,
    ``unpatched_nn_module_call``).
    """
    name = "torch._dynamo.utils"
    if name in sys.modules:
        return
    target = "torch.nn:Module.__call__"
    opened.dynamo_watch = bootstrap.WhenImported(
        name,
        before=lambda: opened.ledger.lift(target),
        after=lambda succeeded: opened.ledger.lower(target),
    )
    opened.dynamo_watch.install()


def _forget_parent_after_fork() -> None:
    """A forked child starts counting at zero; what the parent has said is not said again."""
    global _fork_hook_is_set
    if not _fork_hook_is_set and hasattr(os, "register_at_fork"):
        _fork_hook_is_set = True
        os.register_at_fork(after_in_child=_start_counting_anew)


def _start_counting_anew() -> None:
    if _session is not None:
        _session.forget_counts()
