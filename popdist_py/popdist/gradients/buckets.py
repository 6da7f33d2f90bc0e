"""Buckets: the gradients of a model, in the parts in which they are sent while the backward pass runs.

A bucket is complete when all gradients in it are there, and then it leaves, in pieces. The first one is small, so
that a slow network begins early. Each next one has twice as many numbers, up to eight times the first: a slow
network is still busy with the one before, and on a fast one few large messages take less time of the cores than
many small ones, because the threads that carry them wake less often beside the computation. Pure.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from popdist.gradients.rows import ALIGNMENT, RowKind, num_reals

BUCKET_SIZE: Final = 1 << 20
"""Numbers in the first bucket of a row, or more where the last gradient in it is large."""

NUM_DOUBLINGS: Final = 3
"""How often the next bucket has at least twice as many."""

PIECE_SIZE: Final = 1 << 21
"""Numbers that travel together, about: three quarters to one and a half of it, or a bucket of fewer.

What is left of a bucket travels with the others: few numbers would cost a message and two changes of thread, too.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients side by side in one row, which are sent together.

    Attributes:
        kind: Which row.
        start: Its first number there.
        stop: The number after its last one.
        members: Positions of their parameters among all.
    """

    kind: int
    start: int
    stop: int
    members: tuple[int, ...]

    @property
    def run(self) -> slice:
        """Where its numbers are in the row."""
        return slice(self.start, self.stop)


def make_buckets(kinds: Sequence[RowKind]) -> list[Bucket]:
    """All rows in buckets, from the end of each to its beginning: the last parameters come first."""
    buckets = [bucket for number, kind in enumerate(kinds) for bucket in _buckets_of(number, kind)]
    return sorted(buckets, key=lambda bucket: min(bucket.members), reverse=True)


def _buckets_of(number: int, kind: RowKind) -> Iterable[Bucket]:
    stop, members, size = kind.size, [], BUCKET_SIZE
    for index, parameter, start in reversed(kind.members):
        if num_reals(parameter):
            members.append(index)
        if members and (stop - start >= size or start == 0):
            yield Bucket(kind=number, start=start, stop=stop, members=tuple(members))
            stop, members, size = start, [], min(2 * size, BUCKET_SIZE << NUM_DOUBLINGS)


def runs_of(bucket: Bucket) -> list[slice]:
    """Where the pieces of a bucket are in the row: equal ones, but for the last, which begin at lines of cache."""
    size = bucket.stop - bucket.start
    num_pieces = max(1, (size + PIECE_SIZE // 2) // PIECE_SIZE)
    width = -(-size // (num_pieces * ALIGNMENT)) * ALIGNMENT
    starts = range(bucket.start, bucket.stop, width)
    return [slice(start, min(start + width, bucket.stop)) for start in starts]


def digest_of(buckets: Iterable[Bucket]) -> bytes:
    """A digest: the same for the same buckets."""
    return hashlib.blake2b(repr(list(buckets)).encode(), digest_size=16).digest()
