"""`apex.amp` by autoamp: opt levels and loss scales of old scripts, as far as they apply.

Parameters stay float32 at every opt level. Gradients are true ones at all times, so `scale_loss`
gives the loss itself and autoamp scales behind it; one loss scale serves all losses.

    O0  float32: autoamp stands aside
    O1  mixed precision by autoamp's policy, dynamic loss scale
    O2  the same: batch norm and master weights, which are the parameters, are float32
    O3  the same with a static loss scale of 1: not purely half
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

# Not relative: this file is imported as apex.amp.
from autoamp import activation
from autoamp.casting import HALF, to_float32
from autoamp.compat.lossscale import MAX_LOSS_SCALE, set_loss_scale
from autoamp.policy import SCALES
from autoamp.region import enter_nesting, exempted, is_compiling, leave_nesting

__all__ = [
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
_FLOATS = (torch.float32, *HALF)


@dataclass(frozen=True, slots=True)
class Properties:
    """What an opt level stands for in Apex, under its names."""

    opt_level: str
    cast_model_type: Any
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | str
    enabled: bool = True

    @property
    def lowers(self) -> bool:
        """Whether anything runs in lower precision."""
        return self.enabled and (self.patch_torch_functions or self.cast_model_type in HALF)


OPT_LEVELS = {
    "O0": Properties("O0", torch.float32, False, None, False, 1.0),
    "O1": Properties("O1", None, True, None, None, "dynamic"),
    "O2": Properties("O2", torch.float16, False, True, True, "dynamic"),
    "O3": Properties("O3", torch.float16, False, False, False, 1.0),
}
_MEANINGS = {
    "O1": "mixed precision by autoamp",
    "O2": "mixed precision by autoamp, parameters stay float32",
    "O3": "mixed precision by autoamp, parameters stay float32: not purely half",
}


class LossScaler:
    """What scripts look up in ``amp._amp_state.loss_scalers``: all show autoamp's loss scale."""

    def loss_scale(self) -> float:
        """The present scale; waits for the device."""
        return _state()["scale"]

    _loss_scale = property(loss_scale)

    @property
    def _unskipped(self) -> int:
        return int(_state()["growth_tracker"])

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        session = activation.session()
        return session is not None and session.loss_scale.rule.mode == "dynamic"


@dataclass(slots=True)
class AmpState:
    """What `initialize` was asked for, once it was called."""

    opt_properties: Properties | None = None
    loss_scalers: list[LossScaler] = field(default_factory=lambda: [LossScaler()])
    verbosity: int = 1


_amp_state = AmpState()


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: Any = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = MAX_LOSS_SCALE,
) -> Any:
    """Note the opt level and the loss scale; models and optimizers come back as they are.

    What is not said here is as autoamp's policy has it. Results of models are float32 whatever
    `cast_model_outputs` says.

    Raises:
        RuntimeError: there is no such opt level.
        ValueError: `loss_scale` or `keep_batchnorm_fp32` cannot be understood.
    """
    if opt_level not in OPT_LEVELS and enabled:
        raise RuntimeError(
            f"Unexpected optimization level {opt_level}. Options are 'O0', 'O1', 'O2', 'O3': "
            "the letter O and a digit."
        )
    asked = {
        "cast_model_type": None if cast_model_type is False else cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": _flag(keep_batchnorm_fp32),
        "master_weights": master_weights,
        "loss_scale": None if loss_scale is None else _number(loss_scale),
    }
    properties = replace(
        OPT_LEVELS.get(opt_level, OPT_LEVELS["O0"]),
        enabled=bool(enabled),
        **{name: value for name, value in asked.items() if value is not None},  # type: ignore[arg-type]
    )
    _amp_state.opt_properties, _amp_state.verbosity = properties, verbosity
    _amp_state.loss_scalers = [LossScaler() for _ in range(num_losses)]
    session = activation.session()
    if session is not None and not properties.lowers:
        session.stand_aside(_why_float32(properties))
    elif session is not None:
        is_said = loss_scale is not None or properties.loss_scale != "dynamic"
        set_loss_scale(
            session, properties.loss_scale if is_said else None, min_loss_scale, max_loss_scale
        )
        if verbosity:
            session.speech.notice(f"autoamp: apex.amp {opt_level}: {_MEANINGS[opt_level]}")
    return models if optimizers is None else (models, optimizers)


def _flag(value: bool | str | None) -> bool | None:
    if value not in (True, False, None, "True", "False"):
        raise ValueError(f"keep_batchnorm_fp32={value!r}: use a boolean, 'True', 'False' or None.")
    return {"True": True, "False": False}.get(value, value)  # type: ignore[arg-type]


def _number(value: float | str) -> float | str:
    scale = value if value == "dynamic" else float(value)
    if isinstance(scale, float) and not SCALES[0] <= scale <= SCALES[1]:
        raise ValueError(
            f"loss_scale={value!r}: use 'dynamic' or a number from {SCALES[0]:.3g} to "
            f"{SCALES[1]:.3g}."
        )
    return scale


def _why_float32(properties: Properties) -> str:
    if not properties.enabled:
        return "the script calls apex.amp with enabled=False"
    if properties == OPT_LEVELS["O0"]:
        return "the script asks apex.amp for O0, which is float32"
    return f"the script asks apex.amp for {properties.opt_level} without lower precision"


