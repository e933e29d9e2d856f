"""What leaves a region: every half tensor becomes float32, and nothing else changes."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributions import Categorical, Independent, Normal
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from autoamp.casting import to_float32

HALVES = (torch.float16, torch.bfloat16)
Pair = namedtuple("Pair", "first second")


class Checked(NamedTuple):
    tensor: Any
    count: int = 3


@dataclass
class Plain:
    tensor: Any
    label: str = "plain"
    unset: Any = field(init=False)


@dataclass(frozen=True)
class Frozen:
    tensor: Any
    label: str = "frozen"


@dataclass(slots=True)
class Slotted:
    tensor: Any
    label: str = "slotted"


@dataclass(frozen=True, slots=True)
class FrozenSlotted:
    tensor: Any
    label: str = "frozen and slotted"


class ModelOutput(OrderedDict):
    """As in Hugging Face's transformers: one content as items, attributes and a tuple."""

    def __post_init__(self):
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is not None:
                self[entry.name] = value

    def __delitem__(self, *args, **kwargs):
        raise TypeError("no __delitem__")

    def setdefault(self, *args, **kwargs):
        raise TypeError("no setdefault")

    def pop(self, *args, **kwargs):
        raise TypeError("no pop")

    def update(self, *args, **kwargs):
        raise TypeError("no update")

    def __getitem__(self, key):
        return dict(self.items())[key] if isinstance(key, str) else self.to_tuple()[key]

    def __setattr__(self, name, value):
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self):
        make, _, *rest = super().__reduce__()
        return make, tuple(getattr(self, entry.name) for entry in fields(self)), *rest

    def to_tuple(self):
        return tuple(self[key] for key in self.keys())


@dataclass
class Output(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden: tuple[torch.Tensor, ...] | None = None


def half(*values: float, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.tensor(values or (1.0, 2.0), dtype=dtype)


def is_float32(tensor: torch.Tensor, *values: float) -> bool:
    return tensor.dtype is torch.float32 and tensor.tolist() == list(values or (1.0, 2.0))


# --- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_a_half_tensor_becomes_float32_with_the_same_values(dtype):
    assert is_float32(to_float32(half(0.5, -3.0, dtype=dtype)), 0.5, -3.0)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.complex64, torch.int64, torch.uint8, torch.bool],
)
def test_a_tensor_of_any_other_dtype_is_returned_itself(dtype):
    tensor = torch.ones(2, dtype=dtype)
    assert to_float32(tensor) is tensor
    assert to_float32((tensor,))[0] is tensor


def test_gradients_flow_back_through_the_cast_in_half():
    source = half().requires_grad_()
    held = {"a": [source * 2]}
    out = to_float32(held)["a"][0]
    out.backward(torch.tensor([3.0, 5.0]))
    assert (source.grad.dtype, source.grad.tolist()) == (torch.float16, [6.0, 10.0])


def test_inference_tensors_are_cast_too():
    with torch.inference_mode():
        tensor = half()
        assert is_float32(to_float32([tensor])[0])


# --- containers ----------------------------------------------------------------------------------

CONTAINERS = {
    "tuple": (lambda t: (t, "a", None), lambda v: v[0]),
    "named tuple": (lambda t: Pair(1, t), lambda v: v.second),
    "NamedTuple": (Checked, lambda v: v.tensor),
    "list": (lambda t: [0, t], lambda v: v[1]),
    "dict": (lambda t: {"a": 1, 2: t}, lambda v: v[2]),
    "OrderedDict": (lambda t: OrderedDict(z=t, a=1), lambda v: v["z"]),
    "Counter": (lambda t: Counter(a=t), lambda v: v["a"]),
    "dataclass": (Plain, lambda v: v.tensor),
    "frozen dataclass": (Frozen, lambda v: v.tensor),
    "slotted dataclass": (Slotted, lambda v: v.tensor),
    "frozen slotted dataclass": (FrozenSlotted, lambda v: v.tensor),
    "model output": (lambda t: Output(logits=t), lambda v: v.logits),
    "nested": (
        lambda t: [{"a": (Plain([Pair(FrozenSlotted(t), 0)]),)}],
        lambda v: v[0]["a"][0].tensor[0].first.tensor,
    ),
}
kinds = pytest.mark.parametrize("kind", CONTAINERS)


