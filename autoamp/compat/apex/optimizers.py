"""`apex.optimizers` by torch: Apex' arguments, defaults and arithmetic.

Adam, SGD and Adagrad are torch's own; LAMB and NovoGrad, which torch does not have, are written
with its functions for lists of tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]
Closure = Callable[[], Any] | None
_LATE = 2.0**24
"""A step so late that Adam's bias corrections are one; float32 counts no further."""


class _ZeroGrad:
    """``zero_grad()`` as ``set_grad_none`` says."""

    set_grad_none: bool
    param_groups: Any

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients, or set them to zero."""
        drop = self.set_grad_none if set_to_none is None else set_to_none
        torch.optim.Optimizer.zero_grad(self, set_to_none=drop)  # type: ignore[arg-type]


def _refuse(name: str, **unsupported: Any) -> None:
    for argument, value in unsupported.items():
        if value:
            raise RuntimeError(f"{name} does not support {argument}.")


def _as_list(params: Any) -> list[Any]:
    """Parameters or groups, each of which is looked at more than once."""
    groups = list(params)
    for group in groups:
        if isinstance(group, dict) and not isinstance(group["params"], torch.Tensor):
            group["params"] = list(group["params"])
    return groups


def _on_cuda(groups: list[Any]) -> bool:
    tensors = [
        p for group in groups for p in (group["params"] if isinstance(group, dict) else [group])
    ]
    return all(isinstance(p, torch.Tensor) and p.is_cuda for p in tensors)


class FusedAdam(_ZeroGrad, torch.optim.AdamW):
    """`torch.optim.AdamW`, or Adam with ``adam_w_mode=False``; on CUDA its fused kernels."""

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        _refuse("FusedAdam", amsgrad=amsgrad)
        groups = _as_list(params)
        self.set_grad_none, self.bias_correction = set_grad_none, bias_correction
        self.adam_w_mode = adam_w_mode
        can_switch = "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters
        self._adds_decay = not adam_w_mode and not can_switch  # until torch 2.6
        super().__init__(
            groups,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            capturable=capturable,
            fused=(_on_cuda(groups) and not self._adds_decay) or None,
        )
        for group in self.param_groups if can_switch else ():
            group["decoupled_weight_decay"] = adam_w_mode

    def step(self, closure: Closure = None) -> Any:
        """As Adam's; without bias correction as one that has gone on for long."""
        if not self.bias_correction or self._adds_decay:
            loss = _evaluate(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self._prepare(p, group)
            decays = [group["weight_decay"] for group in self.param_groups]
            for group in self.param_groups if self._adds_decay else ():
                group["weight_decay"] = 0.0
            super().step()
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay
            return loss
        return super().step(closure)

    @torch.no_grad()
    def _prepare(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        if self._adds_decay and group["weight_decay"]:
            p.grad = p.grad + group["weight_decay"] * p
        if not self.bias_correction and not self.state[p]:
            where = p.device if group["capturable"] or group["fused"] else "cpu"
            self.state[p].update(
                step=torch.tensor(_LATE, device=where),
                exp_avg=torch.zeros_like(p),
                exp_avg_sq=torch.zeros_like(p),
            )


class FusedSGD(_ZeroGrad, torch.optim.SGD):
    """`torch.optim.SGD`."""

    def __init__(
        self,
        params: Any,
        lr: Any,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        _refuse("FusedSGD here", wd_after_momentum=wd_after_momentum)
        self.set_grad_none = set_grad_none
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)


class FusedAdagrad(_ZeroGrad, torch.optim.Adagrad):
    """`torch.optim.Adagrad`; with `adagrad_w_mode` weight decay is decoupled."""

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.set_grad_none, self.adagrad_w_mode = set_grad_none, adagrad_w_mode
        super().__init__(params, lr=lr, eps=eps, weight_decay=weight_decay)

    def step(self, closure: Closure = None) -> Any:
        """As Adagrad's."""
        if not self.adagrad_w_mode:
            return super().step(closure)
        loss = _evaluate(closure)
        decays = [group["weight_decay"] for group in self.param_groups]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.mul_(1 - group["lr"] * group["weight_decay"])
                group["weight_decay"] = 0.0
        super().step()
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        return loss


class FusedLAMB(_ZeroGrad, torch.optim.Optimizer):
    """LAMB: Adam whose step is in proportion to each parameter's norm (You et al., 2019)."""

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        _refuse("FusedLAMB", amsgrad=amsgrad)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        self.set_grad_none, self.adam_w_mode, self.use_nvlamb = (
            set_grad_none,
            adam_w_mode,
            use_nvlamb,
        )
        super().__init__(params, defaults)

    def step(self, closure: Closure = None) -> Any:
        """One step; the gradients of all groups are clipped to `max_grad_norm` together."""
        loss = _evaluate(closure)
        with torch.no_grad():
            everything = [
                p.grad for g in self.param_groups for p in g["params"] if p.grad is not None
            ]
            if everything:
                norms = torch._foreach_norm(everything)
                total = torch.stack([n.to(norms[0].device) for n in norms]).norm()
                for group in self.param_groups:
                    self._step(group, total)
        return loss

    def _step(self, group: dict[str, Any], total: torch.Tensor) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        count = group["step"] = group.get("step", 0) + 1
        (beta1, beta2), decay, eps = group["betas"], group["weight_decay"], group["eps"]
        corrections = _corrections(group, count)
        means = _buffers(self, params, "exp_avg")
        squares = _buffers(self, params, "exp_avg_sq")
        clip = (total / group["max_grad_norm"]).clamp(min=1.0)
        grads = [p.grad / clip.to(p.device) for p in params]
        if decay and not self.adam_w_mode:
            torch._foreach_add_(grads, params, alpha=decay)
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, grads, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        denominators = torch._foreach_sqrt(torch._foreach_div(squares, corrections[1]))
        torch._foreach_add_(denominators, eps)
        updates = torch._foreach_div(torch._foreach_div(means, corrections[0]), denominators)
        if decay and self.adam_w_mode:
            torch._foreach_add_(updates, params, alpha=decay)
        if self.use_nvlamb or decay:
            sizes = torch._foreach_norm(params)
            for update, size, length in zip(
                updates, sizes, torch._foreach_norm(updates), strict=True
            ):
                ratio = torch.where((size > 0) & (length > 0), size / length, 1.0)
                update.mul_(ratio)
        torch._foreach_add_(params, torch._foreach_mul(updates, -group["lr"]))


class FusedNovoGrad(_ZeroGrad, torch.optim.Optimizer):
    """NovoGrad: gradients divided by a running norm of each parameter's (Ginsburg et al., 2019)."""

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _refuse("FusedNovoGrad", amsgrad=amsgrad)
        if norm_type not in (0, 2):
            raise RuntimeError("FusedNovoGrad only supports norm_type 2, and 0 for the largest.")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        self.set_grad_none, self.reg_inside_moment = set_grad_none, reg_inside_moment
        super().__init__(params, defaults)

    def step(self, closure: Closure = None) -> Any:
        """One step."""
        loss = _evaluate(closure)
        with torch.no_grad():
            for group in self.param_groups:
                self._step(group)
        return loss

    def _step(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        count = group["step"] = group.get("step", 0) + 1
        (beta1, _), decay, lr = group["betas"], group["weight_decay"], group["lr"]
        first, second = _corrections(group, count)
        keep = 1 - beta1 if group["grad_averaging"] else 1.0
        for p, mean in zip(params, _buffers(self, params, "exp_avg"), strict=True):
            norm = self._norm(p, group)
            denominator = norm / second**0.5 + group["eps"]
            if self.reg_inside_moment:
                mean.mul_(beta1).add_(p.grad / denominator + decay * p, alpha=keep)
                p.sub_(lr * mean / first)
            else:
                mean.mul_(beta1).add_(p.grad, alpha=keep)
                p.sub_(lr * (mean / first / denominator + decay * p))

    def _norm(self, p: Any, group: dict[str, Any]) -> torch.Tensor:
        """The running norm: of squares for norm 2, of the norms themselves for the largest."""
        is_largest, beta = group["norm_type"] == 0, group["betas"][1]
        new: torch.Tensor = p.grad.abs().max() if is_largest else p.grad.norm()
        state = self.state[p]
        old = state.get("grad_norm", torch.zeros_like(new) if group["init_zero"] else new)
        blended: torch.Tensor = beta * old + (1 - beta) * new
        if not is_largest:
            blended = (beta * old**2 + (1 - beta) * new**2).sqrt()
        state["grad_norm"] = blended
        return blended


def _evaluate(closure: Closure) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _buffers(optimizer: torch.optim.Optimizer, params: list[Any], name: str) -> list[torch.Tensor]:
    for p in params:
        if name not in optimizer.state[p]:
            optimizer.state[p][name] = torch.zeros_like(p)
    return [optimizer.state[p][name] for p in params]


def _corrections(group: dict[str, Any], count: int) -> tuple[float, float]:
    if not group["bias_correction"]:
        return 1.0, 1.0
    beta1, beta2 = group["betas"]
    return 1 - beta1**count, 1 - beta2**count
