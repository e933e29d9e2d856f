"""Counts what happened and says it: the exit summary, and the report as JSON.

The page is made of the JSON by a process of its own: no plotting comes into that of a script.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import merging
from .errors import SettingsError
from .merging import OF_EACH
from .reporting.curves import thinned, thinned_steps
from .speech import speaks_for_the_job

if TYPE_CHECKING:
    from .session import Session

SCHEMA = 1
"""Version of the report's layout; it grows when a key changes its meaning or goes."""


def describe(session: Session, wait: bool = True) -> dict[str, Any]:
    """The report as plain data; reading the loss scale back may `wait` for the device once."""
    scale, watch = session.loss_scale, session.watch
    if wait:
        scale.read_back()
    dry = {} if session.dry is None else {"dry_run": session.dry.told()}
    return {
        "schema": SCHEMA,
        "autoamp": sys.modules["autoamp"].__version__,
        "torch": _torch_version(),
        "active": session.active,
        "reason": "",
        "door": session.door,
        "script": watch.script if watch is not None else "",
        "finished": False,
        "policy": {
            "name": session.policy.name,
            "source": session.policy.source,
            "text": watch.policy_text if watch is not None else "",
        },
        "devices": {name: {"dtype": d.word, "why": d.why} for name, d in session.decisions.items()},
        "regions": session.counts.regions,
        "loss_scale": _loss_scale(session),
        "steps": {"taken": session.counts.steps + scale.taken, "skipped": scale.skipped},
        "time": watch.times() if watch is not None else dict(_NO_TIME),
        "memory": _memory(),
        "audit": watch.audit.result if watch is not None and not dry else dict(_NO_AUDIT),
        "demotions": [asdict(demotion) for demotion in session.demotions],
        "stood_down": list(session.stand_down.told) if session.stand_down is not None else [],
        "patches": [
            {"target": e.target, "outcome": e.outcome, "why": e.why} for e in session.ledger.entries
        ],
        "replaced_since": session.ledger.replaced_since(),
        "kernels": [
            {"op": k.op, "device": k.device, "list": k.category, "why": k.why}
            for k in session.kernels.registered
        ],
        **dry,
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
        "script": "",
        "finished": True,
        "policy": {"name": None, "source": None, "text": ""},
        "devices": {},
        "regions": 0,
        "loss_scale": dict(_NO_LOSS_SCALE),
        "steps": {"taken": 0, "skipped": 0},
        "time": dict(_NO_TIME),
        "memory": _memory(),
        "audit": dict(_NO_AUDIT),
        "demotions": [],
        "stood_down": [],
        "patches": [],
        "replaced_since": [],
        "kernels": [],
    }


_NO_LOSS_SCALE: dict[str, Any] = {
    "mode": "off",
    "initial": None,
    "final": None,
    "history": [],
    "skips": [],
    "owner": None,
}
_NO_TIME: dict[str, Any] = {
    "started": None,
    "seconds": None,
    "steps_per_second": None,
    "curve": [],
}
_NO_AUDIT: dict[str, Any] = {
    "step": None,
    "missing": "no report was asked for",
    "ops": {"forward": {}, "backward": {}},
    "names": [],
    "casts": {},
    "modules": [],
}


def _loss_scale(session: Session) -> dict[str, Any]:
    if not session.scales:
        return {**_NO_LOSS_SCALE, "owner": session.scaler_owner or None}
    scale = session.loss_scale
    return {
        "mode": scale.rule.mode,
        "initial": scale.history[0][1],
        "final": scale.history[-1][1],
        "history": thinned(scale.history),
        "skips": thinned_steps(scale.skips),
        "owner": "autoamp",
    }


def _torch_version() -> str | None:
    version = getattr(sys.modules.get("torch"), "__version__", None)
    return None if version is None else str(version)


def _memory() -> dict[str, Any]:
    """The most that was in use at a time: bytes of the process, and by device those of torch."""
    devices = {}
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        devices = {
            f"cuda:{index}": cuda.max_memory_allocated(index)
            for index in range(cuda.device_count())
        }
    return {"process": _peak_of_process(), "devices": devices}


