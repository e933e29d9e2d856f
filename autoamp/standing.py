"""Models that lower precision would make slower stay float32: `performance.stand_down` of a policy.

Decided once for each root, in its first call, which runs in lower precision: by the arithmetic that
it has saved and what it has added, as the table says what those take. No clock is asked: the same
model on the same device decides the same way each time. What is small, called often, or made of
casts stays float32 from the second call on, until it is given twice as much, or is first trained:
then it is decided anew. What pays once stays in lower precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .casting import HALF
from .devices import FORCE
from .inspection import Watcher, is_opaque, is_plain, tensors_in
from .ranks import has_ranks
from .report import standing_line

if TYPE_CHECKING:
    from .session import Session


@dataclass(frozen=True, slots=True)
class Costs:
    """What a kind of device takes.

    FLOP/s of products in `float32` and in `half`; seconds that each half `product`, and each
    `cast`, takes however small; bytes/s from `memory`.
    """

    float32: float
    half: float
    product: float
    cast: float
    memory: float


COSTS: Mapping[str, Costs] = {
    # A core of an EPYC with AVX512-BF16 (Zen 5), torch 2.13 and oneDNN, measured on 2026-12-01:
    # these tell the faster of the two for 105 of 108 small models (`scripts/bench --rows standing`)
    # and for all other rows.
    "cpu": Costs(110e9, 330e9, 18e-6, 1.5e-6, 40e9),
    # The least of those with Tensor Cores, by its data sheet (V100), and what a launch takes.
    "cuda": Costs(15.7e12, 112e12, 0.0, 5e-6, 0.9e12),
}
"""Of one core, or one GPU. Where a device is not in here, nothing stands down."""
_LAYERS: Mapping[str, slice] = {
    "_cudnn_rnn": slice(1, 2),
    "_native_multi_head_attention": slice(5, 9),
    "_transformer_encoder_layer_fwd": slice(3, 18),
    "miopen_rnn": slice(1, 2),
    "mkldnn_rnn_layer": slice(1, 3),
}
"""Ops that are whole layers: where their weights are among the arguments. Some cast them inside."""
_LIKE: Mapping[str, str] = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention"
}
"""Ops that torch does not count, and others with the same arithmetic and arguments."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A root that stays float32: on which type of device, and for calls of which kind.

    `size` is how many numbers the call was given by which it was decided, `trains` whether
    gradients were recorded. Without them: for all calls.
    """

    device_type: str
    size: float = float("inf")
    trains: bool = True

    def covers(self, device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call of the root is one of that kind."""
        if self.device_type != device_type:
            return False
        if self.size == float("inf"):
            return True
        is_trained = torch.is_grad_enabled() and not self.trains
        return not is_trained and _size(args, kwargs) < 2 * max(self.size, 1)


