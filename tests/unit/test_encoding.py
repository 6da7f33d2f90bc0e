"""States become JSON and tensors and come back as they were; what is neither is refused with its place."""

import json
from collections import Counter, OrderedDict
from datetime import date
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import popdist
from popdist.checkpoint.encoding import decode, encode, tensors_of
from popdist.ground.local_tensors import TensorForm

SCALARS = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
KEYS = st.none() | st.integers() | st.text()


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Everything that a state may be made of."""
    return (
        st.lists(children)
        | st.lists(children).map(tuple)
        | st.dictionaries(KEYS, children)
        | st.dictionaries(KEYS, children).map(OrderedDict)
        | st.dictionaries(KEYS, st.integers()).map(Counter)
    )


def through_json(state: object) -> Any:
    """``state`` after it was text."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(state, "state", tensors), allow_nan=False)
    assert tensors_of(json.loads(text)) == set(tensors)
    return decode(json.loads(text), tensors)


@given(st.recursive(SCALARS, containers, max_leaves=20))
def test_a_state_comes_back(state: object) -> None:
    """Equal, of the same types, infinities and keys that are no strings included."""
    found = through_json(state)

    assert found == state
    assert type(found) is type(state)
    assert repr(found) == repr(state)


def test_tensors_come_back_wherever_they_stand() -> None:
    """Each under a name of its own, also where two places would have the same name; no gradient is held."""
    one, two, three = torch.ones(1, requires_grad=True), torch.ones(2), torch.ones(3)
    found = through_json({"a.b": one, "a": {"b": two}, "list": (three,), 3: one})

    assert [len(it) for it in (found["a.b"], found["a"]["b"], found["list"][0], found[3])] == [1, 2, 3, 1]
    assert not found["a.b"].requires_grad


def test_a_module_s_versions_come_back() -> None:
    """What torch keeps beside the keys of a state dict."""
    state = nn.BatchNorm1d(2).state_dict()
    assert through_json(state)._metadata == state._metadata  # type: ignore[attr-defined] # torch's own hiding place


@pytest.mark.parametrize(
    ("state", "fault"),
    [
        ({"a": [0, {"when": date(2000, 1, 1)}]}, r"state\.a\.1\.when is a date"),
        ({"a": {1, 2}}, r"state\.a is a set"),
        ({"a": lambda: None}, r"state\.a is a function"),
        ({"a": {(1, 2): 3}}, r"state\.a has the key \(1, 2\)"),
        ({"a": torch.eye(2).to_sparse()}, r"state\.a is a tensor that is sparse"),
        ({"a": torch.empty(2, device="meta")}, r"state\.a is a tensor .*without values"),
    ],
)
def test_anything_else_is_refused(state: object, fault: str) -> None:
    """The message names the place, so that it can be found in a large state."""
    with pytest.raises(popdist.CheckpointError, match=fault):
        encode(state, "state", {})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(()),
        torch.empty(0, 3),
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(3, 4, dtype=torch.bfloat16).t(),
        torch.empty(1, dtype=torch.float8_e4m3fn).expand(5),
        torch.empty(4, 4)[:, ::2],
    ],
)
def test_room_is_made_in_the_same_order_of_memory(tensor: torch.Tensor) -> None:
    """Shape and dtype are the same; so are the strides of a tensor that fills its memory."""
    form = TensorForm.from_json(json.loads(json.dumps(TensorForm.of(tensor).to_json())))
    room = form.empty()

    assert (room.shape, room.dtype) == (tensor.shape, tensor.dtype)
    assert room.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    assert room.stride() == tensor.clone(memory_format=torch.preserve_format).stride()
    assert form.view(torch.zeros(form.num_bytes + 8, dtype=torch.uint8)).stride() == room.stride()
    assert TensorForm.of(torch.zeros(()).expand(1)).stride == (1,)
