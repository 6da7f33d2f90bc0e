"""Packed datasets: every sample once an epoch, in rows that follow from seed, epoch and strategy alone.

Holds popdist.packing.sample_lengths.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

import popdist
from popdist.data.replica_loader import ReplicaLoader
from popdist.errors import DatasetError
from popdist.packing import PackedBatch, Packing, StreamRow, lpfhp, optimal, pack_stream, spfhp
from popdist.packing.packed_loader import PackedRows
from popdist.packing.sample_lengths import cut_to_fit
from popdist.packing.strategies import Algorithm
from tests.docs.markdown import ROOT

PADDING = {"input_ids": 0}

LENGTHS = [3, 8, 1, 5, 5, 2, 7, 4, 6, 1, 3, 3, 2, 8, 5]


class Texts(Dataset[dict[str, Any]]):
    """Sample i has as many tokens as its length says, all equal to i + 1, and a label of its own."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [index + 1] * self.lengths[index], "topic": float(index)}


def loader(lengths: list[int] = LENGTHS, micro_batch_size: int = 2, **options: Any) -> ReplicaLoader:
    """A loader of packed ``Texts``."""
    settings = {"max_length": 8, "lengths": lengths, "padding": PADDING} | options.pop("packing", {})
    return popdist.data_loader(Texts(lengths), micro_batch_size, packing=Packing(**settings), **options)


def rows_of(batch: Any) -> Iterator[list[int]]:
    """The tokens of each row of a batch, padding left out."""
    for packed in batch:
        for row in packed.input_ids.tolist():
            yield [token for token in row if token]


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60),
    algorithm=st.sampled_from([lpfhp, spfhp]),
    limit=st.sampled_from([None, 1, 2, 3]),
    epoch=st.integers(0, 5),
    shuffle=st.booleans(),
)
@settings(deadline=None)
def test_every_sample_is_in_one_row(
    lengths: list[int],
    algorithm: Algorithm,
    limit: int | None,
    epoch: int,
    shuffle: bool,  # noqa: FBT001 - drawn
) -> None:
    """Each epoch deals all samples, each once, into rows of the strategy's lengths."""
    counts = np.bincount(lengths, minlength=21)[1:]
    strategy = algorithm(counts, 20, limit)
    rows = PackedRows(np.array(lengths), strategy, seed=3, shuffle=shuffle)

    found = rows.samples(list(range(rows.num_rows)), epoch)

    assert sorted(sample for row in found for sample in row) == list(range(len(lengths)))
    assert Counter(tuple(lengths[sample] for sample in row) for row in found) == dict(strategy.packs)
    assert rows.num_samples(range(rows.num_rows), epoch) == len(lengths)
    some = list(range(0, rows.num_rows, 2))
    assert rows.samples(some, epoch) == found[::2]


def test_each_epoch_mixes_anew() -> None:
    """Others share a row in the next epoch and under another seed, and the same again under the same one."""
    lengths = np.array([4] * 200)
    strategy = lpfhp(np.bincount(lengths)[1:], 8)
    rows, again, other = (PackedRows(lengths, strategy, seed=seed, shuffle=True) for seed in (1, 1, 2))
    everything = list(range(rows.num_rows))

    assert rows.samples(everything, 0) == again.samples(everything, 0)
    assert rows.samples(everything, 0) != rows.samples(everything, 1)
    assert rows.samples(everything, 0) != other.samples(everything, 0)
    assert rows.digest == other.digest


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_has_every_sample(num_workers: int) -> None:
    """Rows hold whole samples; batches count samples, rows and real tokens."""
    made = loader(shuffle=True, seed=5, num_workers=num_workers)
    batches = list(made)

    assert all(isinstance(batch, PackedBatch) for batch in batches)
    assert sorted(index for batch in batches for index in batch.indices) == list(range(len(LENGTHS)))
    tokens = Counter(token for batch in batches for row in rows_of(batch) for token in row)
    assert tokens == {index + 1: length for index, length in enumerate(LENGTHS)}
    assert sum(batch.num_samples for batch in batches) == sum(batch.num_samples_job for batch in batches) == 15
    assert sum(batch.num_tokens for batch in batches if isinstance(batch, PackedBatch)) == sum(LENGTHS)
    assert len(made) == len(batches)
    assert [batch.indices for batch in batches] == [batch.indices for batch in loader(shuffle=True, seed=5)]


def test_strategies_by_value_and_by_name() -> None:
    """A strategy, or the name of the function that makes it."""
    counts = np.bincount(LENGTHS, minlength=9)[1:]
    for given_strategy in (optimal(counts, 8), "optimal", "spfhp", "nnlshp"):
        batches = list(loader(packing={"strategy": given_strategy}))
        assert sorted(index for batch in batches for index in batch.indices) == list(range(len(LENGTHS)))


