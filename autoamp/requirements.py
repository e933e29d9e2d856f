"""What torch must be and have, checked before any room is loaded that uses it."""

from __future__ import annotations

import re
from functools import reduce

import torch

from .errors import PatchError

OLDEST_TORCH = (2, 11)

PRIVATE = (
    "_C.DispatchKey",
    "_C.DispatchKeySet",
    "_C._DisableAutocast",
    "_C._DisableTorchDispatch",
    "_C._ExcludeDispatchKeyGuard",
    "_C._InferenceMode",
    "_C._TorchDispatchModeKey",
    "_C._current_graph_task_id",
    "_C._dispatch_get_all_op_names",
    "_C._dispatch_has_kernel_for_dispatch_key",
    "_C._dispatch_keyset_full_after",
    "_C._dynamo.eval_frame",
    "_C._functorch.is_functorch_wrapped_tensor",
    "_C._functorch.peek_interpreter_stack",
    "_C._get_dispatch_mode",
    "_C._get_obj_in_tls",
    "_C._get_tracing_state",
    "_C._group_tensors_by_device_and_dtype",
    "_C._is_key_in_tls",
    "_C._jit_set_autocast_mode",
    "_C._len_torch_dispatch_stack",
    "_C._set_grad_enabled",
    "_C._stash_obj_in_tls",
    "_C._storage_Use_Count",
    "_C._vmapmode_decrement_nesting",
    "_C._vmapmode_increment_nesting",
    "_amp_foreach_non_finite_check_and_unscale_",
    "_amp_update_scale_",
    "_foreach_mul_",
    "_from_functional_tensor",
    "_guards.CompileContext.try_get",
    "_guards.TracingContext.get",
    "_ops.OpOverload",
    "_remove_batch_dim",
    "compiler._is_exporting_flag",
    "ops.aten._to_copy.default",
    "utils._pytree.tree_map_only",
)
"""The names that torch promises to nobody and autoamp uses in the middle of a run, all of them
loaded with torch. Missed at the start they cost a line; later, they would break the program."""


def check_torch() -> None:
    """Refuse a torch that is too old, or that has lost something.

    Raises:
        PatchError: with the version found, what is wrong with it, and what to do.
    """
    version = str(torch.__version__)
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise PatchError(
            f"torch {version} is too old; install torch {oldest} or later, "
            "or unset AUTO_MIXED_PRECISION."
        )
    missing = [f"torch.{name}" for name in PRIVATE if not _has(name)]
    if missing:
        raise PatchError(
            f"torch {version} does not have {', '.join(missing)}; install an autoamp that "
            "knows this torch, or unset AUTO_MIXED_PRECISION."
        )


def _has(name: str) -> bool:
    try:
        reduce(getattr, name.split("."), torch)
    except AttributeError:
        return False
    return True
