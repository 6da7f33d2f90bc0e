"""The loader of packed rows, each with several sequences: ``popdist.data_loader(..., packing=Packing(...))``.

Rows are dealt to the replicas as samples are dealt without packing. In a full step all replicas have the same
number of rows, and the remaining rows make one smaller last step. A step counts samples nevertheless, so that
gradients are weighted by sequences, or by tokens if the program says so, and never by rows.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from popdist.data.batch import Batch, MicroBatch, Share
from popdist.data.data_loader import LoaderPlan
from popdist.data.dealt_streams import ShardedIterable, StreamFetcher, StreamLoader
from popdist.data.epoch import EpochPosition, Permutation, plan_epochs, round_keys
from popdist.data.randomness import Reseed
from popdist.data.replica_loader import Collate, Collation, MapFetcher, ReplicaLoader
from popdist.data.sampler import EpochShares
from popdist.errors import MOST_PARTS, MOST_TOKENS, BackendError, DatasetError, whole_number
from popdist.exchange.groups import host_group_of
from popdist.job import context
from popdist.packing.collation import TOKENS, Collator
from popdist.packing.linear_programme import nnlshp, optimal
from popdist.packing.sample_lengths import TOO_LONG, LengthSource, Pieces, TooLong, cut_to_fit, find_lengths
from popdist.packing.strategies import Algorithm, PackingStrategy, check_limit, lengths_of, lpfhp, spfhp
from popdist.packing.stream_packing import PackedStream, StreamRow

Numbers = NDArray[np.int64] | NDArray[np.int32]


class PackedRows:
    """The rows of a dataset with packing; the number of a row and the epoch determine the row's samples."""

    def __init__(self, lengths: Numbers, strategy: PackingStrategy, *, seed: int, shuffle: bool) -> None:
        """Put samples with the lengths ``lengths`` into rows by ``strategy``, made for exactly these lengths."""
        counts = np.bincount(lengths, minlength=strategy.max_length + 1)[1:].astype(np.int64)
        _check_same(strategy, counts)
        ordered: Numbers = np.argsort(lengths, kind="stable")  # all samples, shortest first
        self.ordered = ordered.astype(np.int32) if len(ordered) < 2**31 else ordered
        self.num_rows = strategy.num_packs
        self.digest = _digest(lengths, strategy)
        self._seed, self._shuffle = seed, shuffle
        self._counts = counts
        self._first_of_length = np.concatenate([[0], np.cumsum(counts)])
        counts_of_packs = np.array(list(strategy.packs.values()), np.int64)
        self._last_row_of_pack: NDArray[np.int64] = np.cumsum(counts_of_packs)
        self._first_row_of_pack = self._last_row_of_pack - counts_of_packs
        self._sizes = np.array([len(pack) for pack in strategy.packs])
        # No list of rows is built, to save memory: the places of each length are numbered over the packs, and in
        # each epoch a permutation of the samples of that length assigns a sample to each place.
        self._places = _number_places(strategy)
        self._orders: tuple[int, dict[int, Permutation]] = (-1, {})

    def num_samples(self, step: range, epoch: int) -> int:
        """Return the number of samples in the rows of ``step``, a range of positions in the epoch's row order."""
        rows = np.arange(step.start, step.stop, dtype=np.int64)
        if self._shuffle:
            rows = Permutation(self.num_rows, seed=self._seed, epoch=epoch).indices(rows)
        return int(self._sizes[self._pack_of(rows)].sum())

    def samples(self, rows: Sequence[int] | range, epoch: int) -> list[list[int]]:
        """Return, for each row number in ``rows``, the indices of the row's samples, longest sample first."""
        numbers = np.array(rows, np.int64)
        packs = self._pack_of(numbers)
        copies = numbers - self._first_row_of_pack[packs]
        sizes = self._sizes[packs]
        ends = np.cumsum(sizes)
        first = np.repeat((np.cumsum(self._sizes) - self._sizes)[packs] - (ends - sizes), sizes)
        place = first + np.arange(len(first))
        lengths: NDArray[np.int64] = self._places.lengths[place]
        place_numbers = self._places.first[place] + np.repeat(copies, sizes) * self._places.repeats[place]
        indices: list[int] = self._samples_at(lengths, place_numbers.astype(np.int64), epoch).tolist()
        return [indices[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]

    def _pack_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._last_row_of_pack, rows, side="right")

    def _samples_at(self, lengths: NDArray[np.int64], places: NDArray[np.int64], epoch: int) -> Numbers:
        """Return a sample for each place in a row: ``lengths`` has the number of tokens of each place, and
        ``places`` has each place's number among all places of the same length.
        """
        if self._shuffle:
            by_length = np.argsort(lengths, kind="stable")
            borders = np.flatnonzero(np.diff(lengths[by_length])) + 1
            for same in np.split(by_length, borders):
                places[same] = self._order_of(int(lengths[same[0]]), epoch).indices(places[same])
        found: Numbers = self.ordered[self._first_of_length[lengths - 1] + places]
        return found

    def _order_of(self, length: int, epoch: int) -> Permutation:
        if self._orders[0] != epoch:
            self._orders = (epoch, {})
        orders = self._orders[1]
        if length not in orders:
            seed = round_keys(self._seed, length)[0]
            orders[length] = Permutation(int(self._counts[length - 1]), seed=seed, epoch=epoch)
        return orders[length]


