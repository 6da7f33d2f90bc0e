"""Gradients fill rows; buckets hold every number of these once, the last ones first, and so do their pieces."""

from collections.abc import Callable
from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from popdist.gradients import buckets, notes
from popdist.gradients import rows as gradient_rows
from popdist.gradients.rows import ALIGNMENT, FlatGradients

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]

PARAMETERS = st.lists(st.tuples(st.integers(0, 70), st.sampled_from(DTYPES)), max_size=20)


@given(PARAMETERS, st.sampled_from([1, 16, 48, 1 << 20]))
def test_buckets_hold_every_number_once(parameters: list[tuple[int, torch.dtype]], bucket_size: int) -> None:
    """From the end of each row to its beginning, each large enough, the next twice as large, but for the last."""
    named = [(str(i), Parameter(torch.zeros(size, dtype=dtype))) for i, (size, dtype) in enumerate(parameters)]
    kinds = FlatGradients(named).kinds
    with mock.patch.object(buckets, "BUCKET_SIZE", bucket_size):
        made = buckets.make_buckets(kinds)

    for number, kind in enumerate(kinds):
        own = [it for it in made if it.kind == number]
        assert [it.stop for it in own] == ([kind.size, *[it.start for it in own[:-1]]] if kind.size else [])
        assert all(it.stop - it.start >= bucket_size << min(k, 3) for k, it in enumerate(own[:-1]))
        assert not own or own[-1].start == 0
    members = [index for it in made for index in it.members]
    assert sorted(members) == [index for index, (size, _) in enumerate(parameters) if size]
    assert all(min(left.members) > min(right.members) for left, right in pairwise(made))


@given(st.integers(0, 9), st.integers(1, 40))
def test_pieces_hold_every_number_once(start: int, num_lines: int) -> None:
    """They begin at lines of cache, are equal but for the last, and none is much longer than meant."""
    first, stop = start * ALIGNMENT, (start + num_lines) * ALIGNMENT
    with mock.patch.object(buckets, "PIECE_SIZE", 4 * ALIGNMENT):
        runs = buckets.runs_of(buckets.Bucket(kind=0, start=first, stop=stop, members=()))

    assert [it.start for it in runs] == [first, *[it.stop for it in runs[:-1]]]
    assert runs[-1].stop == stop
    lengths = [it.stop - it.start for it in runs]
    assert len({*lengths[:-1]}) <= 1
    assert 0 < lengths[-1] <= lengths[0] <= 6 * ALIGNMENT
    assert not any(it % ALIGNMENT for it in lengths)


KINDS_OF_GRADIENTS: tuple[Callable[[], tuple[Parameter, torch.Tensor | None]], ...] = (
    lambda: (Parameter(torch.ones(3, 5)), torch.randn(3, 5)),
    lambda: (Parameter(torch.ones(3, 5)), torch.randn(5, 3).t()),
    lambda: (Parameter(torch.ones(5, 3).t()), torch.randn(5, 3).t()),
    lambda: (Parameter(torch.ones(1, 5)), torch.randn(5, 1).t()),
    lambda: (Parameter(torch.ones(3)), torch._neg_view(torch.randn(3))),
    lambda: (Parameter(torch.ones(3)), torch.randn(3, requires_grad=True) * 2),
    lambda: (Parameter(torch.ones(3)), None),
    lambda: (Parameter(torch.ones(3)), Parameter(torch.randn(3))),
    lambda: (Parameter(torch.ones(())), torch.randn(())),
    lambda: (Parameter(torch.ones(0, 2)), torch.randn(0, 2)),
    lambda: (Parameter(torch.ones(2, dtype=torch.float64)), torch.randn(2, dtype=torch.float64)),
    lambda: (Parameter(torch.ones(2, dtype=torch.float64)), None),
    lambda: (Parameter(torch.ones(2, dtype=torch.bfloat16)), torch.randn(2, dtype=torch.bfloat16)),
    lambda: (Parameter(torch.ones(2, dtype=torch.complex64)), torch.randn(2, dtype=torch.complex64).conj()),
    lambda: (Parameter(torch.ones(300, 300)), torch.randn(300, 300)),
    lambda: (Parameter(torch.ones(2, 2, 3, 3).to(memory_format=torch.channels_last)), torch.randn(2, 2, 3, 3)),
)


@pytest.mark.parametrize("fill", [notes.fill_slots, notes._fill_slots])
@given(st.lists(st.sampled_from(KINDS_OF_GRADIENTS), max_size=70), st.booleans())
def test_gradients_of_every_kind_fill_their_slots(
    fill: notes.FillSlots,
    kinds: list[Callable[[], tuple[Parameter, torch.Tensor | None]]],
    are_taken: bool,  # noqa: FBT001 - drawn
) -> None:
    """With and without the extension: slots hold their numbers or zeros, and torch has counted a write."""
    pairs = [kind() for kind in kinds]
    gradients = FlatGradients((str(i), parameter) for i, (parameter, _) in enumerate(pairs))
    rows = gradients.make_rows()
    versions = [row._version for row in rows.rows]
    for row in rows.rows:
        row.fill_(7)
    for parameter, gradient in pairs:
        parameter.grad = gradient

    with mock.patch.object(gradient_rows, "fill_slots", fill):
        used = gradients.fill(rows, are_taken=are_taken)

    assert used == sum(1 << i for i, (_, gradient) in enumerate(pairs) if gradient is not None)
    for slot, (parameter, gradient) in zip(rows.in_order, pairs, strict=True):
        expected = torch.zeros_like(parameter) if gradient is None else gradient
        assert torch.equal(slot, expected.to(slot.dtype))
        assert parameter.grad is (None if are_taken else gradient)
        assert slot.stride() == torch.empty_like(parameter).stride()
    assert all(row._version > 1 + version for row, version in zip(rows.rows, versions, strict=True))
