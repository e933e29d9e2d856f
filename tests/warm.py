"""Plays scripts, each in a child of this process, which has torch: starting takes longer than most.

Stdin asks, one JSON object a line; stdout answers with the child's exit code. Autoamp starts in the
child, with the child's variables, as it does at the end of `import torch`.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import traceback
import types
import warnings
from pathlib import Path

import sklearn.datasets  # noqa: F401 - most of what is trained loads it
import torch._dynamo  # every optimizer loads it


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if not child:
            play(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def play(script: str, arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    """Run the script as if Python had just started and torch had been imported, and leave."""
    code: object = 1
    try:
        os.chdir(folder)
        for name, stream in ((".stdout", sys.stdout), (".stderr", sys.stderr)):
            written = os.open(name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(written, stream.fileno())
        os.environ.clear()
        os.environ.update(environment)
        for action in filter(None, environment.get("PYTHONWARNINGS", "").split(",")):
            warnings.simplefilter(action)
        sys.path[0] = str(Path(script).parent)
        sys.argv = [script, *arguments]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        module.__file__ = script
        from autoamp import bootstrap

        bootstrap.start("sitecustomize")
        exec(compile(Path(script).read_text(), script, "exec"), vars(module))
        code = 0
    except SystemExit as left:
        code = left.code
    except BaseException:
        traceback.print_exc()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))  # what torch keeps, stays


if __name__ == "__main__":
    main()