class _Places(NamedTuple):
    """The places for sequences in packs (lengths that share a row): the arrays lengths, first and repeats."""

    lengths: NDArray[np.int64]  # tokens of the sequence at the place
    first: NDArray[np.int64]  # number of the place in the first row of its pack, among all places of its length
    repeats: NDArray[np.int64]  # places of its length in its pack, which ``first`` grows by from row to row


def _number_places(strategy: PackingStrategy) -> _Places:
    used: Counter[int] = Counter()
    rows: list[tuple[int, int, int]] = []
    for pack, count in strategy.packs.items():
        repeats = Counter(pack)
        seen: Counter[int] = Counter()
        for length in pack:
            rows.append((length, used[length] + seen[length], repeats[length]))
            seen[length] += 1
        used.update({length: repeat * count for length, repeat in repeats.items()})
    return _Places(*np.array(rows, np.int64).reshape(-1, 3).T)


def _check_same(strategy: PackingStrategy, counts: NDArray[np.int64]) -> None:
    packed = strategy.histogram()
    if len(counts) == len(packed) and (counts == packed).all():
        return
    size = max(len(counts), len(packed))
    differing = np.pad(counts, (0, size - len(counts))) - np.pad(packed, (0, size - len(packed)))
    length = lengths_of(np.abs(differing))[0]
    found, expected = (int(row[length - 1]) if length <= len(row) else 0 for row in (counts, packed))
    raise DatasetError(
        f"the strategy packs {expected} sequences of length {length}, and the dataset has {found}: make the "
        "strategy from the lengths of this dataset, or give its name ('lpfhp') and let the loader make it"
    )


def _digest(lengths: Numbers, strategy: PackingStrategy) -> int:
    words = hashlib.sha256(np.ascontiguousarray(lengths, np.int64).tobytes())
    words.update(strategy.digest().encode())
    return int(words.hexdigest()[:15], 16)


ALGORITHMS: Final[Mapping[str, Algorithm]] = {
    "lpfhp": lpfhp,
    "spfhp": spfhp,
    "optimal": optimal,
    "nnlshp": nnlshp,
}

