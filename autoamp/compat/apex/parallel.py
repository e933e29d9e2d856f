"""`apex.parallel` by torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """torch's, with Apex' arguments: parameters live on the device where they are.

    When gradients travel is torch's matter: of the others only those that change numbers have a
    meaning. `delay_allreduce` allowed any graph: parameters may go unused.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: Any = None,
        prof: bool = False,
    ) -> None:
        super().__init__(module, find_unused_parameters=delay_allreduce)
        if not gradient_average:
            self.register_comm_hook(None, _sum)


def _sum(state, bucket):  # type: ignore[no-untyped-def]
    """The gradients of all ranks, added up. Torch looks at annotations, and ours are only text."""
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """torch's, with Apex' arguments."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)
        self.channel_last, self.fuse_relu = channel_last, fuse_relu

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        last = self.channel_last and input.dim() > 2
        result = super().forward(input.movedim(-1, 1) if last else input)
        result = result.relu() if self.fuse_relu else result
        return result.movedim(1, -1) if last else result


def convert_syncbn_model(
    module: torch.nn.Module, process_group: Any = None, channel_last: bool = False
) -> torch.nn.Module:
    """A model whose batch norms look at all ranks."""
    converted = module
    if isinstance(module, torch.nn.modules.instancenorm._InstanceNorm):
        return module
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        converted = SyncBatchNorm(
            module.num_features,
            module.eps,
            module.momentum,  # type: ignore[arg-type]
            module.affine,
            module.track_running_stats,
            process_group,
            channel_last,
        )
        for name in ("weight", "bias"):
            converted.register_parameter(name, getattr(module, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            converted.register_buffer(name, getattr(module, name))
        converted.train(module.training)
    for name, child in module.named_children():
        converted.add_module(name, convert_syncbn_model(child, process_group, channel_last))
    return converted


def create_syncbn_process_group(group_size: int) -> Any:
    """The group of `group_size` neighbouring ranks that this one is in; None: all of them."""
    world_size = dist.get_world_size()
    if group_size in (0, world_size):
        return None
    if world_size < group_size or world_size % group_size:
        raise ValueError(f"{world_size} ranks cannot be put into groups of {group_size}")
    mine = None
    for first in range(0, world_size, group_size):
        ranks = list(range(first, first + group_size))
        group = dist.new_group(ranks)  # every rank has to make every group
        mine = group if dist.get_rank() in ranks else mine
    return mine


class LARC:
    """An optimizer whose learning rate is kept in proportion, for each parameter (You et al.)."""

    def __init__(
        self,
        optimizer: Any,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient, self.clip, self.eps = trust_coefficient, clip, eps

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.optim, name)

    def step(self, closure: Any = None) -> Any:
        """A step with gradients to which the ratio and the weight decay have been applied."""
        decays = [group.get("weight_decay", 0) for group in self.optim.param_groups]
        for group, decay in zip(self.optim.param_groups, decays, strict=True):
            group["weight_decay"] = 0
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._adapt(parameter, group["lr"], decay)
        try:
            return self.optim.step() if closure is None else self.optim.step(closure)
        finally:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                group["weight_decay"] = decay

    @torch.no_grad()
    def _adapt(self, parameter: torch.Tensor, lr: float, decay: float) -> None:
        assert parameter.grad is not None
        size, slope = parameter.norm(), parameter.grad.norm()
        rate = self.trust_coefficient * size / (slope + size * decay + self.eps)
        if self.clip:
            rate = (rate / lr).clamp(max=1)
        adapted = (parameter.grad + decay * parameter) * rate
        parameter.grad.copy_(torch.where((size != 0) & (slope != 0), adapted, parameter.grad))
