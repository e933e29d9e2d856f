"""Which optimizer owns gradients that are not finite, and with what loss scale they were made."""

from __future__ import annotations

import torch

from .scaling import any_of, unscale_
from .session import Backward


def in_gradients(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """One flag for all gradients of the optimizer as they are now; nothing is changed.

    The kernel that unscales checks too, in one pass; by a factor of one.
    """
    # `.data` has its own version counter: multiplying by one is no edit in autograd's eyes.
    grads = [
        p.grad.data
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    ]
    with torch.no_grad():
        flags = unscale_(grads, torch.ones((), device=grads[0].device)) if grads else []
    return any_of(flags) if flags else torch.zeros(())


def concerns(optimizer: torch.optim.Optimizer, backwards: list[Backward]) -> bool:
    """Whether some of `backwards` left the optimizer gradients that are not finite.

    One synchronisation, or two: a backward that overflowed need not concern this optimizer (another
    one's loss, gradients zeroed since).
    """
    if not any_of([found_inf for _, found_inf in backwards]).item():
        return False
    return bool(in_gradients(optimizer).item())


def scale_of(backwards: list[Backward]) -> torch.Tensor:
    """The scale of the last backward that overflowed, as the object that it ran with.

    Of the last one: an optimizer that steps for the first time is shown all that ever overflowed.
    """
    scales = (scale for scale, found_inf in reversed(backwards) if found_inf.item())
    return next(scales, backwards[-1][0])