SHARED_BYTES: Final = 2**22
"""The least size in bytes of an array of numbers that the instances of a host share in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Settings for ``popdist.data_loader`` that put several samples of a dataset into one row of a batch.

    Attributes:
        max_length: Tokens of a row. At least 1.
        lengths: Tokens of each sample: a sequence of numbers, the name of a column of a dataset of the library
            ``datasets``, or a function of a sample. The loader's workers call the function once for each sample.
            Not for a stream that ``pack_stream`` has packed.
        strategy: A :class:`PackingStrategy` of exactly these lengths, or the name of a function that makes it.
        max_sequences_per_pack: The largest number of sequences in a row; None for as many as fit.
        too_long: What is done with samples longer than a row: ``"error"``, ``"truncate"`` (use the first tokens),
            ``"drop"``, or ``"split"`` (into several sequences).
        padding: Value of each field in padding, by name; ``input_ids`` is needed, unless there is a
            ``collate_fn``.
        token_fields: Names of the fields with a value for each token; None for all fields that are as long as
            ``input_ids`` of the sample.
        cache: File for the lengths that a function has counted. An existing file is read; otherwise one instance
            of each host writes the file.

    Raises:
        DatasetError: If an attribute has an impossible value.
    """

    max_length: int
    lengths: LengthSource | None = None
    strategy: PackingStrategy | str = "lpfhp"
    max_sequences_per_pack: int | None = None
    too_long: TooLong = "error"
    padding: Mapping[str, float] = field(default_factory=dict)
    token_fields: tuple[str, ...] | None = None
    cache: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        whole_number("max_length", self.max_length, DatasetError, maximum=MOST_TOKENS)
        check_limit(self.max_sequences_per_pack)
        if self.too_long not in TOO_LONG:
            raise DatasetError(f"too_long={self.too_long!r} must be one of {', '.join(map(repr, TOO_LONG))}")
        if isinstance(self.strategy, PackingStrategy):
            if self.strategy.max_length != self.max_length:
                raise DatasetError(
                    f"the strategy packs rows of {self.strategy.max_length} tokens, and "
                    f"max_length={self.max_length}"
                )
        elif self.strategy not in list(ALGORITHMS):
            raise DatasetError(
                f"strategy={self.strategy!r} must be a PackingStrategy or one of "
                f"{', '.join(map(repr, ALGORITHMS))}"
            )

    def make_loader(
        self,
        dataset: Any,
        plan: LoaderPlan,
        collate_fn: Collate | None,
        options: Mapping[str, Any],
    ) -> ReplicaLoader:
        """Return a loader whose rows have several samples; raise DatasetError if samples cannot be packed.

        Raises CollectiveError if the instances pass different arguments.
        """
        collate = collate_fn or Collator(
            max_length=self.max_length, padding=self.padding, token_fields=self.token_fields
        )
        contract = context.environment().contract
        collation = Collation(
            collate_fn=collate,
            num_replicas=contract.layout.num_local_replicas,
            accumulation=whole_number("accumulation", plan.accumulation, DatasetError, maximum=MOST_PARTS),
            seed=plan.seed,
        )
        if isinstance(dataset, ShardedIterable):
            counting = replace(collation, collate_fn=partial(_filled, collate))
            return self._stream_loader(dataset, plan, counting, options)
        pieces = self._pieces(dataset, int(options.get("num_workers", 0)))
        rows = PackedRows(pieces.lengths, self._strategy_for(pieces), seed=plan.seed, shuffle=plan.shuffle)
        return _map_loader(dataset, collation, rows, pieces, plan, options)

    def _pieces(self, dataset: Any, num_workers: int) -> Pieces:
        if self.lengths is None:
            raise DatasetError(
                "lengths is missing: give one number of tokens for each sample, the name of a column, or a "
                "function of a sample, as in lengths=lambda sample: len(sample['input_ids'])"
            )
        lengths = find_lengths(dataset, self.lengths, num_workers=num_workers, cache=self.cache)
        return cut_to_fit(lengths, self.max_length, self.too_long)

    def _strategy_for(self, pieces: Pieces) -> PackingStrategy:
        if isinstance(self.strategy, PackingStrategy):
            return self.strategy
        histogram = np.bincount(pieces.lengths, minlength=self.max_length + 1)[1:]
        return ALGORITHMS[self.strategy](histogram, self.max_length, self.max_sequences_per_pack)

    def _stream_loader(
        self, dataset: ShardedIterable, plan: LoaderPlan, collation: Collation, options: Mapping[str, Any]
    ) -> ReplicaLoader:
        if self.lengths is not None or plan.shuffle or not isinstance(dataset.stream, PackedStream):
            raise DatasetError(
                "a stream is packed by popdist.packing.pack_stream, has no lengths and no order to shuffle: write "
                "data_loader(shard_iterable(pack_stream(stream, max_length)), packing=Packing(max_length=...))"
            )
        whole_number("micro_batch_size", plan.micro_batch_size, DatasetError)
        position = EpochPosition("data_loader", {"seed": plan.seed}, f"data_loader of a packed stream, {plan}")
        rows_per_replica = plan.micro_batch_size * plan.accumulation
        fetcher = StreamFetcher(dataset, collation, rows_per_replica, drop_last=plan.drop_last)
        return _PackedStreamLoader(fetcher, position, plan.accumulation, options)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch(Batch):
    """The rows, each with several samples, of one step of this instance, divided into micro batches.

    ``num_samples`` and ``num_samples_job`` count samples, and so does the weight of a micro batch. ``indices`` are
    indices of samples in the dataset, or numbers of rows in a stream.

    Attributes:
        num_rows: Rows of this instance.
        num_tokens: Real tokens of this instance.
    """

    num_rows: int
    num_tokens: int

    @property
    def num_samples(self) -> int:
        """The number of samples of this instance in this step; may be 0."""
        return sum(micro.num_samples for micro in self.micro_batches)


