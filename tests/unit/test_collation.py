"""Packed rows as tensors, masks that keep sequences apart, and weights that make packing invisible to training."""

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from popdist.data.batch import Batch, MicroBatch
from popdist.errors import BatchError, DatasetError
from popdist.packing import Collator, Packed, attention_mask, label_counts, packed_betas, token_mean, unpack

COLLATOR = Collator(max_length=6, padding={"input_ids": 9})

ROWS = [
    [
        {"input_ids": [1, 2, 3], "labels": [-100, 2, -100], "topic": 1},
        {"input_ids": [4, 5], "labels": [4, 5], "topic": 0},
    ],
    [{"input_ids": [6], "labels": [6], "topic": 1}],
]


def packed_rows() -> Packed:
    """Two rows of six tokens: sequences of 3 and 2, and one of 1."""
    return COLLATOR(ROWS)


def test_rows_become_tensors() -> None:
    """Fields of tokens lie in rows, fields of sequences in a list that says where each sequence is."""
    packed = packed_rows()

    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5, 9], [6, 9, 9, 9, 9, 9]]
    assert packed.labels.tolist() == [[-100, 2, -100, 4, 5, -100], [6, -100, -100, -100, -100, -100]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 0, 0, 0]]
    assert packed.segment_ids.tolist() == [[1, 1, 1, 2, 2, 0], [1, 0, 0, 0, 0, 0]]
    assert packed["topic"].tolist() == [1, 0, 1]
    assert (packed.rows.tolist(), packed.starts.tolist(), packed.lengths.tolist()) == (
        [0, 0, 1],
        [0, 3, 0],
        [3, 2, 1],
    )
    assert (packed.cu_seqlens.tolist(), packed.cu_seqlens.dtype, packed.max_seqlen) == (
        [0, 3, 5, 6],
        torch.int32,
        3,
    )
    assert (packed.num_rows, packed.num_sequences, packed.num_tokens) == (2, 3, 6)
    assert packed.input_ids[packed.segment_ids > 0].tolist() == [1, 2, 3, 4, 5, 6]
    with pytest.raises(BatchError, match="no field 'mask': there are input_ids, labels, topic"):
        _ = packed["mask"]


@pytest.mark.parametrize(
    ("first", "second", "dtype"),
    [
        ([1, 2], [0.5, 1.5], torch.float32),
        ([0.5, 1.5], [1, 2], torch.float32),
        ([True, False], [3, 4], torch.int64),
        (torch.tensor([1, 2], dtype=torch.int8), torch.tensor([300, 4], dtype=torch.int16), torch.int16),
        (torch.tensor([0.5, 1], dtype=torch.float16), torch.tensor([0.1, 2], dtype=torch.float64), torch.float64),
    ],
)
def test_values_of_several_types_keep_their_values(first: Any, second: Any, dtype: torch.dtype) -> None:
    """In one row and in several, by torch's promotion: the first sample does not choose the type."""
    samples = [{"input_ids": [1, 2], "values": values} for values in (first, second)]
    for rows in ([samples], [[sample] for sample in samples]):
        found = COLLATOR(rows)["values"]
        assert found.dtype == dtype
        wanted = torch.cat([torch.as_tensor(values).to(dtype) for values in (first, second)])
        assert torch.equal(found[COLLATOR(rows).segment_ids > 0], wanted)


def test_padding_is_not_cut() -> None:
    """To whole numbers, where the field has such."""
    collator = Collator(max_length=3, padding={"input_ids": 0, "values": 0.5})
    assert collator([[{"input_ids": [1], "values": [2.0]}]])["values"].tolist() == [[2.0, 0.5, 0.5]]
    with pytest.raises(BatchError, match=r"padding=0\.5 of 'values', whose values are of torch\.int64: choose"):
        collator([[{"input_ids": [1], "values": [2]}]])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[{"input_ids": []}]], "a sample has 0 tokens in 'input_ids': a row takes 1 to 6"),
        ([[{"input_ids": [1] * 7}]], "a sample has 7 tokens"),
        ([[{"input_ids": [1] * 4}, {"input_ids": [1] * 3}]], "a row of 2 sequences has 7 tokens"),
        ([[[1, 2]]], "a sample is a list without 'input_ids'"),
        ([[{"input_ids": [1]}, {"input_ids": [1], "more": 1}]], "a sample has the fields input_ids, more"),
        ([[{"input_ids": [1, 2], "x": [1, 2]}, {"input_ids": [1], "x": [1, 2]}]], "the field 'x' is as long as"),
    ],
)
def test_bad_rows_are_named(rows: Any, message: str) -> None:
    """Each error says what was found."""
    with pytest.raises(BatchError, match=message):
        COLLATOR(rows)


