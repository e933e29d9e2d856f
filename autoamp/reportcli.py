"""The command `autoamp report`: what a report tells on stdout, what is wrong on stderr."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from . import learned, report
from .spelling import one_line

EXTRA = "pip install 'autoamp[report]'"
SCHEMA = Path(__file__).parent / "reporting" / "schema.json"


def run(arguments: argparse.Namespace) -> int:
    """Tell what the report says, or make a page or a policy of it; the exit code."""
    try:
        if arguments.schema:
            sys.stdout.write(SCHEMA.read_text(encoding="utf-8"))
            return 0
        content = _read(arguments.report)
        if arguments.policy is None and arguments.html is None:
            print("\n".join(lines(content)))
        if arguments.html is not None:
            _make_page(content, arguments.html)
        if arguments.policy is not None:
            _make_policy(content, arguments)
    except FileExistsError:
        _complain(f"{arguments.policy} exists; name a file that does not, or delete it")
    except OSError as error:
        _complain(f"{error.filename}: {error.strerror}")
    except ImportError as error:
        _complain(f"{error.name} is not installed ({EXTRA})")
    except ValueError as error:
        _complain(str(error))
    else:
        return 0
    return 1


def _make_policy(content: dict[str, Any], arguments: argparse.Namespace) -> None:
    text = learned.policy(content, arguments.report)
    with open(arguments.policy, "x", encoding="utf-8") as file:
        file.write(text)
    print(f"read it, then use it: AUTO_MIXED_PRECISION_POLICY={arguments.policy}")


def _make_page(content: dict[str, Any], path: str) -> None:
    """Write the page.

    Raises:
        ImportError: what makes pages is not installed.
        ValueError: the report lacks something, or the path names something else.
    """
    import jinja2

    from .reporting import page

    if problem := report.stranger(Path(path)):
        raise ValueError(problem)
    try:
        text = page.html(content)
    except (LookupError, TypeError, jinja2.TemplateError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"this is no complete report ({what}); make a new one") from None
    report.write_text(path, text)


def lines(content: dict[str, Any]) -> list[str]:
    """What a report tells, as lines."""
    if not content["active"]:
        return [f"autoamp was not active: {one_line(content['reason'])}"]
    devices = content["devices"].items()
    return [
        *["written before the end: the run was killed or still runs"][content["finished"] :],
        f'policy "{one_line(content["policy"]["name"])}"',
        *(f"{name}: {found['dtype']}" for name, found in devices),
        *map(one_line, report.last_lines(content)),
        *(one_line(report.standing_line(told)) for told in content["stood_down"]),
        *(
            one_line(report.demotion_line(demotion))
            for demotion in ([] if "dry_run" in content else content["demotions"])
        ),
    ]


def _read(path: str) -> dict[str, Any]:
    """The report in a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no report, or one of another version.
    """
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: this is no JSON ({error}); name a report") from None
    if not isinstance(content, dict) or content.get("schema") != report.SCHEMA:
        raise ValueError(f"{path}: this is no report of version {report.SCHEMA}; make a new one")
    return content


def _complain(line: str) -> None:
    print(f"autoamp report: {one_line(line)}", file=sys.stderr)
