"""Models that lower precision would make slower stay float32: `performance.stand_down` of a policy.

Decided once for each root, in its first call, which runs in lower precision: by the arithmetic that
it has saved and the casts that it has made, as the table says what those take. No clock is asked:
the same model on the same device decides the same way each time. What is small, called often, or
made of casts stays float32 from the second call on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .casting import HALF
from .inspection import is_opaque, is_plain, tensors_in
from .ranks import has_ranks

if TYPE_CHECKING:
    from .session import Session


@dataclass(frozen=True, slots=True)
class Costs:
    """What a kind of device takes: FLOP/s of products in float32 and in half, seconds that each op
    takes however small, bytes/s from memory.
    """

    float32: float
    half: float
    op: float
    memory: float


COSTS: Mapping[str, Costs] = {
    # A core with BF16 arithmetic. float32, casts and memory as measured on an EPYC on 2026-12-01;
    # half: matrix products are 4 times as fast where AVX512-BF16 does them.
    "cpu": Costs(30e9, 120e9, 3e-6, 8e9),
    # The least of those with Tensor Cores, by its data sheet (V100), and what a launch takes.
    "cuda": Costs(15.7e12, 112e12, 5e-6, 0.9e12),
}
"""Of one core, or one GPU. Where a device is not in here, nothing stands down."""
_UNCOUNTED = frozenset(
    (
        "_cudnn_rnn",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_thnn_fused_gru_cell",
        "_thnn_fused_lstm_cell",
        "miopen_rnn",
        "mkldnn_rnn_layer",
    )
)
"""Ops whose arithmetic torch does not tell: who uses them does not stand down."""


class Account(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What one call saves, and what its casts cost, in seconds."""

    supports_higher_order_operators = True

    def __init__(self, costs: Costs, cores: int, is_training: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry  # where it is needed, and not before

        self.saved = self.spent = 0.0
        self.is_complete = True
        self._flops: Mapping[Any, Any] = flop_registry
        self._costs, self._cores = costs, cores
        # A backward makes two products of each, and one cast.
        self._products, self._casts = (3, 2) if is_training else (1, 1)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as it would without: torch asks."""
        return True

    @property
    def pays(self) -> bool:
        """Whether lower precision is worth it, as far as this call tells."""
        return not self.is_complete or self.saved >= self.spent

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(func, torch._ops.OpOverload):
            self.is_complete = False
            return result
        if func is torch.ops.aten._to_copy.default:
            self._note_cast(args[0], result)
        elif any(tensor.dtype in HALF for tensor in tensors_in(result)):
            self._note_op(func, args, kwargs or {}, result)
        return result

    def _note_cast(self, given: torch.Tensor, made: torch.Tensor) -> None:
        if (given.dtype in HALF) != (made.dtype in HALF):
            moved = given.nbytes + made.nbytes
            self.spent += self._casts * (self._costs.op + moved / self._costs.memory)

    def _note_op(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        costs, packet = self._costs, func.overloadpacket
        name = packet.__name__
        count = self._flops.get(packet)
        if count is not None:
            flops = count(*args, **kwargs, out_val=result) * self._products / self._cores
            self.saved += flops * (1 / costs.float32 - 1 / costs.half)
        elif name in _UNCOUNTED:
            self.is_complete = False
        elif not func.is_view:
            self.saved += sum(tensor.nbytes for tensor in tensors_in(result)) / costs.memory


class StandDown:
    """Which roots of one session stay float32."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.seen: dict[int, bool] = session.modules.new_table()
        """By root that was decided on: whether it stays float32."""
        self.told: list[dict[str, Any]] = []

    def decide(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first call of a root, in its region, and what comes of it for the next ones."""
        root, device_type = args[0], self.session.local.region
        self.session.modules.remember(root)
        self.seen[id(root)] = False
        costs = COSTS.get(device_type)
        is_hidden = is_opaque(root) or torch._C._len_torch_dispatch_stack() or not is_plain()
        if costs is None or is_hidden or has_ranks():
            return run(*args, **kwargs)
        cores = torch.get_num_threads() if device_type == "cpu" else 1
        account = Account(costs, cores, torch.is_grad_enabled())
        with account:
            result = run(*args, **kwargs)
        if not account.pays:
            self._stand_down(root, device_type, account)
        return result

    def _stand_down(self, root: torch.nn.Module, device_type: str, account: Account) -> None:
        self.seen[id(root)] = True
        self.session.regions.stand(root, device_type)
        kind, saved, spent = type(root).__name__, account.saved * 1e6, account.spent * 1e6
        if kind not in {told["type"] for told in self.told}:
            self.session.speech.notice(
                f"autoamp: {kind} stays float32: its casts take about {spent:.3g} us a call, and "
                f"lower precision saves {saved:.3g}"
            )
        self.told.append({"type": kind, "saved_us": saved, "spent_us": spent})
