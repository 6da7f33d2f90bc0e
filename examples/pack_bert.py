"""Pre-train a tiny BERT on Python's own documentation, with several texts in one row or with padding.

    poprun --num-instances 2 --num-replicas 4 python examples/pack_bert.py
    poprun --num-instances 2 --num-replicas 4 python examples/pack_bert.py --packing none

Masked words and the next sentence, as in https://arxiv.org/abs/1810.04805. Both runs see the same texts in a step,
so their loss curves over real tokens lie on each other; the packed one needs a fraction of the rows. It needs the
libraries transformers and tokenizers.
"""

import argparse
import json
import random
import re
import time
from itertools import islice, pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import BertConfig, BertModel

import popdist
from popdist import packing

MAX_LENGTH = 128
IGNORED = -100
PIECES = {piece: number for number, piece in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"))}
HALF = 0.5
SHORT = 20  # characters that make no sentence


class Pairs(Dataset[dict[str, Any]]):
    """Pairs of neighbouring sentences, in half of them another in place of the neighbour; some words are masked.

    Args:
        tokenizer: Trained on the same text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.num_words = tokenizer.get_vocab_size()
        self.mask, start, stop = PIECES["[MASK]"], PIECES["[CLS]"], PIECES["[SEP]"]
        pages = [[tokenizer.encode(text).ids[:60] for text in page] for page in sentences()]
        chance = random.Random(0)  # noqa: S311 - no secret
        self.pairs = []
        for page in pages:
            for first, second in pairwise(page):
                is_next = chance.random() < HALF
                other = second if is_next else chance.choice(chance.choice(pages))
                self.pairs.append(([start, *first, stop], [*other, stop], int(is_next)))
        self.lengths = [len(first) + len(second) for first, second, _ in self.pairs]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        first, second, is_next = self.pairs[index]
        words = [*first, *second]
        labels = [IGNORED] * len(words)
        for place in random.sample(range(1, len(words) - 1), max(1, round(0.15 * len(words)))):
            labels[place] = words[place]
            others = [self.mask, random.randrange(5, self.num_words), words[place]]  # noqa: S311 - no secret
            words[place] = random.choices(others, weights=[8, 1, 1])[0]  # noqa: S311 - as above
        kinds = [0] * len(first) + [1] * len(second)
        return {"input_ids": words, "labels": labels, "token_type_ids": kinds, "is_next": is_next}


class TinyBert(nn.Module):
    """BERT with two layers, and its two tasks."""

    def __init__(self, num_words: int) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=num_words,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=512,
            max_position_embeddings=MAX_LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.bert = BertModel(config, add_pooling_layer=False)
        self.word, self.next = nn.Linear(128, num_words), nn.Linear(128, 2)

    def forward(self, packed: packing.Packed) -> Tensor:
        """Mean over the sequences of both losses of each."""
        hidden = self.bert(
            packed.input_ids,
            attention_mask=packing.attention_mask(packed.segment_ids),
            token_type_ids=packed["token_type_ids"],
            position_ids=packed.position_ids,
        ).last_hidden_state
        counted = packed.labels != IGNORED
        losses = torch.zeros(counted.shape).masked_scatter(
            counted, cross_entropy(self.word(hidden[counted]), packed.labels[counted], reduction="none")
        )
        words = packing.unpack(losses, packed, "mean") / packing.unpack(counted.float(), packed, "mean")
        is_next = cross_entropy(self.next(packing.unpack(hidden, packed)), packed["is_next"], reduction="none")
        return (words + is_next).mean()


def sentences() -> list[list[str]]:
    """The sentences of each page of the documentation."""
    pages = [re.split(r"(?<=[.:])\s+(?=[A-Z*])|\n\n+", text) for _, text in sorted(topics.items())]
    return [[text for text in page if len(text) > SHORT] for page in pages if len(page) > 1]


def make_tokenizer(path: Path | None) -> Tokenizer:
    """A vocabulary of 2,000 pieces of words, of one instance: two would find slightly different ones."""
    if path is not None and path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106 - a token of another kind
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=2000, special_tokens=list(PIECES), show_progress=False)
    tokenizer.train_from_iterator((text for page in sentences() for text in page), trainer)
    tokenizer = Tokenizer.from_str(popdist.broadcast_object(tokenizer.to_str()))
    if path is not None and popdist.is_main():
        tokenizer.save(str(path))
    return tokenizer


def main() -> None:
    """Train, and print what a real token costs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--packing", choices=["lpfhp", "none"], default="lpfhp")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=20, help="of a replica in a step, about")
    parser.add_argument("--steps", type=int, default=10**9, help="stop after so many")
    parser.add_argument("--curve", type=Path, help="write real tokens, seconds and loss of each step, as JSON")
    parser.add_argument("--tokenizer", type=Path, help="read this file, or write it when it is not there")
    arguments = parser.parse_args()
    popdist.init()
    tokenizer = make_tokenizer(arguments.tokenizer)
    dataset = Pairs(tokenizer)
    make = packing.unpacked if arguments.packing == "none" else packing.lpfhp
    strategy = make(np.bincount(dataset.lengths)[1:], MAX_LENGTH)
    loader = popdist.data_loader(
        dataset,
        max(1, round(arguments.sequences / strategy.packing_factor)),
        shuffle=True,
        packing=packing.Packing(
            max_length=MAX_LENGTH,
            lengths=dataset.lengths,
            strategy=strategy,
            padding={"input_ids": PIECES["[PAD]"]},
            token_fields=("labels", "token_type_ids"),
        ),
    )
    torch.manual_seed(0)
    model = popdist.ReplicatedModel(TinyBert(tokenizer.get_vocab_size()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    curve: list[tuple[int, float, float]] = []
    num_tokens, seconds = 0, 0.0
    for _ in range(arguments.epochs):
        for batch in islice(loader, arguments.steps - len(curve)):
            start, total = time.perf_counter(), 0.0
            for packed in model.micro_batches(batch):
                loss = model(packed)
                loss.backward()
                total += loss.item() * packed.num_sequences
            optimizer.step()
            seconds += time.perf_counter() - start
            num_tokens += int(
                popdist.all_reduce(
                    torch.tensor(sum(m.content.num_tokens for m in batch.micro_batches if m.content))
                )
            )
            curve.append((num_tokens, seconds, popdist.weighted_mean(total, batch.num_samples)))
    if popdist.is_main():
        last = [loss for _, _, loss in curve[-20:]]
        speed = f"{num_tokens / seconds:,.0f} real tokens a second"
        print(f"{strategy.packing_factor:.2f} sequences a row, {strategy.efficiency:.1%} real tokens")
        print(f"{speed}; loss of the last {len(last)} steps {sum(last) / len(last):.3f}")
        if arguments.curve:
            arguments.curve.write_text(json.dumps({"strategy": arguments.packing, "steps": curve}))


if __name__ == "__main__":
    main()
