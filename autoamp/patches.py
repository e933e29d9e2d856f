"""The table of every torch name that autoamp replaces, and why. README prints it."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch

from . import (
    agreement,
    backward,
    checkpoints,
    contexts,
    dryrun,
    edits,
    fixups,
    formats,
    functions,
    hooks,
    interop,
    opnames,
    recomputing,
    reducing,
    region,
    stepping,
)
from .patching import Patch
from .policy import Policy
from .session import Session

scales = attrgetter("scales")
SCHEDULERS = (
    "LRScheduler",
    "SequentialLR",
    "ChainedScheduler",
    "ReduceLROnPlateau",
    "CosineAnnealingWarmRestarts",
)
"""The schedulers of torch that have a ``step`` of their own."""
FUNCTIONAL = (*region.WITH_WEIGHT, "scaled_dot_product_attention")
"""The functions of `torch.nn.functional` in torch's own lower-precision list."""


def repairs(policy: Policy) -> bool:
    """Whether code of the script inside a region sees float32, beyond what torch.amp does."""
    return policy.fallback.on_error == "float32"


def follows_edits(policy: Policy) -> bool:
    """Whether what is done to weights behind the back of torch.amp is noticed."""
    return repairs(policy) or policy.performance.weight_cache == "on"


def saves(policy: Policy) -> bool:
    """Whether the state of an optimizer is not what is to be saved."""
    return policy.scales or policy.performance.optimizer != "keep"


def lays_out(policy: Policy) -> bool:
    """Whether convolutions run in another memory format than the script's."""
    return policy.performance.memory_format != "keep"


def fixes(policy: Policy) -> bool:
    """Whether ops that half precision breaks are put right."""
    return policy.fixups == "on"


def holds_schedulers(policy: Policy) -> bool:
    """Whether learning rates stay as they are after a skipped step."""
    return policy.scales and policy.loss_scale.hold_schedulers


def halves_gradients(policy: Policy) -> bool:
    """Whether processes exchange gradients in half."""
    return policy.gradients == "half"