class Account(Watcher):  # type: ignore[no-untyped-call]
    """What one call saves, and what lower precision adds to it, in seconds."""

    def __init__(self, costs: Costs, cores: int, is_training: bool) -> None:
        super().__init__()
        from torch.utils.flop_counter import flop_registry  # where it is needed, and not before

        self.saved = self.spent = 0.0
        self.is_complete, self.has_products = True, False
        self._flops = {packet.__name__: count for packet, count in flop_registry.items()}
        self._costs, self._cores = costs, cores
        # A backward makes two products of each, and one cast.
        self._products, self._casts = (3, 2) if is_training else (1, 1)
        self._of_weights: dict[int, float] = {}

    @property
    def pays(self) -> bool:
        """Whether lower precision is worth it, or the call does not tell: its arithmetic may be in
        other threads.
        """
        return not (self.is_complete and self.has_products) or self.saved >= self.spent

    def leave_out(self, kept: set[int]) -> None:
        """The casts of what is at these places in memory are not made again in the next call."""
        self.spent -= sum(self._of_weights.pop(place, 0.0) for place in kept)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            self.is_complete = False
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled():  # where ops that are made of others arrive whole
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default:
            self._note_cast(args[0], result)
        elif func.overloadpacket.__name__ in _LAYERS:
            self._note_layer(func.overloadpacket.__name__, args)
        elif any(tensor.dtype in HALF for tensor in tensors_in(result)):
            self._note_op(func, args, kwargs, result)
        return result

    def _note_cast(self, given: torch.Tensor, made: torch.Tensor) -> None:
        if (given.dtype in HALF) != (made.dtype in HALF):
            seconds = self._spend_cast(given.nbytes + made.nbytes)
            place = given.data_ptr()
            self._of_weights[place] = self._of_weights.get(place, 0.0) + seconds

    def _spend_cast(self, moved: int) -> float:
        seconds = self._casts * (self._costs.cast + moved / self._costs.memory)
        self.spent += seconds
        return seconds

    def _note_op(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func.overloadpacket.__name__
        count = self._flops.get(_LIKE.get(name, name))
        if count is not None:
            moved = sum(tensor.nbytes for tensor in tensors_in((args, result)))
            self._note_product(count(*args, **kwargs, out_val=result), moved)
        elif func.namespace != "aten":
            self.is_complete = False
        elif not func.is_view:
            moved = sum(tensor.nbytes for tensor in tensors_in(result))
            self.saved += moved / self._costs.memory

    def _note_product(self, flops: float, moved: int) -> None:
        """`moved`: bytes of operands and result, in half; float32 moves twice as many."""
        self.has_products, costs = True, self._costs
        gain = flops / self._cores * (1 / costs.float32 - 1 / costs.half)
        self.saved += self._products * (gain + moved / costs.memory)
        self.spent += self._products * costs.product

    def _note_layer(self, name: str, args: Any) -> None:
        """Each row of the input meets each number of the weights once."""
        given = args[0]
        rows = given.numel() // max(given.shape[-1], 1)
        for weight in tensors_in(args[_LAYERS[name]]):
            if weight.dim() == 2:
                self._note_product(2 * rows * weight.numel(), 2 * (given.numel() + weight.numel()))
                if weight.dtype not in HALF:
                    self._spend_cast(6 * weight.numel())


class StandDown:
    """Which roots of one session stay float32."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.decided: dict[int, bool] = session.modules.new_table()
        """The roots that stay in lower precision."""
        self.told: list[dict[str, Any]] = []
        self._told_of: dict[int, dict[str, Any]] = session.modules.new_table()

    def decide(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a root, in its region, and what comes of it for the next ones."""
        session, root = self.session, args[0]
        device_type = session.local.region
        costs = COSTS.get(device_type)
        is_hidden = is_opaque(root) or torch._C._len_torch_dispatch_stack() or not is_plain()
        if costs is None or is_hidden or has_ranks():
            self._stay_lower(root)
            return run(*args, **kwargs)
        cores = torch.get_num_threads() if device_type == "cpu" else 1
        # A dry run makes calls aside, without gradients.
        trains = torch.is_grad_enabled() if session.dry is None else session.dry.here.trains
        account = Account(costs, cores, trains)
        with account:
            result = run(*args, **kwargs)
        if not trains:
            account.leave_out(session.weights.places())
        if account.pays:
            self._stay_lower(root)
        else:
            session.regions.stand(root, Standing(device_type, _size(args, kwargs), trains))
            self._tell(root, device_type, account)
        return result

    def _stay_lower(self, root: torch.nn.Module) -> None:
        self.session.modules.remember(root)
        self.decided[id(root)] = True
        self.session.regions.standing.pop(id(root), None)
        told = self._told_of.pop(id(root), None)
        if told is not None:
            self.told.remove(told)
            self.session.speech.notice(
                f"autoamp: {told['type']} is in lower precision from here on: its calls have grown"
            )

    def _tell(self, root: torch.nn.Module, device_type: str, account: Account) -> None:
        kind, saved, spent = type(root).__name__, account.saved * 1e6, account.spent * 1e6
        told = {"type": kind, "saved_us": saved, "spent_us": spent}
        if kind not in {other["type"] for other in self.told}:
            force = FORCE.format(self.session.decisions[device_type].word)
            self.session.speech.notice(f"autoamp: {standing_line(told)}; {force}")
        if id(root) in self._told_of:
            self.told.remove(self._told_of[id(root)])
        self._told_of[id(root)] = told
        self.told.append(told)


def _size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many numbers a module is called with."""
    size = 0
    for value in (*args[1:], *kwargs.values()):
        if isinstance(value, torch.Tensor):  # the generator takes as long as a small op
            size += value.numel()
        else:
            size += sum(tensor.numel() for tensor in tensors_in(value))
    return size
