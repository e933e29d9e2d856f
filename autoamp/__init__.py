"""autoamp: mixed precision for unmodified PyTorch scripts, switched on by one variable.

`AUTO_MIXED_PRECISION=1 python train.py` needs none of the names below; they are for code that wants
to say more. Start files import this package in every Python process: it imports nothing by itself.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from autoamp.api import off, status
    from autoamp.bootstrap import disable, enable
    from autoamp.errors import AutoampError, PatchError, PolicyError, SettingsError

__version__ = "0.1.0"
__all__ = [
    "AutoampError",
    "PatchError",
    "PolicyError",
    "SettingsError",
    "__version__",
    "disable",
    "enable",
    "off",
    "status",
]

_HOMES = {
    "enable": "autoamp.bootstrap",
    "disable": "autoamp.bootstrap",
    "off": "autoamp.api",
    "status": "autoamp.api",
    "AutoampError": "autoamp.errors",
    "PatchError": "autoamp.errors",
    "PolicyError": "autoamp.errors",
    "SettingsError": "autoamp.errors",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'autoamp' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