def find_builtin(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """TorchScript asks by identity which builtin a function is: ours stand for torch's."""

    def _find_builtin(fn: Any) -> Any:
        try:
            return original(session.stand_ins.get(fn, fn))
        except TypeError:  # not hashable, so not ours
            return original(fn)

    return _find_builtin


def scale(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """`torch.amp.GradScaler.scale`: a script that scales its losses goes on, and autoamp stops."""

    def scale(self: Any, outputs: Any) -> Any:
        if self.is_enabled():
            session.leave_scaling_to("the script's own GradScaler")
        return original(self, outputs)

    return scale


def functional(name: str) -> Patch:
    """The row of a function of `torch.nn.functional`."""
    return Patch(
        f"torch.nn.functional:{name}",
        region.functional_call,
        "called outside any module it runs as a region of one op",
    )


PATCHES = (
    Patch(
        "torch.nn:Module.__call__",
        region.module_call,
        "the outermost call of a module that owns a parameter runs as a region",
    ),
    *map(functional, FUNCTIONAL),
    Patch(
        "torch.jit._builtins:_find_builtin",
        find_builtin,
        "TorchScript knows the replaced functions as the builtins they stand for",
        optional=True,
    ),
    Patch(
        "torch.jit._recursive:_find_builtin",
        find_builtin,
        "the same function under its other name",
        optional=True,
    ),
    Patch(
        "torch.jit._recursive:make_stub",
        interop.script_stub,
        "TorchScript compiles the hooks of the script, not what stands for them",
        when=repairs,
        optional=True,
    ),
    *(
        Patch(f"torch.jit:{name}", interop.traced, "traced programs are the float32 ones")
        for name in ("trace", "trace_module")
    ),
    Patch(
        "torch.jit:_get_trace_graph",
        interop.traced,
        "what torch.onnx.export traces, too",
        optional=True,
    ),
    Patch(
        "torch.autograd:_engine_run_backward",
        backward.engine_run_backward,
        "backward and grad: seeds scaled, gradients checked and unscaled, autocast off meanwhile",
    ),
    Patch(
        "torch.autograd.graph:_engine_run_backward",
        backward.engine_run_backward,
        "the same function where torch.compiler looks for it",
    ),
    Patch(
        "torch.utils.checkpoint:checkpoint",
        recomputing.checkpoint,
        "what opens regions in the forward opens them in the recomputation",
    ),
    Patch(
        "torch:Tensor.register_hook",
        hooks.tensor_hook,
        "hooks see true gradients",
    ),
    Patch(
        "torch:Tensor.register_post_accumulate_grad_hook",
        hooks.post_accumulate_hook,
        "hooks see true gradients",
    ),
    Patch(
        "torch.nn:Module._get_backward_hooks",
        hooks.module_backward_hooks,
        "module hooks see true gradients",
    ),
    Patch(
        "torch.nn:Module._get_backward_pre_hooks",
        hooks.module_backward_pre_hooks,
        "module hooks see true gradients",
    ),
    Patch(
        "torch.autograd.function:Function.apply",
        functions.function_apply,
        "custom Functions run in float32 inside a region; modules that they call stay in it",
        when=repairs,
    ),
    Patch(
        "torch.autograd.function:BackwardCFunction.apply",
        hooks.function_backward,
        "custom Functions see true gradients",
    ),
    Patch(
        "torch.autograd.function:BackwardCFunction.apply_boxed",
        hooks.function_backward,
        "custom Functions see true gradients",
        optional=True,
    ),
    Patch(
        "torch:Tensor.numpy",
        interop.array,
        "half tensors that autoamp made become float32 arrays; edits of weights are seen",
        when=follows_edits,
    ),
    *(
        Patch(
            target,
            interop.dlpack,
            "inside a region half tensors leave as float32; edits of weights are seen",
            when=follows_edits,
        )
        for target in (
            "torch:Tensor.__dlpack__",
            "torch:to_dlpack",
            "torch.utils.dlpack:to_dlpack",
        )
    ),
    *(
        Patch(
            target,
            interop.forward_hook,
            "forward hooks see float32 inside a region, and what they saw goes on",
            when=repairs,
        )
        for target in (
            "torch.nn:Module.register_forward_hook",
            "torch.nn.modules.module:register_module_forward_hook",
        )
    ),
    *(
        Patch(
            target,
            interop.forward_pre_hook,
            "forward pre-hooks see float32 inside a region, and what they saw goes on",
            when=repairs,
        )
        for target in (
            "torch.nn:Module.register_forward_pre_hook",
            "torch.nn.modules.module:register_module_forward_pre_hook",
        )
    ),
    Patch(
        "torch.autograd.grad_mode:set_grad_enabled.__init__",
        edits.grad_mode_set,
        "what no_grad blocks do to weights inside a region is seen by the next op",
        when=repairs,
    ),
    *(
        Patch(
            f"torch.autograd.grad_mode:{name}.__exit__",
            edits.block_left,
            "what such blocks do to weights inside a region is seen by the next op",
            when=repairs,
        )
        for name in ("set_grad_enabled", "inference_mode")
    ),
    *(
        Patch(
            target,
            edits.edit,
            "weights that it assigns are seen by the next op",
            when=follows_edits,
        )
        for target in (
            "torch.nn.utils:vector_to_parameters",
            "torch.nn.utils.convert_parameters:vector_to_parameters",
            "torch.utils:swap_tensors",
        )
    ),
    Patch(
        "torch:Tensor.data",
        edits.data,
        "what is written to weights that way is seen by the next op",
        when=follows_edits,
    ),
    Patch(
        "torch:Tensor.view",
        formats.view,
        "results of channels-last convolutions can be viewed like others",
        when=lays_out,
    ),
    Patch(
        "torch:Tensor.retain_grad",
        hooks.retain_grad,
        "gradients that non-leaf tensors keep are unscaled too",
        when=scales,
    ),
    Patch(
        "torch.optim:Optimizer.profile_hook_step",
        stepping.profile_hook_step,
        "optimizer.step is skipped when its gradients are not finite; the loss scale moves",
    ),
    Patch(
        "torch.optim:Optimizer.state_dict",
        checkpoints.state_dict,
        "the loss scale is saved with the optimizer, under the key 'autoamp'",
        when=saves,
    ),
    Patch(
        "torch.optim:Optimizer.load_state_dict",
        checkpoints.load_state_dict,
        "the loss scale comes back with the optimizer",
        when=scales,
    ),
    *(
        Patch(
            f"torch.optim.lr_scheduler:{name}.step",
            stepping.scheduler_step,
            "schedulers wait for a step that is not skipped, where the policy says so",
            when=holds_schedulers,
        )
        for name in SCHEDULERS
    ),
    Patch(
        "torch.amp.grad_scaler:GradScaler.scale",
        scale,
        "a script's own GradScaler owns the scaling",
        when=scales,
    ),
    Patch(
        "torch.amp.autocast_mode:autocast.__enter__",
        contexts.context_entered,
        "a script with mixed precision of its own keeps to it",
    ),
    *(
        Patch(
            f"torch.nn.parallel.distributed:DistributedDataParallel.{name}",
            factory,
            why,
            when=halves_gradients,
            optional=True,
        )
        for name, factory, why in (
            (
                "_ddp_init_helper",
                reducing.init_reducer,
                "gradients travel in half, where the policy says so",
            ),
            ("register_comm_hook", reducing.register, "a hook of the script's wins over that"),
            (
                "_register_builtin_comm_hook",
                reducing.register_builtin,
                "a hook of the script's wins over that",
            ),
        )
    ),
    Patch(
        "torch._C._distributed_c10d:Reducer.prepare_for_backward",
        agreement.prepare_for_backward,
        "ranks of a data-parallel model agree before a backward: on the loss scale, on fallbacks",
        optional=True,
    ),
    Patch(
        "torch.nn.parallel.distributed:_DDPJoinHook.post_hook",
        agreement.join_post_hook,
        "ranks that ran out of data first agree with the others again",
        optional=True,
    ),
    Patch(
        "torch:Tensor.__setitem__",
        fixups.set_item,
        "numbers written into half tensors inside a region stay finite",
        when=fixes,
    ),
)


_IN_A_REGION = (
    interop.array,
    interop.dlpack,
    interop.forward_hook,
    interop.forward_pre_hook,
    functions.function_apply,
    fixups.set_item,
    edits.grad_mode_set,
    edits.block_left,
    edits.edit,
    scale,
)
"""What changes no number outside of regions."""


def patches_for_dry_run() -> tuple[Patch, ...]:
    """The rows of `PATCHES` without which calls aside would not be as in a run, and no others."""
    kept = {factory: factory for factory in _IN_A_REGION}
    kept |= {
        region.module_call: dryrun.module_call,
        contexts.context_entered: dryrun.context_entered,
    }
    return tuple(
        replace(patch, factory=kept[patch.factory]) for patch in PATCHES if patch.factory in kept
    )


def patches_for(policy: Policy) -> tuple[Patch, ...]:
    """`PATCHES`, and the functions that `policy` puts into its list ``lower`` besides.

    Only builtins: TorchScript compiles the source of the others, and models keep them as values.
    """
    asked = {op for rule in policy.ops if rule.into == "lower" for op in opnames.resolve(rule.op)}
    builtins = (
        op
        for op in sorted(asked - set(FUNCTIONAL))
        if isinstance(getattr(torch.nn.functional, op, None), types.BuiltinFunctionType)
    )
    return (*PATCHES, *map(functional, builtins))
