"""As much of torch as a door can tell from the real one: it may fail, and it calls entry points."""

import os

exec(os.environ.get("STUB_TORCH", ""))  # how a test makes this import fail

from torch import nn, optim  # noqa: E402, F401

if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
    from importlib.metadata import entry_points

    for entry_point in entry_points(group="torch.backends"):
        entry_point.load()()

complete = True
