"""The finder that waits for torch: it misses no import, and nobody can tell that it was there."""

import shutil
import zipfile
from pathlib import Path

import pytest
from environments import Environment, doors

WATCHER_ONLY = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # no second door behind the watcher


@pytest.fixture
def armed(installed) -> Environment:
    return installed.on(**WATCHER_ONLY)


@pytest.fixture
def with_wrapt(armed, tmp_path: Path) -> Environment:
    """Wrapt in its pure Python form, which every interpreter can load."""
    wrapt = pytest.importorskip("wrapt")
    shutil.copytree(
        Path(wrapt.__file__).parent, tmp_path / "wrapt", ignore=shutil.ignore_patterns("*.so")
    )
    return armed.on(PYTHONPATH=str(tmp_path))


def test_find_spec_before_import_does_not_use_up_the_watcher(armed):
    """Transformers asks whether torch is there before it imports it."""
    ask = "import importlib.util as u; assert u.find_spec('torch'); assert u.find_spec('torch')\n"
    asked = armed.report(ask)
    assert (asked.phase, asked.calls) == ("armed", [])
    assert asked.finders[0] == "WhenImported"
    assert doors(armed.report(ask + "import torch")) == [".pth"]


def test_a_failed_first_import_does_not_use_up_the_watcher(armed):
    script = (
        "import os, sys\n"
        "try: import torch\n"
        "except ImportError as error: print(error, 'torch' in sys.modules)\n"
        "os.environ['STUB_TORCH'] = ''\n"
        "import torch\n"
    )
    report = armed.report(script, STUB_TORCH="raise ImportError('libcudart.so.12')")
    assert report.printed == ["libcudart.so.12 False"]
    assert doors(report) == [".pth"]
    assert report.stderr == ""


@pytest.mark.parametrize(
    "statement",
    ["from torch import nn", "import torch.nn.functional as F", "from torch.optim import SGD"],
)
def test_any_form_of_the_first_import_activates_before_it_returns(armed, statement):
    script = f"{statement}; import sys; print(sys.modules['autoamp.activation'].calls)"
    report = armed.report(script)
    assert "'complete': True" in report.printed[0]
    assert len(report.calls) == 1


def test_lazy_loader_activates_at_the_first_touch(armed):
    script = (
        "import importlib.util as u, sys\n"
        "spec = u.find_spec('torch')\n"
        "spec.loader = u.LazyLoader(spec.loader)\n"
        "torch = sys.modules['torch'] = u.module_from_spec(spec)\n"
        "spec.loader.exec_module(torch)\n"
        "print('autoamp.activation' in sys.modules)\n"
        "torch.nn\n"
    )
    report = armed.report(script)
    assert report.printed == ["False"]
    assert doors(report) == [".pth"]
    assert "WhenImported" not in report.finders


@pytest.mark.parametrize("order", ["wrapt first", "autoamp first"])
def test_wrapt_post_import_hooks_run_once_in_either_order(with_wrapt, order):
    hook = "import wrapt; wrapt.register_post_import_hook(lambda module: print('hook'), 'torch')\n"
    ours = (
        "import sys; finder = next(f for f in sys.meta_path if hasattr(f, 'executing'))\n"
        "sys.meta_path.remove(finder); sys.meta_path.insert(0, finder)\n"
    )
    report = with_wrapt.report((hook + ours if order == "wrapt first" else hook) + "import torch")
    assert report.printed == ["hook"]
    assert doors(report) == [".pth"]


