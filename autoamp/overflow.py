"""Which optimizer owns gradients that are not finite, and with what loss scale they were made."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary, ref

import torch

from .ranks import Group, agreed, anywhere, flat_groups, groups_of, local_values
from .scaling import any_of, check, unscale_
from .session import Backward


class _Known(threading.local):
    """The leaves of one thread's backwards: another thread's gradients change while one looks."""

    def __init__(self) -> None:
        self.leaves: dict[int, ref[torch.Tensor]] = {}


class Spoilt:
    """Leaves whose gradients came out of a backward not finite, until those are cleared.

    A script may clip them to something finite, or step again without a backward: they are none to
    step with all the same. On a device that the host would have to wait for, only the last backward
    is remembered, and all of its leaves count.
    """

    def __init__(self) -> None:
        self._known = _Known()
        self._last: tuple[torch.Tensor, set[int]] | None = None

    def note(self, leaves: list[torch.Tensor], flag: torch.Tensor) -> None:
        """A backward has ended that left a flag."""
        if not host_knows(flag):
            self._last = flag, set(map(id, leaves))
        elif flag.item():
            for leaf in leaves:
                flags = check(local_values([leaf.grad])) if leaf.grad is not None else []
                if flags and any_of(flags).item():
                    self._known.leaves[id(leaf)] = ref(leaf)

    def forget_cleared(self) -> None:
        """Before another backward adds to gradients, and before a step."""
        for key, reference in list(self._known.leaves.items()):
            leaf = reference()
            if leaf is None or leaf.grad is None or _is_zero(leaf.grad):
                del self._known.leaves[key]

    def owned_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the host knows of a gradient of the optimizer that is spoilt still."""
        if not self._known.leaves:
            return False
        self.forget_cleared()
        return any(id(p) in self._known.leaves for p in parameters(optimizer))

    def flag_for(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | bool:
        """As `owned_by` and `was_last_for`, as far as that can be said without waiting."""
        having = [id(p) for p in parameters(optimizer) if p.grad is not None]
        if self._last is not None and not self._last[1].isdisjoint(having):
            return self._last[0]
        return any(key in self._known.leaves for key in having)

    def was_last_for(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the last backward spoilt gradients that the optimizer has still. Waits."""
        if self._last is None or not self._last[0].item():
            return False
        grads = [p.grad for p in parameters(optimizer) if id(p) in self._last[1]]
        return any(grad is not None and not _is_zero(grad) for grad in grads)


def host_knows(tensor: torch.Tensor) -> bool:
    """Whether its values can be read without waiting for a device."""
    return tensor.device.type == "cpu"


def _is_zero(grad: torch.Tensor) -> bool:
    (grad,) = local_values([grad])
    return grad.layout is torch.strided and not grad.any().item()


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All that an optimizer may move."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def shared_by(optimizer: torch.optim.Optimizer) -> list[Group]:
    """The groups of ranks that hold its parameters together, each a part."""
    owned = parameters(optimizer)
    known = _flat.get(optimizer)
    if known is None or known[0] != len(owned):
        known = _flat[optimizer] = len(owned), flat_groups(owned)
    return [*groups_of(owned), *known[1]]


_flat: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, list[Group]]] = WeakKeyDictionary()
"""By optimizer: how many parameters it had, and which groups share flat ones."""


def in_gradients(
    optimizer: torch.optim.Optimizer, spoilt: torch.Tensor | bool = False
) -> torch.Tensor:
    """One flag for all gradients of the optimizer as they are now, on all ranks that share it.

    Nothing is changed: the kernel that unscales checks too, in one pass; by a factor of one. What
    is `spoilt` counts as well.
    """
    # `.data` has its own version counter: multiplying by one is no edit in autograd's eyes.
    grads = local_values([p.grad.data for p in parameters(optimizer) if p.grad is not None])
    with torch.no_grad():
        flags = unscale_(grads, torch.ones((), device=grads[0].device)) if grads else []
    flag = any_of(flags) if flags else torch.zeros(())
    return agreed(flag + spoilt, shared_by(optimizer))


def concerns(
    optimizer: torch.optim.Optimizer,
    backwards: list[Backward],
    spoilt: Spoilt,
    is_spoilt: bool = False,
    is_exchanged: bool = False,
) -> bool:
    """Whether some of `backwards` left the optimizer gradients that are not finite.

    Or whether it `is_spoilt` anyway, or has some from another rank if gradients may have been
    exchanged since (`is_exchanged`). One synchronisation, or two: a backward that overflowed need
    not concern this optimizer (another one's loss, gradients zeroed since). Ranks that share an
    optimizer give one answer: each of them asks the others as often.
    """
    groups = shared_by(optimizer)
    if is_spoilt and not groups:
        return True
    flags = [found_inf for _, found_inf in backwards]
    may_be = is_spoilt or is_exchanged
    if not anywhere(may_be or (bool(flags) and bool(any_of(flags).item())), groups):
        return False
    is_found = bool(in_gradients(optimizer).item())
    return anywhere(is_found or is_spoilt or spoilt.was_last_for(optimizer), groups)


def scale_of(backwards: list[Backward]) -> torch.Tensor:
    """The scale of the last backward that overflowed, as the object that it ran with.

    Of the last one: an optimizer that steps for the first time is shown all that ever overflowed.
    """
    scales = (scale for scale, found_inf in reversed(backwards) if found_inf.item())
    return next(scales, backwards[-1][0])