@contextlib.contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[torch.Tensor]:
    """The loss itself, to call ``backward()`` on; gradients are true ones as soon as it returns.

    Raises:
        RuntimeError: `initialize` was not called.
        IndexError: it was told of fewer losses.
    """
    if _amp_state.opt_properties is None:
        raise RuntimeError(
            "Invoked 'with amp.scale_loss', but internal Amp state has not been initialized. "
            "model, optimizer = amp.initialize(model, optimizer, opt_level=...) must be called "
            "before 'with amp.scale_loss'."
        )
    if _amp_state.opt_properties.enabled:
        _amp_state.loss_scalers[loss_id]
    yield loss


def master_params(optimizer: Any) -> Iterator[torch.Tensor]:
    """The parameters of an optimizer: they are the master weights."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _state() -> dict[str, float]:
    session = activation.session()
    if session is None:
        return {"scale": 1.0, "growth_tracker": 0}
    return session.loss_scale.state()


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """The loss scale, once for each loss, as Apex writes it down."""
    state = {} if destination is None else destination
    now = _state()
    for index in range(len(_amp_state.loss_scalers)):
        state[f"loss_scaler{index}"] = {
            "loss_scale": now["scale"],
            "unskipped": int(now["growth_tracker"]),
        }
    return state


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Go on with the loss scale of `state_dict`; of several, with the smallest."""
    unexpected = [key for key in state_dict if "loss_scaler" not in key]
    if unexpected:
        raise RuntimeError(
            "Error(s) in loading state_dict. Unexpected key(s) in state_dict: "
            + ", ".join(map(repr, unexpected))
        )
    session = activation.session()
    if session is not None and state_dict:
        saved = min(state_dict.values(), key=lambda scaler: scaler["loss_scale"])
        session.loss_scale.load(
            {"scale": saved["loss_scale"], "growth_tracker": saved["unskipped"]}
        )


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """No lower precision in here."""
    with exempted() if activation.session() is not None else contextlib.nullcontext():
        yield


# Functions of the script in a precision of their own


def half_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function with its arguments in the region's dtype; outside, as a region of its own."""

    @functools.wraps(function)
    def in_half(*args: Any, **kwargs: Any) -> Any:
        session, first = activation.session(), _first_float32(args, kwargs)
        if session is None or first is None or is_compiling():
            return function(*args, **kwargs)
        device_type = first.device.type
        if torch.is_autocast_enabled(device_type):
            return _lowered(function, torch.get_autocast_dtype(device_type), args, kwargs)
        if enter_nesting() == 1:
            dtype = session.regions.precision_for(first)
            if dtype is not None:
                given = (function, dtype, args, kwargs)
                return session.regions.run(device_type, dtype, _lowered, given, {})
        leave_nesting()
        return function(*args, **kwargs)

    return in_half


def _lowered(
    function: Callable[..., Any], dtype: torch.dtype, args: Any, kwargs: dict[str, Any]
) -> Any:
    args, kwargs = _cast((args, kwargs), dtype)
    return function(*args, **kwargs)


def float_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function in float32, with float32 arguments."""

    @functools.wraps(function)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        session = activation.session()
        if session is None or session.stands_aside or is_compiling():
            return function(*args, **kwargs)
        with exempted():
            args, kwargs = to_float32((args, kwargs))
            return function(*args, **kwargs)

    return in_float32


def promote_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function with all its tensors in the widest dtype among them."""

    @functools.wraps(function)
    def in_widest(*args: Any, **kwargs: Any) -> Any:
        dtypes = {tensor.dtype for tensor in _floats(args, kwargs)}
        if activation.session() is not None and len(dtypes) > 1:
            args, kwargs = _cast((args, kwargs), torch.float32)
        return function(*args, **kwargs)

    return in_widest


def register_half_function(module: Any, name: str) -> None:
    """Put `half_function` around what `module` has under a name."""
    _register(module, name, half_function)


def register_float_function(module: Any, name: str) -> None:
    """Put `float_function` around what `module` has under a name."""
    _register(module, name, float_function)


def register_promote_function(module: Any, name: str) -> None:
    """Put `promote_function` around what `module` has under a name."""
    _register(module, name, promote_function)


def _register(module: Any, name: str, around: Callable[..., Any]) -> None:
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {module}.")
    session = activation.session()
    if session is not None:
        owner = getattr(module, "__qualname__", module.__name__)
        session.ledger.replace(module, name, around(getattr(module, name)), f"{owner}:{name}")


def _floats(args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, (args, kwargs))
    return [tensor for tensor in found if tensor.dtype in _FLOATS]


def _first_float32(args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    floats = (tensor for tensor in _floats(args, kwargs) if tensor.dtype is torch.float32)
    return next(floats, None)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.dtype in _FLOATS else tensor

    return tree_map_only(torch.Tensor, cast, values)


# The interface of 2018: a handle


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle:
    """As ``initialize(opt_level="O1")``, before there are models."""
    explicit = None if loss_scale == "dynamic" else loss_scale
    initialize(None, enabled=enabled, loss_scale=explicit)
    return AmpHandle(enabled)


class AmpHandle:
    """What `init` returns."""

    def __init__(self, enabled: bool) -> None:
        self._is_active = enabled
        self.has_cache = self.verbose = False

    def is_active(self) -> bool:
        """Whether it was enabled."""
        return self._is_active

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor, optimizer: Any) -> Iterator[torch.Tensor]:
        """The loss itself."""
        yield loss

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """An optimizer with a ``scale_loss`` of its own."""
        return OptimWrapper(optimizer)

    def _disable_casts(self) -> contextlib.AbstractContextManager[None]:
        return disable_casts()

    def _clear_cache(self) -> None:
        pass

    def _deactivate(self) -> None:
        pass


class OptimWrapper:
    """An optimizer as `AmpHandle.wrap_optimizer` gives it back."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        """The loss itself."""
        yield loss

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._optimizer, name)