def _peak_of_process() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def data_path(path: str) -> str:
    """Where the JSON is that belongs to a report at `path`: itself, or beside the page."""
    return os.path.splitext(path)[0] + ".json"


def check_path(path: str) -> None:
    """Refuse a report path that cannot be written, while there is time to choose another.

    Raises:
        SettingsError: with what is wrong and what to do.
    """
    if Path(path).suffix not in (".json", ".html"):
        raise SettingsError(
            f"AUTO_MIXED_PRECISION_REPORT={path}: a report is JSON or a page; name a file like "
            "run.json or run.html."
        )
    for file in map(Path, dict.fromkeys((path, data_path(path)))):
        if problem := _obstacle(file):
            raise SettingsError(
                f"AUTO_MIXED_PRECISION_REPORT={path}: {problem}; name a file that can be written."
            )


def _obstacle(file: Path) -> str:
    if file.is_dir():
        return "it is a directory"
    if not file.parent.is_dir():
        return f"there is no directory {file.parent}"
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        return "it cannot be written"
    return stranger(file)


def stranger(file: Path) -> str:
    """What is wrong with overwriting a file: nothing, if it is a report, empty, or not there."""
    try:
        with open(file, encoding="utf-8", errors="replace") as opened:
            head = opened.read(400)
    except OSError:
        return ""
    is_report = head.startswith("{") and '"schema"' in head and '"autoamp"' in head
    if not head or is_report or PAGE_MARK in head:
        return ""
    return f"{file} exists and is no report, and is left as it is"


PAGE_MARK = '<meta name="generator" content="autoamp">'
"""By which a page is known as one of ours."""


def write(path: str, content: dict[str, Any]) -> None:
    """Write the report in one piece: a reader never sees half of it."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: str, text: str) -> None:
    """Write a file in one piece; two processes that write one leave what the last one wrote."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(
            temporary, 0o666 & ~mask
        )  # mkstemp makes private files; a report is an ordinary one
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def finish(session: Session) -> None:
    """The summary and the report, at exit or when autoamp is disabled."""
    place, speaks = session.place, speaks_for_the_job()
    is_part = session.counts.regions > 0 and place[1] > 1
    if not _is_ours(session) or not (speaks or is_part):
        return
    content = {**describe(session), "finished": True}
    if speaks and session.speech.has_spoken:
        for line in last_lines(content):
            session.speech.notice(line)
    path = session.settings.report
    if path and (problem := _save_mine(path, content, session)):
        session.speech.notice(f"autoamp: AUTO_MIXED_PRECISION_REPORT={path}: {problem}")


def _save_mine(path: str, content: dict[str, Any], session: Session) -> str:
    """Write what this process has to tell: all of the report, or its part of one of many ranks.

    A launcher that runs no model outlives the process that does: it must not write over that one's
    report. Returns what is wrong, empty if nothing is.
    """
    (rank, world), has_run = session.place, session.counts.regions > 0
    if not has_run or world == 1 or OF_EACH in path:
        path = path.replace(OF_EACH, str(rank))
        is_known = not has_run and _written_since(data_path(path), session.started)
        return "" if is_known else save(path, content)
    data = data_path(path)
    if problem := stranger(Path(data)):
        return problem
    try:
        is_whole = merging.add(data, session.place, content, session.started, write)
    except OSError as error:
        return f"{error.strerror}; no report written"
    return _page_beside(data, path) if is_whole or rank == 0 else ""


def write_unfinished(session: Session, wait: bool) -> None:
    """The JSON report as if the run ended here; whether it can be written is said at the end.

    `wait`: the device may be waited for.
    """
    data = data_path(session.settings.report or "").replace(OF_EACH, str(session.place[0]))
    if data and _is_ours(session) and speaks_for_the_job() and not stranger(Path(data)):
        try:
            write(data, describe(session, wait))
        except OSError:
            pass