@kinds
def test_a_container_with_a_half_tensor_is_copied_and_never_edited(kind):
    build, look = CONTAINERS[kind]
    tensor = half()
    value = build(tensor)
    result = to_float32(value)
    assert is_float32(look(result))
    assert type(result) is type(value)
    assert result is not value
    assert look(value) is tensor
    assert tensor.dtype is torch.float16


@kinds
def test_a_container_without_a_half_tensor_is_returned_itself(kind):
    build, look = CONTAINERS[kind]
    tensor = torch.ones(2)
    value = build(tensor)
    assert to_float32(value) is value
    assert look(value) is tensor


@kinds
def test_a_tensor_that_came_in_as_half_goes_out_as_half_wherever_it_is(kind):
    build, _ = CONTAINERS[kind]
    tensor = half()
    value = build(tensor)
    for came_in in [(tensor,), ([tensor], {}), ({"x": (tensor,)},), (1, {"key": tensor})]:
        assert to_float32(value, came_in) is value


@kinds
def test_a_half_tensor_is_found_wherever_it_came_in(kind):
    """A loss that gives back what it was given: the caller passed it in half, in a container."""
    build, _ = CONTAINERS[kind]
    tensor = half()
    assert to_float32(tensor, (build(tensor),)) is tensor


def test_only_what_came_in_stays_half():
    came, made = half(), half(3.0)
    result = to_float32((came, made), (came, {}))
    assert result[0] is came
    assert is_float32(result[1], 3.0)


def test_the_rest_of_a_container_is_the_same_objects_in_the_same_order():
    other, tensor = object(), half()
    result = to_float32(OrderedDict(z=tensor, y=other, x=[other], a=tensor))
    assert list(result) == ["z", "y", "x", "a"]
    assert result["y"] is other
    assert result["x"][0] is other


def test_an_unchanged_part_of_a_changed_value_is_the_same_object():
    untouched = [torch.ones(1), {"a": (1, 2)}]
    assert to_float32([untouched, half()])[0] is untouched


def test_a_defaultdict_keeps_its_default():
    result = to_float32(defaultdict(list, a=half()))
    assert type(result) is defaultdict
    assert is_float32(result["a"])
    assert result["new"] == []


def test_a_subclass_with_attributes_keeps_them():
    class Rows(list):
        source = "class"

    rows = Rows([half()])
    rows.source = "instance"
    result = to_float32(rows)
    assert (type(result), result.source) == (Rows, "instance")
    assert is_float32(result[0])


def test_a_dataclass_keeps_its_other_fields_and_lacks_what_it_lacked():
    result = to_float32(Plain(half(), label="mine"))
    assert result.label == "mine"
    assert not hasattr(result, "unset")


def test_a_model_output_says_the_same_as_items_attributes_and_tuple():
    tensor, state = half(), half(5.0)
    value = Output(logits=tensor, hidden=(state, torch.zeros(1)))
    result = to_float32(value)
    assert type(result) is Output
    assert list(result) == ["logits", "hidden"]
    assert result.loss is None
    assert is_float32(result.logits)
    assert result.logits is result["logits"] is result[0] is result.to_tuple()[0]
    assert is_float32(result.hidden[0], 5.0)
    assert result.hidden is result["hidden"] is result[1]
    assert result.hidden[1] is value.hidden[1]
    assert value.logits is value["logits"] is tensor
    assert value.hidden is value["hidden"]
    assert value.hidden[0] is state


def test_a_packed_sequence_stays_one():
    packed = pack_sequence([half(1, 2, 3), half(4, 5)])
    result = to_float32(packed)
    assert type(result) is PackedSequence
    assert is_float32(result.data, 1, 4, 2, 5, 3)
    assert packed.data.dtype is torch.float16
    assert result.batch_sizes is packed.batch_sizes
    padded, lengths = pad_packed_sequence(result, batch_first=True)
    assert padded.tolist() == [[1, 2, 3], [4, 5, 0]]
    assert lengths.tolist() == [3, 2]


def test_a_torch_size_is_returned_itself():
    size = torch.Size([2, 3])
    assert to_float32(size) is size


