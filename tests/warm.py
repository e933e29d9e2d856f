"""Plays scripts, each in a child of this process, which has torch: starting takes longer than most.

    warm.py STDOUT STDERR    files that get what the child says

Stdin asks, one JSON object a line; stdout answers with the child's exit code. Autoamp starts in the
child, with the child's variables, as it does at the end of `import torch`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import threading
import traceback
import types
import warnings
from pathlib import Path

import sklearn.datasets  # noqa: F401 - much of what is trained loads it
import torch._dynamo  # noqa: F401 - every optimizer loads it


def main(*said: str) -> None:
    gc.freeze()  # children that look through all objects look for what scripts make
    for line in sys.stdin:
        child = os.fork()
        if not child:
            play(list(said), **json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def play(said: list[str], command: list[str], cwd: str, env: dict[str, str]) -> None:
    """Run the script as if Python had just started and torch had been imported, and leave."""
    code: object = 1
    try:
        os.chdir(cwd)
        for name, stream in zip(said, (sys.stdout, sys.stderr), strict=True):
            written = os.open(name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(written, stream.fileno())
        os.environ.clear()
        os.environ.update(env)
        for action in filter(None, env.get("PYTHONWARNINGS", "").split(",")):
            warnings.simplefilter(action)
        script = Path(command[0])
        sys.path[0], sys.argv = str(script.parent), command
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        module.__file__ = str(script)
        from autoamp import bootstrap

        bootstrap.start("sitecustomize")
        exec(compile(script.read_text(), script, "exec", dont_inherit=True), vars(module))
        code = 0
    except SystemExit as left:
        code = left.code
    except BaseException:  # noqa: BLE001 - whatever ends it, this says so
        traceback.print_exc()
    threading._shutdown()  # pools are told to end, and waited for
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))  # what torch keeps, stays


if __name__ == "__main__":
    main(*sys.argv[1:])
