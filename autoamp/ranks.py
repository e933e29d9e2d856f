"""Several processes that train one model: what they write into gradients beyond the local graph,
and one answer of all where each sees a part.

Where every rank holds whole gradients (`DistributedDataParallel`), reducing them spreads what is
not finite. Where a rank holds shards (`fully_shard`, other DTensors), the ranks ask each other once
a step, and never in a backward: one that raises there must not wait for the others.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import distributed as data_parallel

from .naming import all_below

_distributed: Any = torch.distributed
_is_up = getattr(_distributed, "is_initialized", lambda: False)
_Sink: Any = data_parallel._DDPSink._backward_cls


def has_ranks() -> bool:
    """Whether other processes take part in what runs here."""
    return bool(_is_up()) and _distributed.get_world_size() > 1


def collectives() -> int:
    """How many operations this process has begun on all of its process groups.

    Two numbers that differ: in between something was exchanged, or nobody can tell.
    """
    if not has_ranks():
        return 0
    try:
        groups = _distributed.distributed_c10d._world.pg_map
        return sum(group._get_sequence_number_for_group() for group in groups)
    except (AttributeError, RuntimeError):  # a backend that does not count, or another torch
        return next(_unknown)


_unknown = itertools.count(-1, -1)


def beyond(leaves: list[torch.Tensor], nodes: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors whose ``.grad`` is written although this backward's graph does not hold them.

    A reducer that looks for unused parameters writes those that other ranks have used. The graph
    of a sharded model holds its gathered parameters; the optimizer has the shards.
    """
    if not _is_up():
        return []
    known = set(map(id, leaves))
    modules = {id(node.ddp_weakref): node.ddp_weakref() for node in nodes if type(node) is _Sink}
    written = [p for module in modules.values() if module is not None for p in module.parameters()]
    written += _shards(known)
    return list({id(p): p for p in written if p.requires_grad and id(p) not in known}.values())


def _shards(reached: set[int]) -> list[torch.Tensor]:
    """The shards of the trees of `fully_shard` modules that a backward has reached."""
    states = sys.modules.get("torch.distributed._composable_state")
    trees: dict[int, list[Any]] = {}
    for reference in list(states._module_state_mapping.values()) if states is not None else ():
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # older torch: one of them, or none
            groups = filter(None, [getattr(state, "_fsdp_param_group", None)])
        for group in groups:
            trees.setdefault(id(state._state_ctx), []).extend(group.fsdp_params)
    return [
        part.sharded_param
        for parts in trees.values()
        if any(id(getattr(part, "_unsharded_param", None)) in reached for part in parts)
        for part in parts
    ]


def has_own_precision(module: torch.nn.Module) -> bool:
    """Whether parts of a model are sharded with a mixed precision of their own.

    Modules are told apart by identity: those of a script may hash and compare as they like.
    """
    states = sys.modules.get("torch.distributed._composable_state")
    wrappers = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    policies: dict[int, Any] = {}
    for part, found in states._module_state_mapping.items() if states is not None else ():
        state = found() if callable(found) else found
        policies[id(part)] = getattr(state, "_mp_policy", None)
    for part in all_below(module):
        policy = policies.get(id(part))
        if wrappers is not None and isinstance(part, wrappers.FullyShardedDataParallel):
            policy = part.mixed_precision
        if getattr(policy, "param_dtype", None) is not None:
            return True
    return False


def local_values(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of shards, what this rank holds; others are what they are."""
    kind = _sharded_kind()
    if kind is None:
        return tensors
    return [tensor._local_tensor if isinstance(tensor, kind) else tensor for tensor in tensors]


class Group(NamedTuple):
    """A process group that shares one model, and the type of device that it reduces on."""

    ranks: Any
    device_type: str


def groups_of(tensors: Iterable[torch.Tensor]) -> list[Group]:
    """The groups over which the shards among these tensors are spread."""
    kind = _sharded_kind()
    if kind is None:
        return []
    meshes = {id(t.device_mesh): t.device_mesh for t in tensors if isinstance(t, kind)}
    return [
        Group(ranks, mesh.device_type)
        for mesh in meshes.values()
        for ranks in mesh.get_all_groups()
    ]


def flat_groups(tensors: Iterable[torch.Tensor]) -> list[Group]:
    """The groups over which `FullyShardedDataParallel`, the older class, has spread these tensors.

    It keeps parts of one flat parameter; nothing on a tensor tells, so its objects are looked for.
    """
    module = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if module is None or not _is_up():
        return []
    ids = set(map(id, tensors))
    found: dict[int, Group] = {}
    for model in instances(module.FullyShardedDataParallel):
        handle = getattr(model, "_handle", None)
        if handle is None:
            continue
        flat = handle.flat_param
        if not ids.isdisjoint(map(id, [flat, *(getattr(flat, "_params", None) or ())])):
            found[id(handle.process_group)] = Group(handle.process_group, flat.device.type)
    return list(found.values())


def instances(kind: type) -> list[Any]:
    """The living objects of a class and of those derived from it; a tenth of a second."""
    classes: list[type] = [kind]
    for cls in classes:
        derived: list[type] = cls.__subclasses__()
        classes += [other for other in derived if other not in classes]
    return [found for found in gc.get_referrers(*classes) if issubclass(type(found), kind)]


def agreed(flag: torch.Tensor, groups: list[Group]) -> torch.Tensor:
    """A flag that is not 0 if it is so on any rank; all of them have to ask."""
    return _reduced(flag, groups, "MAX")


def anywhere(answer: bool, groups: list[Group]) -> bool:
    """Whether any rank answers yes. Waits for the others."""
    return bool(agreed(torch.tensor(float(answer)), groups).item()) if groups else answer


def all_take_part(group: Group, seconds: float) -> bool:
    """Whether every rank of a group has asked this, or does so soon: all get one answer.

    By the store through which they have met, which others need not answer.
    """
    store = _distributed.distributed_c10d._get_process_group_store(group.ranks)
    rank, world = (ask(group.ranks) for ask in (_distributed.get_rank, _distributed.get_world_size))
    store.set(f"autoamp/{rank}", "here")
    try:
        keys = [f"autoamp/{other}" for other in range(world)]
        store.wait(keys, timedelta(seconds=seconds))
        word = "all"
    except RuntimeError:  # the time is over
        word = "some"
    return bool(store.compare_set("autoamp/who", "", word) == b"all")


def collected(mine: Any, group: Group) -> list[Any]:
    """What each rank has, in the order of ranks; anything that pickles. Waits for the others."""
    found: list[Any] = [None] * _distributed.get_world_size(group.ranks)
    _distributed.all_gather_object(found, mine, group.ranks)
    return found


def least(scale: torch.Tensor, groups: list[Group]) -> torch.Tensor:
    """The least of the ranks' loss scales."""
    return _reduced(scale, groups, "MIN")


def _reduced(value: torch.Tensor, groups: list[Group], how: str) -> torch.Tensor:
    for group in groups:
        value = value.to(group.device_type, copy=True)
        _distributed.all_reduce(value, getattr(_distributed.ReduceOp, how), group.ranks)
    return value


def is_shard(tensor: torch.Tensor) -> bool:
    """Whether other ranks hold other parts of this tensor."""
    kind = _sharded_kind()
    return kind is not None and isinstance(tensor, kind)


def _sharded_kind() -> Any:
    """The class of sharded tensors, None where nobody can have any: nothing is loaded to ask."""
    module = sys.modules.get("torch.distributed.tensor") if _is_up() else None
    return getattr(module, "DTensor", None)