def _is_ours(session: Session) -> bool:
    """Whether this process, and not one that it was forked from, ran what happened here."""
    is_child = multiprocessing.parent_process() is not None
    return os.getpid() == session.pid and (session.counts.regions > 0 or not is_child)


def save(path: str, content: dict[str, Any]) -> str:
    """Write a report, and the page if `path` names one; what is wrong, empty if nothing is."""
    data = data_path(path)
    if problem := stranger(Path(data)):
        return problem
    try:
        write(data, content)
    except OSError as error:
        return f"{error.strerror}; no report written"
    return _page_beside(data, path)


def _page_beside(data: str, path: str) -> str:
    """The page of a report, if `path` is not the report itself; what is wrong, or empty."""
    problem = _make_page(data, path) if data != path else ""
    return f"{problem}; the report is in {data}" if problem else ""


def _make_page(data: str, page: str) -> str:
    """Have a process of its own make the page; what is wrong, empty if nothing is."""
    # Ours comes last on the path, in front of nothing; the script's directory does not come at all.
    command = (
        f"import sys; sys.path[:] = [*filter(None, sys.path), {str(Path(__file__).parents[1])!r}]; "
        "from autoamp.cli import main; raise SystemExit(main())"
    )
    try:
        child = subprocess.run(  # noqa: S603 - this very Python, and code of ours
            [sys.executable, "-c", command, "report", data, "--html", page],
            env={**os.environ, "AUTO_MIXED_PRECISION": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=120,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return f"no page made ({type(error).__name__}: {error})"
    if child.returncode == 0:
        return ""
    last = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
    return f"no page made: {last.removeprefix('autoamp report: ')}"


def last_lines(content: dict[str, Any]) -> list[str]:
    """What is said at exit, from the report's content."""
    return _of_a_dry_run(content) if "dry_run" in content else [summary(content)]


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
    if stood_down := content["stood_down"]:
        line += f", {_count(len(stood_down), 'model')} left in float32"
    return line


def _of_a_dry_run(content: dict[str, Any]) -> list[str]:
    dry = content["dry_run"]
    looked = f"{_count(dry['calls'], 'first call')} of models looked at"
    lines = [f"dry run: the script ran in float32; {looked}"]
    for op in dry["ops"]:
        listed = f"list {op['list']}" if op["list"] else "no list"
        where = f"({listed}) in {_some(op['modules'])}"
        lines.append(
            f"would run in {op['dtype']} on {op['device']}: {op['op']} x{op['count']:,} {where}"
        )
    lines += [demotion_line(d, "would run in float32") for d in content["demotions"]]
    aside: dict[str, list[str]] = {}
    for device, decision in content["devices"].items():
        if decision["dtype"] == "off":
            aside.setdefault(decision["why"], []).append(device)
    lines += [f"would stand aside on {', '.join(on)}: {why}" for why, on in aside.items()]
    lines += [f"not looked at: {what}" for what in dry["not_looked_at"]]
    return [f"autoamp: {line}" for line in lines]


def _some(names: list[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more:,} more" if more > 0 else "")


NAMED = 6
"""Modules that a line names; the report has all."""


def demotion_line(demotion: Mapping[str, Any], becomes: str = "runs in float32 from now on") -> str:
    """What a demotion of the report means, in one line."""
    name, below = demotion["module"], demotion["below"]
    if name:
        what = f"{name} with all below it" if below else f"{name} without the modules that it calls"
    else:
        what = "the whole model" if below else "the model without the modules that it calls"
    where = f" ({demotion['where']})" if demotion["where"] else ""
    return f"{what} ({demotion['type']}) {becomes}: {demotion['cause']}{where}"


def standing_line(told: Mapping[str, Any]) -> str:
    """Why a model stays float32, in one line."""
    return (
        f"{told['type']} stays float32: lower precision would add about {told['spent_us']:.3g} us "
        f"to a call, and save {told['saved_us']:.3g}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _written_since(path: str, started: float) -> bool:
    try:
        return os.stat(path).st_mtime >= started
    except OSError:
        return False
