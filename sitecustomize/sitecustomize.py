"""Starts autoamp if AUTO_MIXED_PRECISION asks for it, then runs the sitecustomize behind this one.

Every Python that inherits PYTHONPATH runs this file, of any version: old syntax, quiet, harmless.
"""
import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))


def start_autoamp():
    value = os.environ.get("AUTO_MIXED_PRECISION", "").strip().lower()
    if sys.version_info < (3, 10) or value in ("", "0", "false", "off", "no"):
        return
    checkout = os.path.dirname(HERE)
    package = os.path.join(checkout, "autoamp", "__init__.py")
    if os.path.isfile(package) and checkout not in sys.path:
        sys.path.append(checkout)
    try:
        from autoamp.bootstrap import start
        start("sitecustomize")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # anything else that leaves a sitecustomize disturbs the program
        inherited = getattr(error, "name", None) == "autoamp"  # by a Python that has no autoamp
        if not inherited and sys.stderr is not None:
            text = " ".join(("%s: %s" % (type(error).__name__, error)).split())
            sys.stderr.write("autoamp: off in this process: %s; "
                             "the program continues in float32\n" % text)


def run_the_next_sitecustomize():
    if sys.version_info < (3, 5):
        return
    from importlib.machinery import PathFinder
    path = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != HERE]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:  # a mere folder of that name has no loader
        from importlib.util import module_from_spec
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


start_autoamp()
run_the_next_sitecustomize()
