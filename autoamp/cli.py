"""The command `autoamp`.

It never imports torch: `--help` is instant, and `doctor` works where torch is broken.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__, bootstrap, doctor
from .policy import DEVICES
from .settings import DTYPES, SWITCH

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (None: the process's arguments) names; its exit code."""
    parser = argparse.ArgumentParser(
        prog="autoamp",
        description="Mixed precision for unmodified PyTorch scripts.",
        epilog=f"It needs no command: {SWITCH}=1 python train.py",
    )
    parser.add_argument("--version", action="version", version=f"autoamp {__version__}")
    parser.set_defaults(call=lambda arguments: _help(parser))
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for add in (_add_run, _add_compare, _add_doctor, _add_policy, _add_report):
        add(commands)
    if argv is None:
        _own_process()
    arguments = parser.parse_args(argv)
    code: int = arguments.call(arguments)
    return code


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return 2


def _own_process() -> None:
    """What only the command may do that has the process for itself.

    Ctrl-C, and a pipe that nobody reads any more, end it without a traceback. What the terminal has
    no characters for is escaped.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # our parent may ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.name != "nt":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _add_run(commands: Commands) -> None:
    parser = commands.add_parser(
        "run",
        help="run a command in mixed precision",
        usage="autoamp run [options] [--] (COMMAND | FILE.py | -m MODULE) [argument ...]",
        description=f"Run a command, and the processes it starts, with {SWITCH}=1.",
        allow_abbrev=False,
    )
    parser.add_argument("--policy", metavar="P", help="a shipped policy's name, or a YAML file")
    parser.add_argument("--dtype", choices=DTYPES, help="this type on every device")
    parser.add_argument("--report", metavar="R.json", help="write what happened to this file")
    parser.add_argument(
        "--dry",
        action="store_const",
        const="1",
        help="run in float32, and say at the end what mixed precision would do",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a Python module")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(call=lambda arguments: _run(parser, arguments))


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not words:
        parser.error("name what to run: autoamp run train.py")
    command = _command(words, arguments.is_module)
    environ = _environment(command, arguments)
    try:
        if not _is_reached(command[0], environ):
            _say(f"autoamp is not installed for {command[0]}; running in float32")
        return _become(command, environ)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        why = "not found" if missing else error.strerror
        _say(f"{command[0]}: {why}; give a program on PATH, a .py file or -m MODULE")
        return 127 if missing else 126  # as a shell has it


def _add_compare(commands: Commands) -> None:
    parser = commands.add_parser(
        "compare",
        help="run a command in float32 and in mixed precision, and say what came of it",
        usage="autoamp compare [options] [--] (COMMAND | FILE.py | -m MODULE) [argument ...]",
        description="Run a command in float32 and in mixed precision, alternating, and say how "
        "much faster it is and whether its losses agree. Exit code 3 if they do not.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--policy", metavar="A,B", default="", help="policies to compare; default: default"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="this type on every device")
    parser.add_argument(
        "--repeat", metavar="N", type=_positive, default=1, help="runs of each; default: 1"
    )
    parser.add_argument(
        "--steps-from", metavar="REGEX", help="which lines of output tell a step; (\\d+) its number"
    )
    parser.add_argument("-o", dest="output", metavar="OUT", help="write a page, or data (.json)")
    parser.add_argument(
        "-v", dest="verbose", action="store_true", help="show the output of the command"
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a Python module")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(call=lambda arguments: _compare(parser, arguments))


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of runs")
    return int(text)


def _compare(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    words = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not words:
        parser.error("name what to run: autoamp compare -- python train.py")
    from .reporting import comparecli

    command = _command(words, arguments.is_module)
    starts_itself = _is_this_python(command[0]) and doctor.has_start_file()
    return comparecli.run(
        arguments, command, [] if starts_itself else [str(doctor.shim_directory())]
    )


def _command(words: list[str], is_module: bool) -> list[str]:
    if is_module:
        return [sys.executable, "-m", *words]
    if words[0].endswith(".py") and shutil.which(words[0]) is None:
        return [sys.executable, *words]
    return words


def _environment(command: list[str], arguments: argparse.Namespace) -> dict[str, str]:
    """The environment for `command`; whoever has set AUTO_MIXED_PRECISION=0 keeps the last word."""
    environ = dict(os.environ)
    if bootstrap.switch(environ) == "off":
        _say(f"{SWITCH}={environ[SWITCH]} outranks this command; running in float32")
    elif bootstrap.switch(environ) is None:
        environ[SWITCH] = "1"
    for suffix in ("policy", "dtype", "report", "dry"):
        value = getattr(arguments, suffix)
        if value is not None:
            environ[f"{SWITCH}_{suffix.upper()}"] = value
    if not (_is_this_python(command[0]) and doctor.has_start_file()):
        # An empty entry would put the current directory on the path.
        path = filter(None, (str(doctor.shim_directory()), environ.get("PYTHONPATH")))
        environ["PYTHONPATH"] = os.pathsep.join(path)
    return environ


def _is_this_python(program: str) -> bool:
    """Whether `program` is the Python of this environment."""
    # Links are not followed: they lead out of a virtual environment.
    found = Path(os.path.abspath(shutil.which(program) or program))
    return found.parent == Path(sys.executable).parent and found.name.startswith("python")


def _is_reached(program: str, environ: dict[str, str]) -> bool:
    """Whether autoamp starts in `program`, if that is the Python of another environment.

    Our folder on its path does nothing there where there is no autoamp to import.
    """
    is_another = Path(program).name.startswith("python") and not _is_this_python(program)
    if not is_another or bootstrap.switch(environ) == "off":
        return True
    look = [program, "-c", "import sys; sys.exit('autoamp' not in sys.modules)"]
    return subprocess.run(look, env=environ, capture_output=True, check=False).returncode != 1  # noqa: S603


def _become(command: list[str], environ: dict[str, str]) -> int:
    if os.name != "nt":
        os.execvpe(command[0], command, environ)  # noqa: S606 - what the user asked for
    # An exec on Windows is a new process that the caller does not wait for.
    return subprocess.run(command, env=environ, check=False).returncode  # noqa: S603


def _say(text: str) -> None:
    print(f"autoamp run: {text}", file=sys.stderr, flush=True)


def _add_doctor(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what would happen here, and why",
        description="Say what autoamp would do here, and why; exit code 1 if something is broken.",
    )
    parser.add_argument(
        "script", nargs="?", metavar="SCRIPT", help=f"a script to check against {SWITCH}_ONLY"
    )
    parser.add_argument("--json", action="store_true", help="as data for a program")
    parser.set_defaults(call=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    findings = doctor.examine(arguments.script)
    if arguments.json:
        print(json.dumps(findings, indent=1))
    else:
        print("\n".join(doctor.lines(findings)))
    return 1 if findings["state"] == "broken" else 0


def _add_report(commands: Commands) -> None:
    parser = commands.add_parser(
        "report",
        help="say what a report tells, and make a page or a policy of it",
        description="Say what a report tells: modules that run in float32, and why.",
    )
    parser.add_argument(
        "report", nargs="?", metavar="R.json", help=f"what {SWITCH}_REPORT has written"
    )
    parser.add_argument("--html", metavar="OUT.html", help="write it as a page")
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of reports")
    parser.add_argument(
        "--policy",
        metavar="OUT.yaml",
        help="write a policy with which that run demotes nothing; read it before you use it",
    )
    parser.set_defaults(call=lambda arguments: _report(parser, arguments))


def _report(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if not arguments.schema and arguments.report is None:
        parser.error(f"name a report: what {SWITCH}_REPORT has written")
    try:
        from . import reportcli
    except ImportError as error:
        print(f"autoamp report: {bootstrap._explain(error)}", file=sys.stderr)
        return 1
    return reportcli.run(arguments)


def _add_policy(commands: Commands) -> None:
    parser = commands.add_parser(
        "policy",
        help="list, show, check and explain policies",
        description="List, show, check and explain policies: what runs in which precision.",
    )
    parser.set_defaults(call=lambda arguments: _help(parser))
    policies = parser.add_subparsers(metavar="COMMAND", title="commands", dest="subcommand")

    def add(name: str, does: str, more: str = "") -> argparse.ArgumentParser:
        description = f"{does[0].upper()}{does[1:]}.{more}"
        command = policies.add_parser(name, help=does, description=description)
        command.set_defaults(call=_policy)
        return command

    listing = add("list", "list the policies that come with autoamp")
    show = add(
        "show",
        "print a policy as one file",
        " With all that the files say which it extends, and where each rule stands. It loads to "
        "the same policy. Variables change nothing here; explain heeds them.",
    )
    show.add_argument("policy", metavar="NAME|FILE", help="a shipped policy's name, or a YAML file")
    validate = add("validate", "check policy files", " Exit code 1 if any is wrong.")
    validate.add_argument("files", nargs="+", metavar="FILE", help="a YAML file")
    explain = add(
        "explain",
        "say what a policy makes of each op",
        " As it would run here, under the variables that are set now. No such device is needed.",
    )
    _add_explain_arguments(explain)
    add("schema", "print the JSON Schema of policy files, for editors")
    for command in (listing, show, explain):
        command.add_argument("--json", action="store_true", help="as data for a program")


def _add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "policy", nargs="?", metavar="NAME|FILE", help="a policy; else what the variables say"
    )
    parser.add_argument("--device", choices=DEVICES, default="cuda", help="default: cuda")
    parser.add_argument("--dtype", choices=DTYPES, help="default: the policy's for the device")
    parser.add_argument(
        "--op", type=_op, action="append", metavar="OP", help="only this op; several may be given"
    )
    parser.add_argument("--all", action="store_true", help="also what is in no list")


def _op(spelling: str) -> str:
    from . import opnames

    if not opnames.resolve(spelling):
        raise argparse.ArgumentTypeError(opnames.complaint(spelling))
    return spelling


def _policy(arguments: argparse.Namespace) -> int:
    try:
        from . import policycli
    except ImportError as error:
        print(f"autoamp policy: {bootstrap._explain(error)}", file=sys.stderr)
        return 1
    return policycli.run(arguments)
