"""Stands in for autoamp.activation: writes down how it was called, then does what a test asks."""

import os
import sys

calls = []


def activate(*, door, policy):
    torch = sys.modules.get("torch")
    calls.append({"door": door, "policy": policy, "complete": hasattr(torch, "complete")})
    exec(os.environ.get("STUB_ACTIVATE", ""))
    return os.environ.get("STUB_DECLINES")


def deactivate():
    calls.append("deactivated")
