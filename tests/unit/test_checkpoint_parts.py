"""What the instances of a replica have of a model is joined, and cut again; what does not fit together is named.

Holds popdist.checkpoint.parts and popdist.checkpoint.tensor_pieces.
"""

from typing import Any

import pytest
import torch

from popdist.checkpoint.encoding import decode, encode
from popdist.checkpoint.parts import cut_optimizer, cut_randomness, join_optimizers, place
from popdist.checkpoint.tensor_pieces import Held, TensorPiece, plan_writes
from popdist.errors import CheckpointError
from popdist.ground.local_tensors import TensorForm


def held(offsets: list[int], sizes: list[int], shape: list[int], total: int | None = None) -> Held:
    """A piece of a tensor of this shape, as it comes over the network."""
    form = TensorForm.of(torch.empty(shape))
    return Held.from_json([form.to_json(), offsets, sizes, total])


def test_each_piece_is_written_once() -> None:
    """By the first instance that has it; a plain tensor by the first of all."""
    left, right = held([0, 0], [2, 3], [4, 3]), held([2, 0], [2, 3], [4, 3])
    copy, empty = held([0], [2], [2], total=7), held([0, 0], [0, 3], [0, 3])

    plan = plan_writes([{"a": left, "b": copy}, {"a": right, "b": copy}, {"a": left, "c": empty}])

    assert plan.writes == [["a", "b"], ["a"], ["c"]]
    assert {name: f"{form}" for name, form in plan.forms.items()} == {
        "a": "float32[4, 3]",
        "b": "float32[2]",
        "c": "float32[0, 3]",
    }
    assert left.piece == TensorPiece(offsets=(0, 0), sizes=(2, 3))


@pytest.mark.parametrize(
    ("first", "second", "fault"),
    [
        (
            held([0], [2], [2]),
            held([0], [3], [3]),
            r"w is float32\[2\] on instance 0 and float32\[3\] on instance 1",
        ),
        (held([0], [2], [2], 5), held([0], [2], [2], 6), "w has other values on instance 0 than on instance 1"),
        (held([0], [1], [4]), held([1], [2], [4]), r"the instances hold 3 elements of w, which is float32\[4\]"),
        (held([0], [4], [4]), held([0], [2], [4]), "hold 6 elements of w"),
    ],
)
def test_parts_that_are_no_whole_are_refused(first: Held, second: Held, fault: str) -> None:
    """Other shapes, other values of what should be copies, gaps, and pieces that overlap."""
    with pytest.raises(CheckpointError, match=fault):
        plan_writes([{"w": first}, {"w": second}])


def optimizer_state(names: list[str], rate: float = 0.1) -> Any:
    """The encoded state of an optimizer with two groups, the second without parameters."""
    groups = [{"lr": rate, "params": names}, {"lr": 1.0, "params": []}]
    return encode({"state": {name: {"step": 3.0} for name in names}, "param_groups": groups}, "optimizer", {})


def test_optimizers_are_joined_and_cut_by_name() -> None:
    """Whatever order the parameters have on another instance; without names they are all there, in order."""
    joined = join_optimizers("optimizer", {0: optimizer_state(["a", "b"]), 2: optimizer_state(["b", "c"])})

    own = decode(cut_optimizer(joined, [["c", "a"], []]), {})
    assert own["param_groups"] == [{"lr": 0.1, "params": [0, 1]}, {"lr": 1.0, "params": []}]
    assert own["state"] == {0: {"step": 3.0}, 1: {"step": 3.0}}
    assert decode(cut_optimizer(joined, None), {})["param_groups"][0]["params"] == [0, 1, 2]


def test_groups_of_other_settings_are_refused() -> None:
    """An instance whose parameters have another learning rate would lose it."""
    with pytest.raises(
        CheckpointError, match="groups of optimizer are other ones on instance 1 than on instance 0"
    ):
        join_optimizers("optimizer", {0: optimizer_state(["a"]), 1: optimizer_state(["b"], rate=0.2)})


def test_random_states_of_each_part_of_a_replica() -> None:
    """Those of the first part have the replica's name, as have those of a replica that is not shared."""
    saved = encode(
        {place(f"{replica}", part): 10 * replica + part for replica in (0, 1) for part in (0, 1)}, "x", {}
    )

    assert decode(cut_randomness(saved, 0), {}) == {"0": 0, "1": 10}
    assert decode(cut_randomness(saved, 1), {}) == {"0": 1, "1": 11}
