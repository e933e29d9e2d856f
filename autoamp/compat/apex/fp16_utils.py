"""`apex.fp16_utils`: networks stay float32 and autoamp lowers what runs in them.

A model that the script makes half by itself (``model.half()``) is left as it is: `FP16_Optimizer`
then keeps float32 master weights and a loss scale of its own, as Apex did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import _utils, nn

# Not relative: this file is imported as apex.fp16_utils.
from autoamp import activation
from autoamp.casting import HALF
from autoamp.compat.lossscale import set_loss_scale

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]
clip_grad_norm = nn.utils.clip_grad_norm_
_flatten: Any = _utils._flatten_dense_tensors
_unflatten: Any = _utils._unflatten_dense_tensors


class tofp16(nn.Module):  # noqa: N801
    """Passes its input on: the region of the model that follows lowers it."""

    def forward(self, input: Any) -> Any:  # noqa: A002
        return input


def network_to_half(network: nn.Module) -> nn.Module:
    """The network behind a `tofp16`, which keeps the names in checkpoints."""
    return nn.Sequential(tofp16(), network)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The network as it is."""
    return network


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Leave a module as it is."""


def BN_convert_float(module: nn.Module) -> nn.Module:  # noqa: N802
    """Make the batch norms of a half network float32."""
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            child.float()
    return module


class FP16Model(nn.Module):
    """A network under the name ``network``."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Any) -> Any:
        return self.network(*inputs)


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[Any], list[nn.Parameter]]:
    """The parameters that are trained, and float32 copies of them (`flat_master`: in one)."""
    params = [p for p in model.parameters() if p.requires_grad]
    copies = [p.detach().clone().float() for p in params]
    if not flat_master:
        return params, [nn.Parameter(copy) for copy in copies]
    flat = nn.Parameter(_flatten(copies))
    flat.grad = torch.zeros_like(flat)
    return params, [flat]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Any], master_params: Sequence[Any], flat_master: bool = False
) -> None:
    """Copy gradients to the masters."""
    if flat_master:
        master_params[0].grad.copy_(_flatten([p.grad for p in model_params]))
        return
    for param, master in zip(model_params, master_params, strict=True):
        if param.grad is None:
            master.grad = None
        elif master.grad is None:
            master.grad = param.grad.to(master.dtype, copy=True)
        else:
            master.grad.copy_(param.grad)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Any], master_params: Sequence[Any], flat_master: bool = False
) -> None:
    """Copy the masters to the model."""
    masters = master_params
    if flat_master:
        masters = _unflatten(master_params[0].detach(), list(model_params))
    for param, master in zip(model_params, masters, strict=True):
        param.copy_(master)


def to_python_float(t: Any) -> Any:
    """A number of a tensor."""
    return t.item() if hasattr(t, "item") else t[0]


