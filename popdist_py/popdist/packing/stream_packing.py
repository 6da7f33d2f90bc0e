"""Packing of a stream of samples, whose lengths are not known before, by best fit over a bounded buffer.

When the buffer is full, its longest sample opens a row. The row gets the longest sample that still fits, until no
sample fits; then the stream fills the buffer again. The rows follow from the stream alone, so that every process
that reads the stream makes the same rows.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from popdist.errors import DatasetError, check_callable, whole_number
from popdist.packing.collation import TOKENS
from popdist.packing.sample_lengths import TooLong
from popdist.packing.strategies import check_limit

Entry = tuple[int, int, Any]
"""A sample's length, its negated number in the stream (so that older samples are taken first), and the sample."""


class StreamRow(list[Any]):
    """The samples that share one packed row of a stream, longest first.

    Attributes:
        num_tokens: Number of real tokens in the row.
    """

    def __init__(self, samples: Iterable[Any], num_tokens: int) -> None:
        super().__init__(samples)
        self.num_tokens = num_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return StreamRow, (list(self), self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStream:
    """A stream of packed rows, each a list of samples; made by :func:`pack_stream`."""

    stream: Iterable[Any]
    max_length: int
    buffer: int
    length_of: Callable[[Any], int]
    max_sequences_per_pack: int
    too_long: TooLong

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` to the stream of samples if this stream has a method ``set_epoch``."""
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[StreamRow]:
        entries: list[Entry] = []
        samples = self._measured()
        has_ended = False
        while True:
            while not has_ended and len(entries) < self.buffer:
                entry = next(samples, None)
                if entry is None:
                    has_ended = True
                else:
                    insort(entries, entry, key=_key)
            if not entries:
                return
            yield self._take_row(entries)

    def _take_row(self, entries: list[Entry]) -> StreamRow:
        """Remove the samples of the next packed row from the buffer ``entries``, and return the row."""
        length, _, sample = entries.pop()
        row, room = [sample], self.max_length - length
        while room and len(row) < self.max_sequences_per_pack:
            place = bisect_right(entries, (room, 0), key=_key)
            if not place:
                break
            length, _, sample = entries.pop(place - 1)
            row.append(sample)
            room -= length
        return StreamRow(row, self.max_length - room)

    def _measured(self) -> Iterator[Entry]:
        """Yield the stream's samples with their lengths; drop samples longer than a row, or raise DatasetError."""
        for number, sample in enumerate(self.stream):
            length = self.length_of(sample)
            if isinstance(length, bool) or not hasattr(length, "__index__") or length < 1:
                raise DatasetError(
                    f"sample {number} of the stream has length {length!r}: a sequence has at least one token; "
                    "leave empty ones out"
                )
            if length <= self.max_length:
                yield int(length), -number, sample
            elif self.too_long != "drop":
                raise DatasetError(
                    f"sample {number} of the stream has {length} tokens, more than max_length={self.max_length}: "
                    "cut it in the stream, or choose too_long='drop'"
                )


def pack_stream(
    stream: Iterable[Any],
    max_length: int,
    *,
    buffer: int = 1000,
    length_of: Callable[[Any], int] | None = None,
    max_sequences_per_pack: int | None = None,
    too_long: TooLong = "error",
) -> PackedStream:
    """Pack a stream of samples into rows; a row is a list of samples with at most ``max_length`` tokens together.

    Pass the result to ``popdist.shard_iterable``, and the sharded stream to ``popdist.data_loader`` with
    ``packing=Packing(...)``. The rows depend only on the stream and on the arguments. A sample waits in the buffer
    until its row is made, at the latest until the stream ends.

    Args:
        stream: Anything that ``shard_iterable`` takes.
        max_length: Tokens of a row. At least 1.
        buffer: Samples to choose from. At least 1; a larger buffer fills the rows better.
        length_of: Function that returns the number of tokens of a sample; None for the length of ``input_ids``.
        max_sequences_per_pack: The largest number of sequences in a row; None for as many as fit.
        too_long: What is done with a sample longer than a row: ``"error"`` or ``"drop"``.

    Raises:
        DatasetError: If a number is below 1, or, during iteration, if a sample has no length that fits.
    """
    if not hasattr(stream, "__iter__"):
        raise DatasetError(f"pack_stream takes what can be iterated over, and was given {stream!r}")
    check_callable(DatasetError, length_of=length_of)
    whole_number("max_length", max_length, DatasetError)
    whole_number("buffer", buffer, DatasetError)
    check_limit(max_sequences_per_pack)
    if too_long not in ("error", "drop"):
        raise DatasetError(f"too_long={too_long!r} must be 'error' or 'drop': cut long samples in the stream")
    return PackedStream(
        stream=stream,
        max_length=max_length,
        buffer=buffer,
        length_of=length_of or _num_tokens,
        max_sequences_per_pack=max_sequences_per_pack or max_length,
        too_long=too_long,
    )


def _num_tokens(sample: object) -> int:
    if not isinstance(sample, Mapping) or TOKENS not in sample:
        raise DatasetError(
            f"a sample of the stream is a {type(sample).__name__} without {TOKENS!r}: give length_of, a function "
            "of a sample"
        )
    return len(sample[TOKENS])


def _key(entry: Entry) -> tuple[int, int]:
    return entry[:2]
