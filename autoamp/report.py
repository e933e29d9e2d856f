"""Counts what happened and says it: the exit summary, and the report as JSON."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import merging
from .errors import SettingsError
from .speech import speaks_for_the_job

if TYPE_CHECKING:
    from .session import Session

SCHEMA = 1
"""Version of the report's layout; it grows when a key changes its meaning or goes."""


def describe(session: Session) -> dict[str, Any]:
    """The report as plain data; reading the loss scale back may wait for the device once."""
    scale = session.loss_scale
    scale.read_back()
    return {
        "schema": SCHEMA,
        "autoamp": sys.modules["autoamp"].__version__,
        "torch": _torch_version(),
        "active": session.active,
        "reason": "",
        "door": session.door,
        "policy": {"name": session.policy.name, "source": session.policy.source},
        "devices": {name: {"dtype": d.word, "why": d.why} for name, d in session.decisions.items()},
        "regions": session.counts.regions,
        "loss_scale": _loss_scale(session),
        "steps": {"taken": session.counts.steps + scale.taken, "skipped": scale.skipped},
        "demotions": [asdict(demotion) for demotion in session.demotions],
        "patches": [
            {"target": e.target, "outcome": e.outcome, "why": e.why} for e in session.ledger.entries
        ],
        "replaced_since": session.ledger.replaced_since(),
        "kernels": [
            {"op": k.op, "device": k.device, "list": k.category, "why": k.why}
            for k in session.kernels.registered
        ],
    }


def describe_inactive(reason: str, door: str | None) -> dict[str, Any]:
    """The same keys where there is no session."""
    return {
        "schema": SCHEMA,
        "autoamp": sys.modules["autoamp"].__version__,
        "torch": _torch_version(),
        "active": False,
        "reason": reason,
        "door": door,
        "policy": {"name": None, "source": None},
        "devices": {},
        "regions": 0,
        "loss_scale": dict(_NO_LOSS_SCALE),
        "steps": {"taken": 0, "skipped": 0},
        "demotions": [],
        "patches": [],
        "replaced_since": [],
        "kernels": [],
    }


_NO_LOSS_SCALE: dict[str, Any] = {
    "mode": "off",
    "initial": None,
    "final": None,
    "history": [],
    "owner": None,
}


def _loss_scale(session: Session) -> dict[str, Any]:
    if not session.scales:
        return {**_NO_LOSS_SCALE, "owner": session.scaler_owner or None}
    scale = session.loss_scale
    return {
        "mode": scale.rule.mode,
        "initial": scale.history[0][1],
        "final": scale.history[-1][1],
        "history": scale.history,
        "owner": "autoamp",
    }


def _torch_version() -> str | None:
    version = getattr(sys.modules.get("torch"), "__version__", None)
    return None if version is None else str(version)


def check_path(path: str) -> None:
    """Refuse a report path that cannot be written, while there is time to choose another.

    Raises:
        SettingsError: with what is wrong and what to do.
    """
    file = Path(path)
    if file.suffix != ".json":
        raise SettingsError(
            f"AUTO_MIXED_PRECISION_REPORT={path}: the report is JSON; name a file like run.json."
        )
    problem = ""
    if file.is_dir():
        problem = "it is a directory"
    elif not file.parent.is_dir():
        problem = f"there is no directory {file.parent}"
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        problem = "it cannot be written"
    if problem:
        raise SettingsError(
            f"AUTO_MIXED_PRECISION_REPORT={path}: {problem}; name a file that can be written."
        )


def write(path: str, content: dict[str, Any]) -> None:
    """Write the report in one piece: a reader never sees half of it."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(
            temporary, 0o666 & ~mask
        )  # mkstemp makes private files; a report is an ordinary one
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def write_of_rank(path: str, content: dict[str, Any]) -> None:
    """The same before anything has run: ``{rank}`` is what the launcher has said."""
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    write(path.replace(merging.OF_EACH, rank), content)


def finish(session: Session) -> None:
    """The summary and the report, at exit or when autoamp is disabled."""
    is_child = multiprocessing.parent_process() is not None
    has_run = session.counts.regions > 0
    if os.getpid() != session.pid or (is_child and not has_run):
        return
    speaks, place = speaks_for_the_job(), session.place
    if not speaks and not (has_run and place[1] > 1):
        return
    content = describe(session)
    if speaks and session.speech.has_spoken:
        session.speech.notice(summary(content))
    path = session.settings.report
    if path:
        try:
            _write_mine(path, content, session, place)
        except OSError as error:
            session.speech.notice(
                f"autoamp: AUTO_MIXED_PRECISION_REPORT={path}: {error.strerror}; no report written"
            )


def _write_mine(
    path: str, content: dict[str, Any], session: Session, place: tuple[int, int]
) -> None:
    """Write what this process has to tell: all of the report, or its part of one of many ranks.

    A launcher that runs no model outlives the process that does: it must not write over that one's
    report.
    """
    if session.counts.regions and place[1] > 1 and merging.OF_EACH not in path:
        merging.add(path, place, content, session.started, write)
        return
    path = path.replace(merging.OF_EACH, str(place[0]))
    if session.counts.regions or not _written_since(path, session.started):
        write(path, content)


def summary(content: dict[str, Any]) -> str:
    """The exit line, from the report's content."""
    steps, scale = content["steps"], content["loss_scale"]
    line = (
        f"autoamp: {_count(content['regions'], 'region')}, {_count(steps['taken'], 'step')} taken"
    )
    if scale["mode"] != "off":
        line += f", {steps['skipped']} skipped, final loss scale {scale['final']:.10g}"
    if demoted := {demotion["module"] for demotion in content["demotions"]}:
        line += f", {_count(len(demoted), 'module')} demoted to float32"
    return line


def demotion_line(demotion: Mapping[str, Any]) -> str:
    """What a demotion of the report means, in one line."""
    name, below = demotion["module"], demotion["below"]
    if name:
        what = f"{name} with all below it" if below else f"{name} without the modules that it calls"
    else:
        what = "the whole model" if below else "the model without the modules that it calls"
    where = f" ({demotion['where']})" if demotion["where"] else ""
    return f"{what} ({demotion['type']}) runs in float32 from now on: {demotion['cause']}{where}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _written_since(path: str, started: float) -> bool:
    try:
        return os.stat(path).st_mtime >= started
    except OSError:
        return False