class LossScaler:
    """A static loss scale, for scripts that multiply and divide by themselves."""

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        """The scale."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """False: nobody looks."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Nothing moves."""

    def scale_gradient(self, module: Any, grad_in: Any, grad_out: Any) -> tuple[Any, ...]:
        """Gradients times the scale, as a hook of a module."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """The backward of the loss times the scale."""
        torch.autograd.backward(loss * self.loss_scale, retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale that falls at an overflow, not below 1, and grows after a while without."""

    def __init__(
        self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        super().__init__(init_scale)
        self.cur_iter, self.last_overflow_iter = 0, -1
        self.scale_factor, self.scale_window = scale_factor, scale_window

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether a gradient is not finite."""
        return any(p.grad is not None and not bool(p.grad.isfinite().all()) for p in params)

    def update_scale(self, overflow: bool) -> None:
        """The end of an iteration."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1


class FP16_Optimizer:  # noqa: N801
    """An optimizer to which ``optimizer.backward(loss)`` belongs.

    Where all parameters are float32 it only passes on: autoamp scales, and skips steps. An explicit
    scale is then autoamp's.
    """

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.optimizer, self.overflow = init_optimizer, False
        self.fp16_groups: list[list[Any]] = []
        self.fp32_from_fp16_groups: list[list[Any]] = []
        for group in init_optimizer.param_groups:
            halves = [p for p in group["params"] if p.dtype in HALF]
            masters = {id(p): nn.Parameter(p.detach().clone().float()) for p in halves}
            group["params"] = [masters.get(id(p), p) for p in group["params"]]
            self.fp16_groups.append(halves)
            self.fp32_from_fp16_groups.append(list(masters.values()))
        self.dynamic_loss_scale = dynamic_loss_scale
        self.loss_scaler: LossScaler = (
            DynamicLossScaler(**(dynamic_loss_args or {}))
            if dynamic_loss_scale
            else LossScaler(static_loss_scale)
        )
        session = activation.session()
        if not self._has_masters and session is not None:
            is_said = dynamic_loss_scale or static_loss_scale != 1.0
            asked = "dynamic" if dynamic_loss_scale else float(static_loss_scale)
            set_loss_scale(session, asked if is_said else None)

    @property
    def _has_masters(self) -> bool:
        return any(self.fp16_groups)

    def _pairs(self) -> Iterable[tuple[list[Any], list[Any]]]:
        return zip(self.fp16_groups, self.fp32_from_fp16_groups, strict=True)

    @property
    def loss_scale(self) -> float:
        """The present scale; waits for the device."""
        session = activation.session()
        if self._has_masters or session is None:
            return self.loss_scaler.loss_scale
        return session.loss_scale.state()["scale"]

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = value
        session = activation.session()
        if not self._has_masters and session is not None:
            session.loss_scale.load({"scale": value})

    def __getattr__(self, name: str) -> Any:
        if name in ("param_groups", "state"):
            return getattr(self.optimizer, name)
        raise AttributeError(name)

    def zero_grad(self, set_grads_to_None: bool = True) -> None:  # noqa: N803
        """Drop the gradients of the optimizer and of the model."""
        self.optimizer.zero_grad(set_to_none=set_grads_to_None)
        for param in (p for group in self.fp16_groups for p in group):
            param.grad = None

    def backward(
        self, loss: torch.Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """The backward of `loss`; the gradients of the masters are true ones."""
        if not self._has_masters:
            torch.autograd.backward(loss, retain_graph=retain_graph)
            return
        self.loss_scaler.backward(loss.float(), retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Copy the gradients of half parameters to their masters, unscaled."""
        if not self._has_masters:
            return
        masters = {id(p) for group in self.fp32_from_fp16_groups for p in group}
        full = [p for g in self.param_groups for p in g["params"] if id(p) not in masters]
        halves = [p for group in self.fp16_groups for p in group]
        self.overflow = self.loss_scaler.has_overflow([*halves, *full])
        if self.overflow:
            return
        for params, copies in self._pairs():
            model_grads_to_master_grads(params, copies)
        for param in (p for group in self.param_groups for p in group["params"]):
            if param.grad is not None:
                param.grad.mul_(1.0 / self.loss_scale)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip gradients; -1 after an overflow."""
        if self.overflow:
            return -1
        params = [p for group in self.param_groups for p in group["params"]]
        return clip_grad_norm(params, max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Any]] | None:
        """The gradients that the next step takes, by group; None after an overflow."""
        if self.overflow:
            return None
        return [[p.grad for p in group["params"]] for group in self.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step, unless it is skipped."""
        if not self._has_masters:
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        if closure is not None:
            raise RuntimeError(
                "FP16_Optimizer.step: a closure needs float32 parameters here; "
                "leave out model.half() and let autoamp lower the model."
            )
        self.loss_scaler.update_scale(self.overflow)
        if not self.overflow:
            self.optimizer.step()
            for params, masters in self._pairs():
                master_params_to_model_params(params, masters)
        return None

    def state_dict(self) -> dict[str, Any]:
        """Under Apex' keys, with the loss scaler as plain numbers."""
        return {
            "loss_scaler": dict(vars(self.loss_scaler)),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": True,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": self.fp32_from_fp16_groups,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, Apex' own too."""
        saved = state_dict["loss_scaler"]
        vars(self.loss_scaler).update(saved if isinstance(saved, Mapping) else vars(saved))
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        pairs = zip(self.fp32_from_fp16_groups, state_dict["fp32_from_fp16"], strict=True)
        for mine, theirs in pairs:
            for master, copy in zip(mine, theirs, strict=True):
                master.copy_(copy)
