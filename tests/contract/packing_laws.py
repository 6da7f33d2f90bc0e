"""The laws of packed data in a job, written once over instances and replicas; every instance runs all of them."""

import math
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import popdist
from popdist.data.epoch import Permutation
from popdist.data.replica_loader import ReplicaLoader
from popdist.packing import (
    Packed,
    PackedBatch,
    Packing,
    attention_mask,
    label_counts,
    lpfhp,
    pack_stream,
    packed_loader,
    token_mean,
    unpack,
)
from popdist.packing.packed_loader import PackedRows
from tests.contract.collective_laws import refused
from tests.contract.laws import run_laws

LENGTHS = [1 + 7 * i % 11 for i in range(61)]
"""Of 61 texts: 1 to 11 tokens."""

TOPICS = [i % 10 for i in range(61)]

TEXTS = [
    {
        "input_ids": [1 + (i + place) % 9 for place in range(length)],
        "labels": [-100 if (i + place) % 3 else (i * place) % 10 for place in range(length)],
        "topic": TOPICS[i],
    }
    for i, length in enumerate(LENGTHS)
]

PADDING = {"input_ids": 0}


def run_all() -> tuple[int, str]:
    """Every law; how many there were, and a checksum of trained weights."""
    return run_laws(__name__), trained_checksum()


def loader(**options: Any) -> ReplicaLoader:
    """A loader of the texts, packed into rows of 16 tokens."""
    packing = {"max_length": 16, "lengths": LENGTHS, "padding": PADDING} | options.pop("packing", {})
    return popdist.data_loader(TEXTS, 2, shuffle=True, seed=3, packing=Packing(**packing), **options)