@dataclass(frozen=True, slots=True)
class PackedMicroBatch(MicroBatch):
    """The rows, each with several samples, of one replica's forward and backward pass.

    Attributes:
        num_rows: Number of rows; may be 0.
        num_tokens: Number of real tokens in the rows.
    """

    num_rows: int
    num_tokens: int


class _Filled(NamedTuple):
    """The rows of one micro batch, collated, and their counts; a DataLoader worker sends this object."""

    content: Any = None
    num_rows: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    indices: tuple[int, ...] = ()


def _packed_batch(batch: Batch, filled: Sequence[_Filled | None], indices: tuple[int, ...]) -> PackedBatch:
    """Make a PackedBatch of the micro batches in ``filled``, with the epoch and the step of ``batch``."""
    contents = [each or _Filled() for each in filled]
    return PackedBatch(
        micro_batches=tuple(
            PackedMicroBatch(
                micro.replica, micro.step, each.num_samples, each.content, each.num_rows, each.num_tokens
            )
            for micro, each in zip(batch.micro_batches, contents, strict=True)
        ),
        epoch=batch.epoch,
        step=batch.step,
        indices=indices,
        num_samples_job=batch.num_samples_job,
        stop=batch.stop,
        num_rows=sum(each.num_rows for each in contents),
        num_tokens=sum(each.num_tokens for each in contents),
    )


class _PackedFetcher(MapFetcher):
    """The dataset for torch's DataLoader: an item has an instance's micro batches of rows of several samples."""

    def __init__(self, dataset: Any, collation: Collation, rows: PackedRows, pieces: Pieces) -> None:
        super().__init__(dataset, collation)
        self._rows_of = rows
        self._pieces = pieces

    def _contents(self, share: Share, reseed: Reseed | None) -> list[Any]:
        return [
            self._fill(self._rows_of.samples(numbers, share.epoch), share.epoch, reseed) if numbers else None
            for numbers in self._collation.split(share)
        ]

    def _fill(self, rows: list[list[int]], epoch: int, reseed: Reseed | None) -> _Filled:
        places = [[self._pieces.place_of(piece) for piece in row] for row in rows]
        indices = [sample for row in places for sample, _, _ in row]
        samples = iter(self._read(indices, indices, epoch, reseed))
        filled = [[self._cut(next(samples), *place) for place in row] for row in places]
        content = self._collation.collate(filled, epoch, indices[0], reseed)
        num_tokens = sum(length for row in places for _, _, length in row)
        return _Filled(content, len(rows), len(indices), num_tokens, tuple(indices))

    def _cut(self, sample: Any, index: int, start: int, length: int) -> Any:
        """Return ``length`` tokens of ``sample`` from token ``start`` on; if these are all, the sample itself."""
        whole = int(self._pieces.whole_lengths[index])
        if isinstance(sample, Mapping) and TOKENS in sample and len(sample[TOKENS]) != whole:
            raise DatasetError(
                f"sample {index} has {len(sample[TOKENS])} tokens, and its length was given as {whole}: the "
                "lengths are of another dataset or were counted before a change of it; count them again"
            )
        if length == whole:
            return sample
        collator = self._collation.collate_fn
        if not isinstance(sample, Mapping) or not isinstance(collator, Collator):
            raise DatasetError(
                f"sample {index} has {whole} tokens and must be cut, which works for mappings without a "
                "collate_fn only: cut long samples in the dataset"
            )
        return {
            name: value[start : start + length] if collator.is_token_field(name, value, whole) else value
            for name, value in sample.items()
        }


