"""The loss scale in the script's own checkpoints: with the optimizer's state, under one key."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .patching import Entry, named_like
from .session import Session

STATE_KEY = "autoamp"
"""The one key that autoamp adds to ``optimizer.state_dict()``; plain PyTorch ignores it."""


def state_dict(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`Optimizer.state_dict`: the loss scale rides along under one key, as plain numbers."""

    def state_dict(self: torch.optim.Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = original(self)
        session.fusing.plain_state(self, state)
        if session.active and (session.scales or session.loss_scale.was_loaded):
            state[STATE_KEY] = session.loss_scale.state()
            _prepare_distributed_checkpoints(session)
        return state

    return state_dict


def load_state_dict(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`Optimizer.load_state_dict`: and comes back."""

    def load_state_dict(self: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        if STATE_KEY in state_dict:
            state_dict = dict(state_dict)
            saved = state_dict.pop(STATE_KEY)
            if session.active and isinstance(saved, Mapping):
                session.loss_scale.load(saved)
        original(self, state_dict)

    return load_state_dict


def _prepare_distributed_checkpoints(session: Session) -> None:
    """Let `torch.distributed.checkpoint` fill our key only from checkpoints that have it.

    It demands every key of the dict that it fills. It takes a second to import, so it is left to
    the script, and looked for when there is something to fill.
    """
    planner = sys.modules.get("torch.distributed.checkpoint.default_planner")
    name = "create_default_local_load_plan"
    plan = getattr(planner, name, None)
    if planner is None or plan is None or hasattr(plan, "__autoamp_plan__"):
        return

    def create_default_local_load_plan(
        state_dict: Mapping[str, Any], metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        there = metadata.state_dict_metadata
        asked = {
            key: value
            for key, value in state_dict.items()
            if key in there or STATE_KEY not in key.split(".")[-2:]
        }
        return plan(asked, metadata, *args, **kwargs)

    replacement = named_like(create_default_local_load_plan, plan, planner, name)
    vars(replacement)["__autoamp_plan__"] = plan
    target = f"{planner.__name__}:{name}"
    session.ledger.replace(planner, name, replacement, target)
    session.ledger.entries.append(Entry(target, "applied", "checkpoints without our key load"))