def test_a_run_goes_on_in_the_middle() -> None:
    """What follows a saved state is what would have followed; another packing is refused."""
    made, resumed = loader(shuffle=True), loader(shuffle=True, micro_batch_size=1)
    epoch = iter(made)
    first = [row for _ in range(2) for row in rows_of(next(epoch))]
    resumed.load_state_dict(made.state_dict())

    rest = [row for batch in resumed for row in rows_of(batch)]
    assert first + rest == [row for batch in loader(shuffle=True) for row in rows_of(batch)]
    other = loader(shuffle=True, packing={"strategy": "spfhp", "max_sequences_per_pack": 1})
    with pytest.raises(DatasetError, match=r"the state was taken with .*packing"):
        other.load_state_dict(made.state_dict())


def test_drop_last_leaves_the_remainder_out() -> None:
    """Only full steps."""
    assert all(
        batch.num_rows == 3
        for batch in loader(micro_batch_size=3, drop_last=True)
        if isinstance(batch, PackedBatch)
    )


@pytest.mark.parametrize(
    ("too_long", "expected"),
    [("truncate", {1: 2, 2: 4, 3: 4}), ("drop", {1: 2}), ("split", {1: 2, 2: 9, 3: 5})],
)
def test_long_samples(too_long: str, expected: dict[int, int]) -> None:
    """Cut to their first tokens, left out, or cut into several sequences, which keep the sample's other fields."""
    lengths = [2, 9, 5]
    made = loader(lengths, packing={"max_length": 4, "too_long": too_long}, num_workers=0)
    batches = list(made)

    assert Counter(token for batch in batches for row in rows_of(batch) for token in row) == expected
    for batch in batches:
        for packed in batch:
            topics = packed["topic"].tolist()
            assert packed.input_ids[packed.rows, packed.starts].tolist() == [topic + 1 for topic in topics]


def test_long_samples_are_an_error_at_first() -> None:
    """It counts them and names the longest."""
    with pytest.raises(
        DatasetError, match=r"2 of 3 samples are longer than max_length=4; the longest, sample 1, has 9"
    ):
        loader([2, 9, 5], packing={"max_length": 4})


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), max_length=st.integers(1, 20))
def test_pieces_of_split_samples(lengths: list[int], max_length: int) -> None:
    """Every token of every sample is in one piece."""
    pieces = cut_to_fit(np.array(lengths), max_length, "split")
    tokens = [
        (sample, start + i)
        for sample, start, n in map(pieces.place_of, range(len(pieces.lengths)))
        for i in range(n)
    ]

    assert tokens == [(sample, token) for sample, length in enumerate(lengths) for token in range(length)]


class Columns(Texts):
    """With a column, as datasets of the library ``datasets`` have them."""

    column_names = ("input_ids", "length")

    def with_format(self, _name: str) -> dict[str, Any]:
        """Columns as arrays."""
        return {"length": np.array(self.lengths)}


def count_tokens(sample: dict[str, Any]) -> int:
    """The length of a sample."""
    return len(sample["input_ids"])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_lengths_from_a_function_are_kept(tmp_path: Path, num_workers: int) -> None:
    """Counted once, in workers; read from the file the next time, which the dataset must fit."""
    cache = tmp_path / "lengths.npy"
    packing = {"lengths": count_tokens, "cache": cache}
    first = [batch.indices for batch in loader(packing=packing, num_workers=num_workers)]

    assert first == [batch.indices for batch in loader()]
    assert np.load(cache).tolist() == LENGTHS
    assert [path.name for path in tmp_path.iterdir()] == ["lengths.npy"]
    np.save(cache, np.array(LENGTHS[::-1]))
    with pytest.raises(DatasetError, match=r"sample .* has .* tokens, and its length was given as"):
        list(loader(packing=packing))
    with pytest.raises(DatasetError, match="belongs to another dataset; remove it or name another file"):
        loader(LENGTHS[:-1], packing=packing)
    cache.write_bytes(b"junk")
    with pytest.raises(DatasetError, match="cannot be read"):
        loader(packing=packing)


def test_lengths_from_a_column() -> None:
    """The name of a column; one that is not there is answered with those that are."""
    packing = Packing(max_length=8, lengths="length", padding=PADDING)
    batches = list(popdist.data_loader(Columns(LENGTHS), 2, packing=packing))

    assert [batch.indices for batch in batches] == [batch.indices for batch in loader()]
    with pytest.raises(DatasetError, match="lengths='size': the dataset's columns are input_ids, length"):
        popdist.data_loader(Columns(LENGTHS), 2, packing=Packing(max_length=8, lengths="size", padding=PADDING))
    with pytest.raises(DatasetError, match="a Texts has no columns"):
        popdist.data_loader(Texts(LENGTHS), 2, packing=packing)