class _PackedLoader(ReplicaLoader):
    """The loader of rows of several samples each, from a dataset that has indices."""

    def __init__(
        self,
        fetcher: _PackedFetcher,
        rows: PackedRows,
        position: EpochPosition,
        accumulation: int,
        options: Mapping[str, Any],
    ) -> None:
        self._rows = rows
        super().__init__(fetcher, position, accumulation, options)

    def _batch(self, share: Share, contents: list[Any]) -> PackedBatch:
        step = range(share.stop - share.num_samples_job, share.stop)
        share = share._replace(num_samples_job=self._rows.num_samples(step, share.epoch))
        indices = tuple(chain.from_iterable(each.indices for each in contents if each is not None))
        return _packed_batch(super()._batch(share, contents), contents, indices)


def _map_loader(
    dataset: Any,
    collation: Collation,
    rows: PackedRows,
    pieces: Pieces,
    plan: LoaderPlan,
    options: Mapping[str, Any],
) -> ReplicaLoader:
    contract = context.environment().contract
    if rows.num_rows < contract.num_replicas:
        raise DatasetError(
            f"{rows.num_rows} packed rows are fewer than the job's {contract.num_replicas} replicas, so some "
            f"would never have a row: use at most --num-replicas {rows.num_rows}, or a smaller max_length"
        )
    epochs = plan_epochs(
        rows.num_rows,
        contract.num_replicas,
        plan.micro_batch_size,
        plan.accumulation,
        drop_last=plan.drop_last,
    )
    position = EpochPosition(
        "data_loader",
        {"length": rows.num_rows, "shuffle": plan.shuffle, "seed": plan.seed, "packing": rows.digest},
        f"data_loader of {rows.num_rows} packed rows with the digest {rows.digest}, {plan}",
        dataset,
    )
    if context.is_initialized():  # sharing is safe, because all instances have the same lengths
        rows.ordered = _once_on_host(rows.ordered)
        pieces = replace(
            pieces,
            lengths=_once_on_host(pieces.lengths),
            whole_lengths=_once_on_host(pieces.whole_lengths),
        )
    fetcher = _PackedFetcher(dataset, collation, rows, pieces)
    own_options = {"sampler": EpochShares(epochs, position)}
    return _PackedLoader(fetcher, rows, position, plan.accumulation, own_options | dict(options))


def _filled(collate: Collate, rows: list[StreamRow]) -> _Filled:
    """Collate the rows of a stream, each a list of samples, and count the rows, the samples and the tokens."""
    num_tokens = sum(row.num_tokens for row in rows)
    return _Filled(collate(rows), len(rows), sum(map(len, rows)), num_tokens)


class _PackedStreamLoader(StreamLoader):
    """The loader of rows of several samples each, from a stream, which has no indices."""

    def _num_samples(self, _share: Share, contents: list[Any]) -> int:
        return sum(each.num_samples for each in contents if each is not None)

    def _batch(self, share: Share, contents: list[Any]) -> PackedBatch:
        return _packed_batch(super()._batch(share, contents), contents, tuple(share.indices))


def _once_on_host(numbers: NDArray[Any]) -> NDArray[Any]:
    """Return ``numbers`` in memory that the instances of a host share; a small array is returned unchanged."""
    host = host_group_of(context.data_parallel_group().backend)
    if host is None or numbers.nbytes < SHARED_BYTES:
        return numbers
    try:
        block = host.allocate(numbers.nbytes)
    except BackendError:
        return numbers
    if host.rank:
        block.release()
    else:
        block.mine.copy_(torch.from_numpy(np.ascontiguousarray(numbers).view(np.uint8)))
    host.barrier()
    return block.rows[0].numpy().view(numbers.dtype)