def test_fields_of_tokens_can_be_named() -> None:
    """A field of sequences may be as long as a sequence by chance; then the names decide."""
    rows = [[{"input_ids": [1, 2], "box": [0.5, 0.25]}, {"input_ids": [3], "box": [1.0, 2.0]}]]
    collator = Collator(max_length=6, padding={"input_ids": 0}, token_fields=("labels",))

    assert [column.tolist() for column in collator(rows)["box"]] == [[0.5, 1.0], [0.25, 2.0]]
    with pytest.raises(DatasetError, match="has no 'input_ids'"):
        Collator(max_length=6)


def naive_mask(segment_ids: list[list[int]], *, causal: bool) -> list[list[list[bool]]]:
    """Pair by pair."""
    return [
        [
            [own == other > 0 and (key <= query or not causal) for key, other in enumerate(row)]
            for query, own in enumerate(row)
        ]
        for row in segment_ids
    ]


@pytest.mark.parametrize("causal", [False, True])
def test_masks_are_block_diagonal(*, causal: bool) -> None:
    """Every form allows the same pairs."""
    segment_ids = packed_rows().segment_ids
    expected = torch.tensor(naive_mask(segment_ids.tolist(), causal=causal))

    allowed = attention_mask(segment_ids, causal=causal)
    added = attention_mask(segment_ids, "additive", causal=causal, dtype=torch.bfloat16)
    blocks: Any = attention_mask(segment_ids, "flex", causal=causal)
    grid = torch.arange(6)
    flex = blocks.mask_mod(torch.arange(2)[:, None, None], torch.tensor(0), grid[:, None], grid)

    assert torch.equal(allowed, expected[:, None])
    assert torch.equal(added == 0, expected[:, None])
    assert set(added.unique().tolist()) == {0.0, -1000.0}
    assert added.dtype == torch.bfloat16
    assert torch.equal(flex, expected)


def test_nested_offsets_are_those_of_the_sequences() -> None:
    """Neighbours in two rows that have the same number in their rows stay apart."""
    packed = packed_rows()

    assert attention_mask(packed.segment_ids, "nested").tolist() == packed.cu_seqlens.tolist()
    assert attention_mask(torch.tensor([[1, 1], [1, 1]]), "nested").tolist() == [0, 2, 4]
    with pytest.raises(BatchError, match="is_causal=True"):
        attention_mask(packed.segment_ids, "nested", causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_nothing_is_nan_and_no_sequence_sees_another(*, causal: bool) -> None:
    """Attention over a packed row is attention over each of its sequences."""
    torch.manual_seed(0)
    packed = packed_rows()
    query, key, value = torch.randn(3, 2, 1, 6, 4, dtype=torch.float64, requires_grad=True)
    masks = (
        attention_mask(packed.segment_ids, "additive", causal=causal, dtype=torch.float64, masked=-math.inf),
        attention_mask(packed.segment_ids, "additive", causal=causal, dtype=torch.float64),
        attention_mask(packed.segment_ids, causal=causal),
    )
    for mask in masks:
        found = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        for row, start, length in zip(packed.rows, packed.starts, packed.lengths, strict=True):
            part = (row, slice(None), slice(int(start), int(start + length)))
            alone = scaled_dot_product_attention(query[part], key[part], value[part], is_causal=causal)
            assert torch.allclose(found[part], alone, rtol=0, atol=1e-12)
        assert found[0, :, :5].isfinite().all()
        if mask is masks[0]:
            assert found.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ([torch.zeros(3, dtype=torch.int64)], {}, r"segment_ids is of shape \(3,\): expected whole numbers"),
        ([torch.zeros(1, 3)], {}, "expected whole numbers"),
        (["1 1 2"], {}, "segment_ids is a str"),
        ([torch.ones(1, 1, dtype=torch.int64), "dense"], {}, "form='dense' must be one of 'sdpa', 'additive'"),
        ([torch.ones(1, 1, dtype=torch.int64), "additive"], {"masked": 1.0}, "a number below 0"),
        ([torch.ones(1, 1, dtype=torch.int64), "additive"], {"dtype": torch.int64}, "a floating point type"),
    ],
)
def test_bad_masks_are_named(arguments: list[Any], options: dict[str, Any], message: str) -> None:
    """Each error says what was given."""
    with pytest.raises(BatchError, match=message):
        attention_mask(*arguments, **options)


