"""What would happen here, and why: looks at every door, then lets one child process try.

Only that child imports torch: a torch that is missing or crashes is a finding like any other.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import site
import subprocess
import sys
import traceback
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from . import __version__, bootstrap, settings
from .errors import AutoampError

SCHEMA = 1
"""Version of the findings' layout; it grows when a key changes its meaning or goes."""

TIMEOUT = 60.0
"""Seconds that the child may take; torch comes slowly from a cold network file system."""

PACKAGE = Path(__file__).resolve().parent
ANSWER = "autoamp doctor's child says: "  # marks the line: torch and sitecustomize may print too
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
TORCH_ALONE = 'if AUTO_MIXED_PRECISION=0 python -c "import torch" fails too, reinstall torch'
REINSTALL = "pip install --force-reinstall --no-deps autoamp"


def shim_directory() -> Path:
    """What to put on PYTHONPATH where no start file is installed: our folder `sitecustomize`.

    It is in the package when installed, beside it in a checkout.
    """
    places = (PACKAGE / "sitecustomize", PACKAGE.parent / "sitecustomize")
    return next((place for place in places if place.is_dir()), places[0])


def start_files() -> dict[Path, str]:
    """The start files of autoamp that exist; for each why Python does not run it, or ``""``."""
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    sites = [os.path.realpath(folder) for folder in [*site.getsitepackages(), *user]]
    found = {}
    for folder in dict.fromkeys([*sites, str(PACKAGE.parent)]):
        for name in ("autoamp.pth", "autoamp.start"):
            path = Path(folder, name)
            if not path.is_file():
                continue
            found[path] = ""
            if folder not in sites:
                found[path] = "not run: its folder is no site directory of this Python"
            elif path.suffix == ".start" and sys.version_info < (3, 15):
                found[path] = "for Python 3.15 and later"
            elif path.suffix == ".pth" and sys.version_info >= (3, 18):
                found[path] = "for Python 3.17 and earlier"
    return found


def has_start_file() -> bool:
    """Whether this Python starts autoamp by itself."""
    return "" in start_files().values()


def sitecustomizes() -> list[Path]:
    """Every sitecustomize on the path: Python imports the first, ours hands over to the next."""
    # What `site` saw: the script's folder comes to the front of the path after it has run.
    safe = sys.flags.isolated or getattr(sys.flags, "safe_path", False)
    specs = (PathFinder.find_spec("sitecustomize", [entry]) for entry in sys.path[not safe :])
    # A plain folder of that name has no origin, and nothing in it would run.
    files = (Path(spec.origin).resolve() for spec in specs if spec and spec.origin)
    return list(dict.fromkeys(files))


def examine(script: str | None = None) -> dict[str, Any]:
    """Everything found here, as plain data that ends in a verdict.

    `script` is the one whose name ``AUTO_MIXED_PRECISION_ONLY`` is to be asked about.
    """
    shim = shim_directory().resolve()
    findings: dict[str, Any] = {
        "schema": SCHEMA,
        "autoamp": {"version": __version__, "path": str(PACKAGE)},
        "python": {"version": sys.version.split()[0], "path": sys.executable},
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name == settings.SWITCH or name.startswith(settings.SWITCH + "_")
        },
        "settings_error": _settings_error(),
        "start_files": {str(path): why for path, why in start_files().items()},
        "sitecustomize": [
            {"path": str(path), "ours": path.parent == shim} for path in sitecustomizes()
        ],
        "entry_point": {
            "visible": _entry_point_is_visible(),
            "autoload": os.environ.get(AUTOLOAD, "1"),
        },
        "packages": {name: _version(name) for name in bootstrap.DEPENDENCIES.values()},
        "policy": _policy(),
        "script": script,
        "child": _ask_a_child(script),
    }
    findings["state"], findings["verdict"] = _verdict(findings)
    return findings


def _settings_error() -> str:
    from . import report

    try:
        asked = settings.read()
        if asked.report:
            report.check_path(asked.report)
    except AutoampError as error:
        return str(error)
    return ""


def _entry_point_is_visible() -> bool:
    found = importlib.metadata.entry_points(group="torch.backends")
    return any(entry.value == "autoamp.bootstrap:start_in_torch" for entry in found)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _policy() -> dict[str, str]:
    try:
        from . import policyfile

        policy = policyfile.load(settings.read().policy, settings.origin_of_policy())
    except (AutoampError, ImportError) as error:
        return {"name": "", "source": "", "error": str(error)}
    return {"name": policy.name, "source": policy.source, "error": ""}