def test_torchs_own_named_tuples_stay_what_they_are():
    """What ``max``, ``sort`` and ``topk`` return."""
    values, indices = torch.max(half(1.0, 3.0, 2.0).reshape(1, 3), dim=1)
    result = to_float32(torch.return_types.max((values, indices)))
    assert type(result) is torch.return_types.max
    assert is_float32(result.values, 3.0)
    assert result.indices is indices


@pytest.mark.parametrize(
    "value",
    [None, 1, "text", b"", object(), int, Plain, {1, 2}, SimpleNamespace(a=1), (), [], {}],
    ids=lambda value: type(value).__name__,
)
def test_what_holds_no_tensor_is_returned_itself(value):
    assert to_float32(value) is value


@pytest.mark.parametrize("value", [SimpleNamespace(a=half()), {half()}, UserDict(a=half())])
def test_objects_that_are_no_containers_are_not_looked_into(value):
    assert to_float32([value])[0] is value


# --- distributions -------------------------------------------------------------------------------


def test_a_normal_distribution_is_one_in_float32():
    value = Normal(half(0.0, 1.0), half(1.0, 2.0))
    result = to_float32(value)
    assert type(result) is Normal
    assert is_float32(result.loc, 0.0, 1.0)
    assert is_float32(result.scale, 1.0, 2.0)
    assert value.loc.dtype is torch.float16
    assert result.log_prob(torch.zeros(2)).dtype is torch.float32
    assert result.rsample().dtype is torch.float32


def test_an_independent_distribution_is_cast_inside():
    value = Independent(Normal(half(), half()), 1)
    result = to_float32(value)
    assert type(result) is Independent
    assert result.log_prob(torch.zeros(2)).shape == ()
    assert result.mean.dtype is torch.float32
    assert value.mean.dtype is torch.float16
    assert (result.batch_shape, result.event_shape) == (torch.Size([]), torch.Size([2]))


@pytest.mark.parametrize("given", ["logits", "probs"])
def test_a_categorical_distribution_is_one_in_float32(given):
    value = Categorical(**{given: half(0.25, 0.75)})
    result = to_float32({"policy": value})["policy"]
    assert type(result) is Categorical
    assert getattr(result, given).dtype is torch.float32
    assert getattr(value, given).dtype is torch.float16
    assert result.log_prob(torch.tensor(1)).dtype is torch.float32
    assert result.entropy().dtype is torch.float32


def test_a_float32_distribution_is_returned_itself():
    value = Independent(Normal(torch.zeros(2), torch.ones(2)), 1)
    assert to_float32(value) is value


# --- identity ------------------------------------------------------------------------------------


def test_one_tensor_in_two_places_stays_one():
    tensor = half()
    first, second, inner = to_float32((tensor, [tensor], Plain(tensor)))
    assert first is second[0] is inner.tensor
    assert is_float32(first)


def test_one_container_in_two_places_stays_one():
    shared = [half()]
    first, second = to_float32((shared, {"again": shared}))
    assert first is second["again"]
    assert is_float32(first[0])


def test_two_equal_tensors_stay_two():
    first, second = to_float32([half(), half()])
    assert first is not second
    assert first.data_ptr() != second.data_ptr()


def test_a_list_that_holds_itself_is_no_endless_story():
    value: list[Any] = [half()]
    value.append(value)
    result = to_float32(value)
    assert is_float32(result[0])
    assert isinstance(result[1], list)
    nothing: list[Any] = [torch.ones(1)]
    nothing.append({"self": nothing})
    assert to_float32(nothing) is nothing


def test_an_argument_that_holds_itself_is_no_endless_story():
    argument: dict[str, Any] = {"x": half()}
    argument["self"] = argument
    assert is_float32(to_float32(half(3.0), (argument,)), 3.0)


def test_a_value_nested_deeper_than_the_stack_does_not_break_the_call():
    value: Any = torch.ones(1)
    for _ in range(5000):
        value = [value]
    assert to_float32(value) is value


def test_a_container_that_refuses_to_be_changed_does_not_break_the_call():
    class ReadOnly(dict):
        def __setitem__(self, key, value):
            raise TypeError("read-only")

    value = ReadOnly(a=half())
    assert list(to_float32(value)) == ["a"]
    assert value["a"].dtype is torch.float16
