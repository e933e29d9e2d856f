"""Times the steps of a run for `autoamp compare`, with autoamp and without, in the same way.

It runs in front of every other sitecustomize of a process that `compare` has started, and nowhere
else. When the process ends it leaves what it has seen in the folder that a variable names.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HERE = os.path.dirname(os.path.realpath(__file__))
FOLDER = os.environ.get("AUTOAMP_OBSERVER_FOLDER", "")
SEED = int(os.environ.get("AUTOAMP_OBSERVER_SEED", "0"))
KEPT = 4000

steps = {"count": 0, "stride": 1}
times: list[list[float]] = []
pid = os.getpid()
finders: list[Any] = sys.meta_path


def step_ended(*arguments: Any) -> None:
    """An optimizer has stepped; of long runs ever fewer times are kept."""
    count = steps["count"] = steps["count"] + 1
    if count % steps["stride"] == 0:
        times.append([count, time.perf_counter()])
        if len(times) >= KEPT:
            del times[::2]
            steps["stride"] *= 2


def watch(torch: Any) -> None:
    """Scripts that seed nothing start alike; the times of steps are noted from here on."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    torch.manual_seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    register_optimizer_step_post_hook(step_ended)


def finish() -> None:
    """What this process has seen, if it had torch."""
    torch = sys.modules.get("torch")
    if torch is None or os.getpid() != pid:
        return
    devices: dict[str, int] = {}
    tf32: list[str] = []
    try:
        if torch.cuda.is_initialized():
            for index in range(torch.cuda.device_count()):
                peak = torch.cuda.max_memory_allocated(index)
                devices[f"cuda:{index}"] = peak
            if torch.cuda.get_device_capability()[0] >= 8:
                backends = torch.backends
                if backends.cuda.matmul.allow_tf32:
                    tf32.append("matrix products")
                if backends.cudnn.allow_tf32:
                    tf32.append("convolutions")
    except Exception:  # noqa: BLE001, S110 - a torch of another kind: what is known is told
        pass
    seen = {"count": steps["count"], "times": times, "devices": devices, "tf32": tf32}
    path = os.path.join(FOLDER, f"{pid}.json")
    with open(path + ".tmp", "w") as file:
        json.dump(seen, file)
    os.replace(path + ".tmp", path)


class WhenTorchIsThere:
    """Stands in front of the finders of modules until torch has been imported."""

    def __init__(self) -> None:
        self.is_busy = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find torch as the others do, and look at it as soon as it has run."""
        if name != "torch" or self.is_busy:
            return None
        self.is_busy = True
        try:
            from importlib.util import find_spec

            spec = find_spec(name)
        finally:
            self.is_busy = False
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            if self in finders:
                finders.remove(self)
                watch(module)

        loader.exec_module = exec_module
        return spec


def run_the_next_sitecustomize() -> None:
    """The one that this process would have run."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    # Off the path, or one that hands over as well would find this one again.
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != HERE]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


if FOLDER:
    import random

    random.seed(SEED)
    finders.insert(0, WhenTorchIsThere())
    atexit.register(finish)
run_the_next_sitecustomize()
