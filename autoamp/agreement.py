"""What ranks that train one model agree on before any of them acts: the loss scale, which modules
run in float32, and whether gradients may travel in half.

They talk only where torch makes all of them talk anyway: before a backward that reduces the
gradients of a data-parallel model, and at the step of an optimizer whose parameters are shards.
Processes that merely share a process group never wait for each other.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from .ranks import (
    Group,
    agreed,
    all_take_part,
    collected,
    flat_groups,
    has_ranks,
    instances,
    is_shard,
)
from .session import Session
from .stepping import dynamo_is_off
from .unskippable import Limit

if TYPE_CHECKING:
    from .fallback import Demotion

FIRST = 16
"""In so many first backwards of a model, or steps of an optimizer, the ranks agree in each one:
checkpoints have been loaded just before, and models are looked at when they are first called."""
EVERY = 64
"""Later once in so many: it costs a small all-reduce, for which the host waits."""
PATIENCE = 60.0
"""Seconds in which the other ranks may come to their first backward."""
_TYPES = {None: 0.0, torch.float16: 1.0, torch.bfloat16: 2.0}
"""Types as numbers, to be compared across ranks."""


class _Replica(NamedTuple):
    """A data-parallel model of this process, and the ids of its parameters, which it keeps."""

    model: weakref.ref[Any]
    parameters: frozenset[int]


class Agreement:
    """What this rank has to say when all are asked, and what they have decided."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._replicas: dict[int, _Replica] = {}  # by the id of the reducer
        self._prepared: set[int] = set()
        self._asked: set[str] = set()
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._wishes: dict[int, Demotion] = {}
        self._granted: list[Demotion] = []
        self.has_one_type = True
        """Whether all ranks compute in the same lower precision, as far as they have said."""
        self.limit = Limit(session.policy.loss_scale)
        """Of backwards that only this rank knows of: the loss scale is not theirs to move."""

    # Which models are shared

    def prepare(self, reducer: Any) -> None:
        """Note that a forward has ended whose backward will reduce gradients."""
        if has_ranks():
            known = self._replicas.get(id(reducer))
            model = known.model() if known is not None else None
            if model is None or model.reducer is not reducer:
                self._find_replicas()
            self._prepared.add(id(reducer))

    def _find_replicas(self) -> None:
        """Also those that are older than this session, or copies."""
        self._replicas = {
            id(model.reducer): _Replica(weakref.ref(model), frozenset(map(id, model.parameters())))
            for model in instances(DistributedDataParallel)
            if "reducer" in vars(model)
        }

    def is_apart(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether other ranks share a model with this one, but none of these parameters."""
        if not self._replicas or not tensors or not has_ranks():
            return False
        known = [r.parameters for r in self._replicas.values() if r.model() is not None]
        return bool(known) and not any(id(tensor) in ids for tensor in tensors for ids in known)

    def note(self, found_inf: torch.Tensor | bool, ran_with: torch.Tensor) -> None:
        """The step of an optimizer that is apart has ended. Waits for the device."""
        backoff = self._session.loss_scale.rule.backoff
        self.limit.note(float(ran_with) * backoff if found_inf else None)

    def shares(self, module: torch.nn.Module) -> bool:
        """Whether other ranks run this module too, and meet this one when they learn from it."""
        if not has_ranks():
            return False
        parameters = list(module.parameters())
        if any(map(is_shard, parameters)) or flat_groups(parameters):
            return self._session.may_scale
        if not self._replicas or self.is_apart(parameters):
            self._find_replicas()
        return bool(self._replicas) and not self.is_apart(parameters)

    # When they talk

    def is_awaited(self) -> bool:
        """Whether a backward is to come that reduces gradients."""
        return bool(self._prepared)

    def before_backward(self, leaves: Iterable[torch.Tensor]) -> None:
        """Agree, if this backward reduces gradients and it is time to."""
        reached = set(map(id, leaves))
        groups: dict[str, Group] = {}
        for key in list(self._prepared):
            replica = self._replicas.get(key)
            model = replica.model() if replica is not None else None
            if replica is None or model is None or not reached.isdisjoint(replica.parameters):
                self._prepared.discard(key)
                # Ranks that have joined early take part in what the reducer does, and no more.
                if model is not None and not model._join_config.enable and self._is_time(model):
                    group = Group(model.process_group, next(model.parameters()).device.type)
                    groups[model.process_group.group_name] = group
        for name in sorted(groups):
            self.agree_if_all_can(groups[name])

    def agree_if_all_can(self, group: Group) -> None:
        """Agree with the ranks of a data-parallel model; the first time, ask if all can do that."""
        name = group.ranks.group_name
        if name not in self._asked:
            self._asked.add(name)
            if not all_take_part(group, PATIENCE):
                self._session.stand_aside(
                    "some ranks run without it; set AUTO_MIXED_PRECISION on every machine"
                )
        if not self._session.stands_aside:
            self.agree([group])

    def after_backward(self) -> None:
        """Do what was agreed; a checkpoint may have run forwards again until now."""
        granted, self._granted = self._granted, []
        for demotion in granted:
            self._session.islands.fallback.grant(demotion)

    def before_step(self, optimizer: torch.optim.Optimizer, groups: list[Group]) -> None:
        """Agree with those who hold the other parts of its parameters, if it is time to."""
        if groups and self._is_time(optimizer):
            self.agree(groups)
            self.after_backward()

    def _is_time(self, what: Any) -> bool:
        count = self._counts[what] = self._counts.get(what, 0) + 1
        return count <= FIRST or count % EVERY == 0

    # What they say

    def agree(self, groups: list[Group]) -> None:
        """Ask all ranks of these groups, which have to ask as well. Waits for them."""
        scale = self._session.loss_scale
        state = scale.state()
        mine = [state["scale"], state["growth_tracker"], self._type_on(groups[0].device_type)]
        said = [*mine, *(-number for number in mine), float(bool(self._wishes))]
        *numbers, has_wishes = agreed(torch.tensor(said), groups).tolist()
        most, least = numbers[: len(mine)], [-number for number in numbers[len(mine) :]]
        if most[:2] != least[:2]:
            scale.put({"scale": least[0], "growth_tracker": least[1], "skips_in_a_row": 0})
            self._session.speech.info(
                f"autoamp: ranks had loss scales from {least[0]:.10g} to {most[0]:.10g}; all go on "
                "with the least"
            )
        self.has_one_type = most[2] == least[2]
        if has_wishes:
            wishes, self._wishes = list(self._wishes.values()), {}
            for group in groups:
                wishes = [wish for found in collected(wishes, group) for wish in found]
            self._granted += wishes

    def _type_on(self, device_type: str) -> float:
        decision = self._session.decisions.get(device_type)
        return _TYPES.get(decision.dtype if decision is not None else None, 0.0)

    def wish(self, module: torch.nn.Module, demotion: Demotion) -> None:
        """Have all ranks run a module in float32, from when they have agreed."""
        self._wishes[id(module)] = demotion


def prepare_for_backward(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`Reducer.prepare_for_backward`: what data-parallel models call after a forward in training,
    but not where they do not synchronise.
    """
    note = session.agreement.prepare
    # Dynamo would trace into it. Nothing is loaded for this: such models load Dynamo.
    note_eagerly = _disable_dynamo(functools.partial(note))

    def prepare_for_backward(self: Any, *args: Any) -> Any:
        if session.active and (session.scales or session.agreement_matters):
            (note if dynamo_is_off() else note_eagerly)(self)
        return original(self, *args)

    return prepare_for_backward


def join_post_hook(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`_DDPJoinHook.post_hook`: ranks that joined early have missed steps of the others."""

    def post_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if session.active and (session.may_scale or session.agreement_matters):
            model = self.ddp
            device_type = next(model.parameters()).device.type
            session.agreement.agree_if_all_can(Group(model.process_group, device_type))
            session.agreement.after_backward()
        return result

    return post_hook