class Reader(nn.Module):
    """One layer of attention over tokens and their positions, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.places = nn.Embedding(10, 8), nn.Embedding(16, 8)
        self.mix, self.out = nn.Linear(8, 24), nn.Linear(8, 10)
        self.double()

    def forward(self, packed: Packed) -> Tensor:
        """Scores for each token."""
        mask = attention_mask(packed.segment_ids, "additive", dtype=torch.float64, masked=-math.inf)
        hidden = self.embedding(packed.input_ids) + self.places(packed.position_ids)
        query, key, value = self.mix(hidden)[:, None].chunk(3, dim=-1)
        scores: Tensor = self.out(hidden + scaled_dot_product_attention(query, key, value, attn_mask=mask)[:, 0])
        return scores


def token_loss(scores: Tensor, packed: Packed) -> Tensor:
    """Mean over the labels of tokens."""
    return token_mean(cross_entropy(scores.mT, packed.labels, reduction="none"), packed.labels != -100)


def topic_loss(scores: Tensor, packed: Packed) -> Tensor:
    """Mean over the sequences."""
    return cross_entropy(unpack(scores, packed, "mean"), packed["topic"])


def one_step(limit: int | None, *, tokens: bool) -> list[Tensor]:
    """The gradients of all texts in one step, with at most ``limit`` sequences a row."""
    model = popdist.ReplicatedModel(Reader())
    rows_each = 61
    made = popdist.data_loader(
        TEXTS,
        rows_each,
        packing=Packing(max_length=16, lengths=LENGTHS, padding=PADDING, max_sequences_per_pack=limit),
    )
    [batch] = made
    for packed in model.micro_batches(batch, weights=label_counts(batch) if tokens else None):
        loss = token_loss if tokens else topic_loss
        loss(model(packed), packed).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def law_packing_changes_no_gradient() -> None:
    """Packed and unpacked, for losses of tokens and of sequences: equal over the whole job to 1e-12."""
    for tokens in (True, False):
        packed, alone = (one_step(limit, tokens=tokens) for limit in (None, 1))
        for found, expected in zip(packed, alone, strict=True):
            assert torch.allclose(found, expected, rtol=0, atol=1e-12)
        assert any(gradient.abs().max() > 0.001 for gradient in alone)


def law_every_sample_comes_once() -> None:
    """Over all instances, and all count the same samples of the job."""
    indices: list[int] = []
    totals, rows = [], []
    for batch in loader():
        assert isinstance(batch, PackedBatch)
        indices += batch.indices
        totals.append(batch.num_samples_job)
        rows.append(batch.num_rows)
    told = popdist.gather(torch.tensor(indices, dtype=torch.int64))
    assert sorted(told.tolist()) == list(range(len(TEXTS)))
    assert sum(totals) == len(TEXTS)
    full = popdist.num_local_replicas() * 2
    assert rows[:-2] == [full] * (len(rows) - 2)


def law_a_stream_comes_once() -> None:
    """As rows of all instances; micro batches weigh samples, and the state goes on in the middle."""

    def made() -> ReplicaLoader:
        stream = popdist.shard_iterable(pack_stream(TEXTS, 16, buffer=8))
        return popdist.data_loader(stream, 2, packing=Packing(max_length=16, padding=PADDING))

    first, second, totals, batches = made(), made(), 0, []
    for number, batch in enumerate(first):
        batches.append(batch)
        totals += batch.num_samples_job
        for micro in batch.micro_batches:
            assert micro.num_samples == (0 if micro.content is None else micro.content.num_sequences)
        if number == 1:
            second.load_state_dict(first.state_dict())
    assert totals == len(TEXTS)
    topics = [packed["topic"] for batch in batches for packed in batch]
    assert sorted(popdist.gather(topics).tolist()) == sorted(TOPICS)
    for found, expected in zip(second, batches[2:], strict=True):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.input_ids, other.input_ids)


def law_the_instances_of_a_host_read_one_order() -> None:
    """Large arrays lie in memory that they share; what they say is the same."""
    with mock.patch.object(packed_loader, "SHARED_BYTES", 0):
        shared = [batch.indices for batch in loader(num_workers=1)]
    assert shared == [batch.indices for batch in loader()]


def law_a_run_goes_on_at_another_split() -> None:
    """A position after eight rows means the same rows in every world."""
    lengths = np.array(LENGTHS)
    strategy = lpfhp(np.bincount(lengths)[1:], 16)
    first = Permutation(strategy.num_packs, seed=3, epoch=1).indices(np.arange(8)).tolist()
    rows = PackedRows(lengths, strategy, seed=3, shuffle=True)
    seen = {sample for row in rows.samples(first, 1) for sample in row}
    made = loader()
    made.load_state_dict(made.state_dict() | {"epoch": 1, "position": 8})
    rest = torch.tensor([index for batch in made for index in batch.indices], dtype=torch.int64)
    assert sorted(popdist.gather(rest).tolist()) == sorted(set(range(len(TEXTS))) - seen)


def law_lengths_are_counted_in_parts() -> None:
    """Each instance asks its part of the samples; what fails on one is an error on all."""
    asked: list[int] = []

    def count(sample: dict[str, Any]) -> int:
        asked.append(sample["topic"])
        return len(sample["input_ids"])

    indices = [batch.indices for batch in loader(packing={"lengths": count})]
    assert indices == [batch.indices for batch in loader()]
    assert popdist.all_reduce(torch.tensor(len(asked))).item() == len(TEXTS)
    if popdist.num_instances() > 1:
        with refused(popdist.PopdistError, "gave None for sample 60"):
            loader(packing={"lengths": lambda sample: None if sample is TEXTS[60] else 1})


def law_instances_that_differ_are_refused() -> None:
    """Other lengths on one instance are an error on all, also where only the others' are many enough to share."""
    if popdist.num_instances() == 1:
        return
    lengths = LENGTHS[::-1] if popdist.is_main() else LENGTHS
    with refused(popdist.CollectiveError, r"packed rows with the digest"):
        loader(packing={"lengths": lengths})
    number = 40 if popdist.is_main() else len(TEXTS)
    packing = Packing(max_length=16, lengths=LENGTHS[:number], padding=PADDING)
    of_the_others = mock.patch.object(packed_loader, "SHARED_BYTES", 200)
    with of_the_others, refused(popdist.CollectiveError, r"packed rows with the digest"):
        popdist.data_loader(TEXTS[:number], 2, packing=packing)


def trained_checksum() -> str:
    """Of the weights after two epochs."""
    model = popdist.ReplicatedModel(Reader())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    made = loader(accumulation=2)
    for _ in range(2):
        for batch in made:
            for packed in model.micro_batches(batch, weights=label_counts(batch)):
                token_loss(model(packed), packed).backward()
            optimizer.step()
    return popdist.checksum(model)
