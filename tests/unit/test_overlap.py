"""Buckets hold every number of the flat buffers once, the last ones first, and so do their pieces."""

from itertools import pairwise
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from popdist.gradients import overlap
from popdist.gradients.flat_buffers import ALIGNMENT, GradientLayout

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]

PARAMETERS = st.lists(st.tuples(st.integers(0, 70), st.sampled_from(DTYPES)), max_size=20)


@given(PARAMETERS, st.sampled_from([1, 16, 48, 1 << 20]))
def test_buckets_hold_every_number_once(parameters: list[tuple[int, torch.dtype]], bucket_size: int) -> None:
    """From each buffer's end to its beginning, each large enough, the next twice as large, but for the last."""
    named = [(str(i), Parameter(torch.zeros(size, dtype=dtype))) for i, (size, dtype) in enumerate(parameters)]
    buffers = GradientLayout(named).flat_buffers
    with mock.patch.object(overlap, "BUCKET_SIZE", bucket_size):
        made = overlap.make_buckets(buffers)

    for number, buffer in enumerate(buffers):
        own = [it for it in made if it.buffer == number]
        assert [it.stop for it in own] == ([buffer.size, *[it.start for it in own[:-1]]] if buffer.size else [])
        assert all(it.stop - it.start >= bucket_size << min(k, 3) for k, it in enumerate(own[:-1]))
        assert not own or own[-1].start == 0
    members = [index for it in made for index in it.members]
    assert sorted(members) == [index for index, (size, _) in enumerate(parameters) if size]
    assert all(min(left.members) > min(right.members) for left, right in pairwise(made))


@given(st.integers(0, 9), st.integers(1, 40))
def test_pieces_hold_every_number_once(start: int, num_lines: int) -> None:
    """They begin at lines of cache, are equal but for the last, and none is much longer than meant."""
    first, stop = start * ALIGNMENT, (start + num_lines) * ALIGNMENT
    with mock.patch.object(overlap, "PIECE_SIZE", 4 * ALIGNMENT):
        runs = overlap.runs_of(overlap.Bucket(buffer=0, start=first, stop=stop, members=()))

    assert [it.start for it in runs] == [first, *[it.stop for it in runs[:-1]]]
    assert runs[-1].stop == stop
    lengths = [it.stop - it.start for it in runs]
    assert len({*lengths[:-1]}) <= 1
    assert 0 < lengths[-1] <= lengths[0] <= 6 * ALIGNMENT
    assert not any(it % ALIGNMENT for it in lengths)
