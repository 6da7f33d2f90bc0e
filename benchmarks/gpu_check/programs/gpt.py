"""A GPT of the size of GPT-2, and what trains it."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The numbers of a model and of its micro batch."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocab: int
    micro_batch: int


GPT2: Final = Size(layers=12, hidden=768, heads=12, sequence=1024, vocab=50304, micro_batch=8)
TINY: Final = Size(layers=2, hidden=64, heads=2, sequence=32, vocab=256, micro_batch=4)


class Block(nn.Module):
    """Attention to the words before, and two linear layers."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm, self.second_norm = nn.LayerNorm(size.hidden), nn.LayerNorm(size.hidden)
        self.attention, self.out = nn.Linear(size.hidden, 3 * size.hidden), nn.Linear(size.hidden, size.hidden)
        self.up, self.down = nn.Linear(size.hidden, 4 * size.hidden), nn.Linear(4 * size.hidden, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape: samples, positions, features."""
        parts = self.attention(self.norm(x)).chunk(3, -1)
        query, key, value = (it.unflatten(-1, (self.heads, -1)).transpose(1, 2) for it in parts)
        y = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return torch.add(x, self.down(gelu(self.up(self.second_norm(x)))))


class GPT(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.vocab, size.hidden)
        self.positions = nn.Parameter(torch.zeros(size.sequence, size.hidden))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.hidden)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        """Return the mean loss of all words but the first one of each sample."""
        x = self.words(words[:, :-1]) + self.positions
        for block in self.blocks:
            x = block(x)
        scores = nn.functional.linear(self.norm(x), self.words.weight)
        return cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())