FOREIGN_FINDERS = {
    "names it sees": """
class Foreign:
    def find_spec(self, name, path=None, target=None):
        if name == "torch": print("foreign", name)
""",
    "wraps every loader": """
import importlib.util
class Loader:
    def __init__(self, loader): self.loader = loader
    def create_module(self, spec): return self.loader.create_module(spec)
    def exec_module(self, module):
        self.loader.exec_module(module)
        if module.__name__ == "torch": print("foreign", module.__name__)
    def __getattr__(self, name): return getattr(self.loader, name)
class Foreign:
    busy = False
    def find_spec(self, name, path=None, target=None):
        if self.busy: return None
        self.busy = True
        try: spec = importlib.util.find_spec(name)
        finally: self.busy = False
        if spec and spec.loader: spec.loader = Loader(spec.loader)
        return spec
""",
    "has no find_spec": """
class Foreign:
    def find_module(self, name, path=None): return None
print("foreign torch")
""",
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("kind", FOREIGN_FINDERS)
def test_a_foreign_finder_keeps_working_before_and_after_ours(armed, kind, place):
    install = f"import sys; sys.meta_path.insert({place}, Foreign())\n"
    report = armed.report(FOREIGN_FINDERS[kind] + install + "import torch", "-W", "ignore")
    assert report.printed == ["foreign torch"]
    assert doors(report) == [".pth"]
    assert "WhenImported" not in report.finders


def test_a_finder_in_front_that_finds_torch_itself_leaves_it_to_the_entry_point(installed):
    script = (
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "sys.meta_path.insert(0, PathFinder)\n"
        "import torch\n"
    )
    report = installed.on().report(script)
    assert doors(report) == [".pth"]
    assert report.calls[0]["complete"] is False
    assert "WhenImported" not in report.finders


def test_nothing_is_left_on_the_loader_of_torch(armed):
    script = (
        "import torch\n"
        "loader = torch.__loader__\n"
        "print(type(loader).__name__, torch.__spec__.loader is loader, sorted(vars(loader)))\n"
    )
    plain = armed.report("import sys;" + script, AUTO_MIXED_PRECISION="0")
    report = armed.report("import sys;" + script)
    assert report.printed == plain.printed == ["SourceFileLoader True ['name', 'path']"]
    assert report.finders == plain.finders


def test_the_loader_is_itself_again_while_torch_runs(armed):
    look = "print(sorted(vars(__loader__)))"
    assert armed.report("import torch", STUB_TORCH=look).printed == ["['name', 'path']"]


def test_two_threads_that_import_torch_activate_once(armed):
    script = (
        "import threading\n"
        "gate = threading.Barrier(8)\n"
        "def work():\n"
        "    gate.wait()\n"
        "    import torch\n"
        "    assert torch.complete\n"
        "threads = [threading.Thread(target=work) for _ in range(8)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
    )
    assert doors(armed.report(script)) == [".pth"]


def test_torch_in_an_archive_is_seen_although_its_loader_serves_all_modules(armed, tmp_path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for file in (armed.site / "torch").rglob("*.py"):
            archive.write(file, file.relative_to(armed.site))
        archive.writestr("other.py", "print('other')")
    find = "import importlib.util; spec = importlib.util.find_spec('torch')\n"
    script = find + "import other, torch, sys; print(type(torch.__loader__).__name__)"
    report = armed.report(script, PYTHONPATH=str(tmp_path / "all.zip"))
    assert report.printed == ["other", "zipimporter"]
    assert report.calls == [{"door": ".pth", "policy": None, "complete": True}]


WATCH = """
import sys
from autoamp.bootstrap import WhenImported
seen = []
watcher = WhenImported("torch", lambda: seen.append("before"), seen.append)
watcher.install(); watcher.install()
"""


def test_before_and_after_surround_the_code_of_the_module(installed):
    report = installed.report(WATCH + "import torch; print(seen, watcher in sys.meta_path)")
    assert report.printed == ["['before', True] False"]


def test_after_runs_when_the_module_fails_and_the_next_attempt_is_seen_too(installed):
    script = WATCH + (
        "import os\n"
        "try: import torch\n"
        "except OSError as error: print(error)\n"
        "os.environ['STUB_TORCH'] = ''\n"
        "import torch; print(seen)\n"
    )
    report = installed.report(script, STUB_TORCH="raise OSError('broken')")
    assert report.printed == ["broken", "['before', False, 'before', True]"]


def test_several_watchers_of_one_module_all_see_it_once(installed):
    script = (
        WATCH + "other = WhenImported('torch', after=lambda done: seen.append('other'))\n"
        "other.install()\n"
        "import importlib.util; importlib.util.find_spec('torch')\n"
        "import torch; print(seen, vars(torch.__loader__).keys() - {'name', 'path'})\n"
    )
    report = installed.on(**WATCHER_ONLY).report(script)
    assert report.printed == ["['before', True, 'other'] set()"]
    assert doors(report) == [".pth"]


def test_a_removed_watcher_sees_nothing_even_if_the_module_was_found_before(installed):
    script = WATCH + (
        "import importlib.util\n"
        "spec = importlib.util.find_spec('torch')\n"
        "watcher.remove(); watcher.remove()\n"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec)); print(seen)\n"
    )
    assert installed.report(script).printed == ["[]"]


def test_a_builtin_module_can_be_watched_and_its_importer_is_as_before(installed):
    """Its loader is a class that serves every builtin module."""
    script = (
        "from importlib.machinery import BuiltinImporter\n"
        "own = vars(BuiltinImporter)['exec_module']\n"
        "from autoamp.bootstrap import WhenImported\n"
        "import sys; name = next(n for n in sys.builtin_module_names if n not in sys.modules)\n"
        "WhenImported(name, after=print).install()\n"
        "__import__(name); print(vars(BuiltinImporter)['exec_module'] is own)\n"
    )
    assert installed.report(script).printed == ["True", "True"]