def _ask_a_child(script: str | None) -> dict[str, Any]:
    """What a Python started here makes of `import torch`; autoamp is switched on for a trial."""
    environ = dict(os.environ)
    is_trial = bootstrap.switch() in (None, "off")
    if is_trial:
        environ[settings.SWITCH] = "1"
    # The child must live to tell, and must not overwrite the report of a training run.
    for suffix in ("STRICT", "REPORT", *(() if script else ("ONLY",))):
        environ.pop(f"{settings.SWITCH}_{suffix}", None)
    command = [sys.executable, "-c", "from autoamp.doctor import answer; answer()"]
    asked: dict[str, Any] = {"switch": environ[settings.SWITCH], "is_trial": is_trial}
    try:
        child = subprocess.run(  # noqa: S603 - this very Python, and code of ours
            [*command, *([script] if script else [])],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        stderr = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else ""
        return {**asked, "error": f"no answer within {TIMEOUT:g} seconds", "stderr": stderr}
    for line in reversed(child.stdout.splitlines()):
        if line.startswith(ANSWER):
            return {**asked, "error": "", "stderr": child.stderr, **json.loads(line[len(ANSWER) :])}
    return {**asked, "error": _end(child.returncode), "stderr": child.stderr}


def _end(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    return f"it was ended by {signal.Signals(-code).name}"


def answer() -> None:
    """In the child: import torch as a script does, and say on a line of its own what came of it."""
    sys.argv = sys.argv[1:] or sys.argv  # the script's name, for AUTO_MIXED_PRECISION_ONLY
    found: dict[str, Any] = {"torch": None, "torch_error": "", "devices": {}}
    try:
        import torch
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the finding
        traceback.print_exc()
        found["torch_error"] = bootstrap._explain(error)
    else:
        found["torch"] = str(torch.__version__)
        found["devices"] = _decisions()
    from .api import status

    found["status"] = status()
    sys.stdout.write(f"\n{ANSWER}{json.dumps(found)}\n")


def _decisions() -> dict[str, dict[str, str]]:
    """What each device here would run in."""
    import torch

    try:
        from . import devices, policyfile

        asked = settings.read()
        policy = policyfile.load(asked.policy).forced(asked.dtype, asked.loss_scale)
    except (AutoampError, ImportError):
        return {}  # said elsewhere
    here = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "xpu": torch.xpu.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    forced = asked.dtype is not None
    decisions = {
        name: devices.decide(torch.device(name), policy, forced) for name in here if here[name]
    }
    return {name: {"dtype": d.word, "why": d.why} for name, d in decisions.items()}


def _verdict(findings: dict[str, Any]) -> tuple[str, str]:
    """``active``, ``off`` or ``broken``, and why; of several troubles the one to cure first."""
    child = findings["child"]
    if child["error"]:
        return "broken", f"the child that imports torch: {child['error']} - {TORCH_ALONE}"
    if child["torch_error"] and findings["packages"]["torch"] is None:
        return "broken", child["torch_error"]
    if child["torch_error"]:
        return "broken", f"import torch fails: {child['torch_error']} - {TORCH_ALONE}"
    phase, reason = child["status"]["phase"], child["status"]["reason"]
    if findings["settings_error"]:
        return "broken", findings["settings_error"]
    if phase == "failed":
        return "broken", reason  # errors of autoamp's own say what to do
    if phase == "off":
        return "off", reason
    if phase != "active":
        return "broken", f"no door is open: {_closed_doors(findings)}"
    if not child["is_trial"]:
        return "active", _outcome(findings)
    switch = findings["variables"].get(settings.SWITCH, "").strip()
    if switch:
        return "off", f"{settings.SWITCH}={switch}; set to 1 it would become {_outcome(findings)}"
    said = f"the variable {settings.SWITCH} is not set"
    return "off", f"{said}; it would become {_outcome(findings)}"


def _outcome(findings: dict[str, Any]) -> str:
    child = findings["child"]
    devices = {name: decision["dtype"] for name, decision in child["devices"].items()}
    words = ", ".join(" ".join(item) for item in devices.items())
    outcome = f"active through {child['status']['door']}: {words}"
    only = findings["variables"].get(settings.SWITCH + "_ONLY")
    if only and not findings["script"]:
        outcome += f", in scripts that match {settings.SWITCH}_ONLY={only}"
    if set(devices.values()) == {"off"}:
        outcome += " - nothing here gains from it, and training stays in float32"
    return outcome


def _closed_doors(findings: dict[str, Any]) -> str:
    """Why each door stayed shut, and what opens one."""
    shims = [found["ours"] for found in findings["sitecustomize"]]
    why = []
    remedy = f"reinstall it ({REINSTALL}), or start scripts with autoamp run"
    if "" in findings["start_files"].values():
        why.append("the start file did not run")
    else:
        why.append("no start file in a site directory")
    if not any(shims):
        why.append("no sitecustomize of autoamp's on PYTHONPATH")
    elif not shims[0]:
        why.append(f"its sitecustomize is shadowed by {findings['sitecustomize'][0]['path']}")
        remedy = f"put {shim_directory()} first on PYTHONPATH, or reinstall autoamp ({REINSTALL})"
    else:
        why.append("its sitecustomize did not run")
    if not findings["entry_point"]["visible"]:
        why.append("the torch.backends entry point is not installed")
    elif findings["entry_point"]["autoload"] != "1":
        why.append(f"{AUTOLOAD}={findings['entry_point']['autoload']} shuts the entry point")
    else:
        why.append("this torch calls no entry points (2.5 and later do)")
    return f"{', '.join(why)} - {remedy}"


def lines(findings: dict[str, Any]) -> Iterator[str]:
    """The findings for a person, the verdict last."""
    for label, entries in _rows(findings):
        for position, entry in enumerate(entries):
            yield f"{'' if position else label:<15} {entry}"
    state, stderr = findings["state"], findings["child"]["stderr"].strip()
    if state == "broken" and stderr:
        yield "the child wrote to stderr:"
        yield from (f"    {line}" for line in stderr.splitlines()[-20:])
    yield f"verdict: {'' if state == 'active' else state + ': '}{findings['verdict']}"


def _rows(findings: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    autoamp, python, child = findings["autoamp"], findings["python"], findings["child"]
    yield "autoamp", [f"{autoamp['version']} ({autoamp['path']})"]
    yield "python", [f"{python['version']} ({python['path']})"]
    variables = [f"{name}={value}" for name, value in findings["variables"].items()]
    if settings.SWITCH not in findings["variables"]:
        variables.insert(0, f"{settings.SWITCH} is not set")
    if findings["settings_error"]:
        variables.append(f"error: {findings['settings_error']}")
    yield "variables", variables
    files = findings["start_files"].items()
    yield "start files", [f"{path}{why and f' ({why})'}" for path, why in files] or ["none"]
    yield "sitecustomize", list(_chain(findings["sitecustomize"])) or ["none"]
    entry_point = findings["entry_point"]
    visible = "installed" if entry_point["visible"] else "not installed"
    shut = f", but {AUTOLOAD}={entry_point['autoload']}" if entry_point["autoload"] != "1" else ""
    yield "entry point", [f"torch.backends: {visible}{shut}"]
    versions = dict(findings["packages"])
    versions["torch"] = child.get("torch") or versions["torch"]
    yield "packages", [", ".join(f"{k} {v or 'is not installed'}" for k, v in versions.items())]
    policy = findings["policy"]
    yield "policy", [policy["error"] or f"{policy['name']} ({policy['source']})"]
    devices = child.get("devices", {}).items()
    yield "devices", [f"{name} {d['dtype']} ({d['why']})" for name, d in devices] or ["not known"]
    trial = " for a trial" if child["is_trial"] else ""
    yield "import torch", [f"with {settings.SWITCH}={child['switch']}{trial}: {_what_came(child)}"]


def _chain(found: list[dict[str, Any]]) -> Iterator[str]:
    for position, each in enumerate(found):
        notes = ["autoamp's"] if each["ours"] else []
        if position == 0:
            notes.append("Python imports this one")
        elif found[position - 1]["ours"]:
            notes.append("autoamp's hands over to it")
        else:
            notes.append("shadowed, unless the one above hands over")
        yield f"{each['path']} ({', '.join(notes)})"


def _what_came(child: dict[str, Any]) -> str:
    if child["error"] or child["torch_error"]:
        return str(child["error"] or child["torch_error"])
    phase, door, reason = (child["status"][key] for key in ("phase", "door", "reason"))
    return f"{phase} through {door}" if phase == "active" else f"{phase} ({reason})"