@pytest.mark.parametrize("take", ["first", "last", "mean"])
def test_one_vector_a_sequence(take: Any) -> None:
    """What a loop over the sequences finds, and its gradient."""
    packed = packed_rows()
    hidden = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    picks: dict[str, Any] = {
        "first": lambda x: x[0],
        "last": lambda x: x[-1],
        "mean": lambda x: x.mean(0),
    }
    pick = picks[take]
    parts = zip(packed.rows.tolist(), packed.starts.tolist(), packed.lengths.tolist(), strict=True)
    expected = torch.stack([pick(hidden[row, start : start + length]) for row, start, length in parts])

    found = unpack(hidden, packed, take)

    assert torch.allclose(found, expected, rtol=0, atol=1e-15)
    weights = torch.randn(3, 3, dtype=torch.float64)
    gradients = [torch.autograd.grad((out * weights).sum(), hidden)[0] for out in (found, expected)]
    assert torch.allclose(gradients[0], gradients[1], rtol=0, atol=1e-15)


def test_bad_vectors_are_named() -> None:
    """Another shape, another word."""
    packed = packed_rows()
    with pytest.raises(BatchError, match=r"hidden has shape \(2, 5, 3\), and the rows \(2, 6\)"):
        unpack(torch.zeros(2, 5, 3), packed)
    with pytest.raises(BatchError, match="take='max' must be"):
        unpack(torch.zeros(2, 6, 3), packed, "max")  # type: ignore[arg-type] # the mistake


def test_the_mean_over_tokens() -> None:
    """Over those that count; 0 with a gradient of 0 when none does."""
    losses = torch.tensor([[1.0, 2.0, math.inf]], requires_grad=True)

    assert token_mean(losses, torch.tensor([[1, 1, 0]])).item() == 1.5
    nothing = token_mean(losses, torch.zeros(1, 3))
    nothing.backward()
    assert nothing.item() == 0
    assert losses.grad is not None
    assert losses.grad.tolist() == [[0, 0, 0]]
    with pytest.raises(BatchError, match="must be alike"):
        token_mean(losses, torch.zeros(3))


def batch_of(*contents: Any) -> Batch:
    """A batch with one replica."""
    micro_batches = tuple(MicroBatch(0, step, 1, content) for step, content in enumerate(contents))
    return Batch(micro_batches=micro_batches, epoch=0, step=0, indices=(0,), num_samples_job=1, stop=1)


def test_labels_are_counted_for_weights() -> None:
    """Each micro batch weighs the labels that it has; one without rows weighs nothing."""
    assert label_counts(batch_of(packed_rows(), None, packed_rows())) == [4, 0, 4]
    for content, name in ((packed_rows(), "topic"), ((1, 2), "labels")):
        with pytest.raises(BatchError, match=f"without a field '{name}' of tokens"):
            label_counts(batch_of(content), name)


def test_momenta_of_larger_steps() -> None:
    """The power of the packing factor; 1 changes nothing."""
    assert packed_betas((0.9, 0.999), 2.0) == (0.9**2, 0.999**2)
    assert packed_betas((0.9, 0.999), 1) == (0.9, 0.999)
    with pytest.raises(BatchError, match=r"packing_factor=0\.5 be at least 1"):
        packed_betas((0.9, 0.999), 0.5)