@pytest.mark.parametrize(
    ("packing", "message"),
    [
        ({"lengths": [3, 0, 2]}, "sample 1 has length 0: a sequence has at least one token"),
        ({"lengths": [3, 1, -2]}, "sample 2 has length -2"),
        ({"lengths": [3, 1]}, "there are 2 lengths for 3 samples"),
        ({"lengths": [3.0, 1.0, 2.0]}, "lengths of type list is no row of whole numbers"),
        ({"lengths": None}, "lengths is missing"),
        ({"lengths": lambda _: "many"}, "lengths gave 'many' for sample 0"),
        ({"padding": {}}, "padding={} has no 'input_ids': give the id of the tokenizer's padding token"),
        ({"padding": {"input_ids": "[PAD]"}}, r"'\[PAD\]' of 'input_ids' is no number"),
        ({"strategy": "best"}, "strategy='best' must be a PackingStrategy or one of 'lpfhp', 'spfhp', 'optimal'"),
        ({"strategy": lpfhp([1, 1, 2], 8)}, "the strategy packs 2 sequences of length 3, and the dataset has 1"),
        ({"strategy": lpfhp([1, 1, 1], 9)}, "the strategy packs rows of 9 tokens, and max_length=8"),
        ({"too_long": "cut"}, "too_long='cut' must be one of 'error', 'truncate', 'drop', 'split'"),
        ({"max_length": 0}, "max_length=0 must be a whole number of at least 1"),
        ({"max_sequences_per_pack": 0}, "max_sequences_per_pack=0"),
        ({"max_length": 2, "too_long": "drop", "lengths": [3, 3, 3]}, "leaves no sample"),
    ],
)
def test_bad_input_is_named(packing: dict[str, Any], message: str) -> None:
    """Each error names the sample or the option, and what to do."""
    with pytest.raises(DatasetError, match=message):
        loader([3, 1, 2], 1, packing=packing)


def test_an_empty_dataset_is_an_error() -> None:
    """There is nothing to pack."""
    with pytest.raises(DatasetError, match="no samples to pack"):
        loader([])


def test_a_stream_is_packed_over_a_buffer() -> None:
    """All samples, in rows that fit, nearly full; the same again, whatever reads them."""
    counts = np.array(json.loads((ROOT / "benchmarks/data/packing_histograms.json").read_text())["wikipedia-512"])
    lengths = (np.random.default_rng(0).choice(512, 10_000, p=counts / counts.sum()) + 1).tolist()
    packed = pack_stream([range(i, i + length) for i, length in enumerate(lengths)], 512, length_of=len)
    rows = list(packed)

    assert sorted(sample.start for row in rows for sample in row) == list(range(10_000))
    assert all(row.num_tokens == sum(map(len, row)) <= 512 for row in rows)
    assert sum(lengths) / (512 * len(rows)) > 0.98
    assert rows == list(packed)
    assert all(len(row) <= 2 for row in pack_stream(lengths, 512, length_of=int, max_sequences_per_pack=2))


@pytest.mark.parametrize(
    ("stream", "options", "message"),
    [
        ([1, 0], {"length_of": int}, "sample 1 of the stream has length 0"),
        ([1, 9], {"length_of": int}, "sample 1 of the stream has 9 tokens, more than max_length=8"),
        ([1], {}, "a sample of the stream is a int without 'input_ids': give length_of"),
        ([1], {"buffer": 0}, "buffer=0"),
        ([1], {"too_long": "split"}, "must be 'error' or 'drop'"),
    ],
)
def test_bad_streams_are_named(stream: list[int], options: dict[str, Any], message: str) -> None:
    """When it is made, or when the sample is met."""
    with pytest.raises(DatasetError, match=message):
        list(pack_stream(stream, 8, **options))
    assert list(pack_stream([1, 9, 7], 8, length_of=int, too_long="drop")) == [StreamRow([7, 1], 8)]


def test_what_is_no_packed_stream_is_refused() -> None:
    """Neither a stream that nobody has packed, nor lengths or shuffling for one."""
    packing = Packing(max_length=8, padding=PADDING)
    packed = popdist.shard_iterable(pack_stream([1], 8, length_of=int))
    for stream, shuffle in ((popdist.shard_iterable([1]), False), (packed, True)):
        with pytest.raises(DatasetError, match=r"a stream is packed by popdist\.packing\.pack_stream"):
            popdist.data_loader(stream, 1, packing=packing, shuffle=shuffle)


def test_rows_of_torch_tensors() -> None:
    """Tensors and numpy arrays are rows of tokens, too, and a collate function of one's own gets lists of rows."""
    samples = [{"input_ids": torch.tensor([1, 2])}, {"input_ids": np.array([3])}]
    packing = Packing(max_length=4, lengths=[2, 1], padding=PADDING)
    [batch] = popdist.data_loader(samples, 1, packing=packing)
    (packed,) = list(batch)
    assert packed.input_ids.tolist() == [[1, 2, 3, 0]]
    [batch] = popdist.data_loader(samples, 1, packing=packing, collate_fn=lambda rows: [len(row) for row in rows])
    assert list(batch) == [[2]]
