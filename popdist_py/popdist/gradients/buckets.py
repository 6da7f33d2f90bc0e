"""Rows of gradients in buckets, in the order in which a backward pass is expected to complete them. Pure."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from popdist.gradients.flat_gradients import RowKind
from popdist.gradients.rows import num_reals

BUCKET_SIZE: Final = 1 << 20
"""Numbers in a bucket, or more where the last slot in it is large: what is worth a message of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Slots side by side in one row.

    Attributes:
        kind: Which row.
        start: Its first number there.
        stop: The number after its last one.
        members: Positions, among all parameters, of those whose slots these are.
    """

    kind: int
    start: int
    stop: int
    members: tuple[int, ...]

    @property
    def run(self) -> slice:
        """Its numbers in the row."""
        return slice(self.start, self.stop)


def make_buckets(kinds: Sequence[RowKind]) -> list[Bucket]:
    """All rows in buckets, from the end of each to its beginning: the last parameters come first."""
    buckets = [bucket for number, kind in enumerate(kinds) for bucket in _buckets_of(number, kind)]
    return sorted(buckets, key=lambda bucket: min(bucket.members), reverse=True)


def _buckets_of(number: int, kind: RowKind) -> Iterable[Bucket]:
    stop, members = kind.size, []
    for index, parameter, start in reversed(kind.members):
        if num_reals(parameter):
            members.append(index)
        if members and (stop - start >= BUCKET_SIZE or start == 0):
            yield Bucket(kind=number, start=start, stop=stop, members=tuple(members))
            stop, members = start, []


def digest_of(buckets: Iterable[Bucket]) -> bytes:
    """The same for the same buckets."""
    return hashlib.blake2b(repr(list(buckets)).encode(), digest_size=16).digest()
