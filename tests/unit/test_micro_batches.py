"""Splitting a combined batch: every nest a loader yields, along dim 0, without a copy."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import popdist
from popdist.errors import BatchError
from popdist.ground.layout import micro_batch_rows
from popdist.step.training.micro_batches import count_samples, slice_batch, split_batch, to_device

Pair = namedtuple("Pair", ["x", "y"])  # noqa: PYI024 - the untyped kind is what programs have


@dataclass
class Sample:
    """A batch as a dataclass, with something that is no tensor in it."""

    x: Tensor
    weight: float = 1.0


X = torch.arange(10).view(5, 2)
Y = torch.arange(5)


@given(samples=st.integers(0, 60), replicas=st.integers(1, 6), accumulation=st.integers(1, 6))
def test_rows_are_split_as_tensor_split_does(samples: int, replicas: int, accumulation: int) -> None:
    """First over replicas, then over accumulation; nothing lost, parts equal but for one sample."""
    rows = micro_batch_rows(samples, replicas, accumulation)

    expected = [
        part.tolist()
        for local in torch.arange(samples).tensor_split(replicas)
        for part in local.tensor_split(accumulation)
    ]
    assert [list(part) for part in rows] == expected


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (Y, Y[1:3]),
        ((X, Y), (X[1:3], Y[1:3])),
        ([X, (Y,)], [X[1:3], (Y[1:3],)]),
        ({"x": X, "name": "digits", 3: None}, {"x": X[1:3], "name": "digits", 3: None}),
        (OrderedDict(x=X), OrderedDict(x=X[1:3])),
        (UserDict(x=X), UserDict(x=X[1:3])),
        (Pair(X, {"y": Y}), Pair(X[1:3], {"y": Y[1:3]})),
        (Sample(x=X, weight=2.0), Sample(x=X[1:3], weight=2.0)),
        ((X, list("abcde"), 7), (X[1:3], ["b", "c"], 7)),
        ((X, []), (X[1:3], [])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_nests_keep_their_types(batch: Any, expected: Any) -> None:
    """Tensors and rows of strings are cut; what is neither goes to every micro batch."""
    assert count_samples(batch) == 5
    cut = slice_batch(batch, range(1, 3))

    assert type(cut) is type(expected)
    assert repr(cut) == repr(expected)


def test_micro_batches_are_views() -> None:
    """Splitting copies no samples."""
    cut = slice_batch((X, Y), range(2, 5))

    assert cut[0].untyped_storage().data_ptr() == X.untyped_storage().data_ptr()


def test_what_begins_at_an_odd_place_is_copied_with_its_strides() -> None:
    """Rows of a slice, of an expanded tensor and of overlapping windows keep values and strides, in nests too."""
    whole = torch.arange(63.0).view(9, 7)
    parts = [
        whole[1:4],
        whole[2:, 1:4],
        whole[:, 3:4].expand(9, 5),
        whole.view(-1)[1:].unfold(0, 5, 2),
        whole.T[1:],
    ]

    for nest in (parts, {"x": parts}, tuple(parts)):
        moved = to_device(nest, torch.device("cpu"))
        for part, expected in zip(moved["x"] if isinstance(moved, dict) else moved, parts, strict=True):
            assert part.data_ptr() % 64 == 0
            assert torch.equal(part, expected)
            assert part.stride() == expected.stride()
    assert to_device(whole[0:3], torch.device("cpu")).data_ptr() == whole.data_ptr()


def test_the_batch_itself_is_not_changed() -> None:
    """A mapping is copied before its values are replaced."""
    batch = {"x": X}
    slice_batch(batch, range(1))

    assert batch["x"] is X


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (3, "a int without a tensor|int without a tensor"),
        ({"a": [], "b": None}, "dict without a tensor"),
        ((X, {"mask": Y[:3]}), r"batch\[1\]\['mask'\] holds 3 samples and batch\[0\] 5"),
        ([X, [X, torch.tensor(1.0)]], r"batch\[1\]\[1\] is a tensor of shape \(\)"),
        (Pair(X, Sample(x=Y[:1])), r"batch\.y\.x holds 1 samples and batch\.x 5"),
        ((X, ["a", "b"]), r"batch\[1\] holds 2 samples"),
    ],
)
def test_a_batch_that_does_not_split_names_the_place(batch: object, message: str) -> None:
    """The place is written as Python reaches it."""
    with pytest.raises(BatchError, match=message):
        count_samples(batch)


def test_the_accumulation_of_a_loader_is_meant() -> None:
    """Where a batch of its brings other micro batches than the loop asks for."""
    batch = next(iter(popdist.data_loader(range(8), 4, accumulation=2)))
    with pytest.raises(
        BatchError, match=r"has 2 micro batches, and this step needs 8: .*micro_batch_size, accumulation=8\)"
    ):
        split_batch(batch, 1, 8)


def test_accumulation_is_at_least_one() -> None:
    """There is no step without micro batches."""
    with pytest.raises(BatchError, match="accumulation=0 must be a whole number of at least 1"):
        split_batch(X, 2, 0)
