"""A sum of posted messages has the bits of the tree, whatever the instances own, and may be made again."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

from popdist.transport import two_level
from popdist.transport.bucket_sums import PostedSum
from popdist.tree import TreeSum, aligned_nodes, tree_sum
from tests.running import DEADLINE_SECONDS

Boxes = dict[tuple[int, int, int], SimpleQueue[Tensor]]
"""By sender, receiver and tag: what was sent and has not come."""


class Expected:
    """A message that was awaited before it is sent, as gloo's are."""

    def __init__(self, box: SimpleQueue[Tensor], row: Tensor) -> None:
        self._box = box
        self._row = row

    def wait(self) -> None:
        """Put it where it was to go."""
        self._row.copy_(self._box.get(timeout=DEADLINE_SECONDS))


class MemberChannel:
    """One member's end of a channel whose threads are the members'."""

    def __init__(self, boxes: Boxes, rank: int) -> None:
        self.instance_index = rank
        self._boxes = boxes
        self.issued: list[Any] = []

    @contextmanager
    def posting(self) -> Iterator[None]:
        """Nothing fails here."""
        yield

    def receive(self, row: Tensor, other: int, tag: int) -> list[Expected]:
        """From another member."""
        return [Expected(self._boxes[other, self.instance_index, tag], row)] if len(row) else []

    def send(self, row: Tensor, other: int, tag: int) -> list[Any]:
        """To another member."""
        if len(row):
            self._boxes[self.instance_index, other, tag].put(row.clone())
        return []

    def issue(self, do: Any, _tensors: object) -> None:  # noqa: ANN401 - as a channel's
        """Keep it for :meth:`do_all`."""
        self.issued.append(do)

    def do_all(self) -> None:
        """What was issued, then what remains of it."""
        for rest in [do() for do in self.issued]:
            if rest is not None:
                rest()
        self.issued.clear()


@pytest.mark.parametrize("split", [(1, 1), (4, 4), (3, 5), (1, 6, 1), (2, 3, 3), (1, 1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_split_of_the_replicas_has_the_bits_of_one_instance(
    monkeypatch: pytest.MonkeyPatch, split: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Short rows go whole, long ones in shares; rows that were sent stay as they are."""
    monkeypatch.setattr(two_level, "FEW", 8)
    num_items, size = sum(split), len(split)
    starts = [sum(split[:it]) for it in range(size)]
    nodes = [aligned_nodes(start, start + count, num_items) for start, count in zip(starts, split, strict=True)]
    boxes: Boxes = {(a, b, tag): SimpleQueue() for a in range(size) for b in range(size) for tag in range(8)}
    lengths = (1, 8, 9, 50)

    def numbers(length: int, item: int) -> Tensor:
        return torch.randn(length, generator=torch.Generator().manual_seed(item)).to(dtype)

    def add(rank: int) -> list[Tensor]:
        channel: Any = MemberChannel(boxes, rank)
        outs = [torch.empty(length, dtype=dtype) for length in lengths]
        sums = [PostedSum(channel, range(size), nodes, num_items, out) for out in outs]
        for _ in range(2):
            befores: list[tuple[list[Tensor], list[Tensor]]] = []
            for made in sums:
                made.post_receives()
            for made, length in zip(sums, lengths, strict=True):
                mine: TreeSum[Tensor] = TreeSum(num_items, torch.add, start=starts[rank])
                for item in range(starts[rank], starts[rank] + split[rank]):
                    mine.push(numbers(length, item))
                own = list(mine.nodes.values())
                before = [row.clone() for row in own]
                made.send(own)
                befores.append((own, before))
            for made in sums:
                made.start_waiting()
            channel.do_all()
            assert all(torch.equal(*rows) for kept in befores for rows in zip(*kept, strict=True))
        return outs

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(add, range(size), timeout=DEADLINE_SECONDS))
    wanted = [tree_sum([numbers(length, item) for item in range(num_items)], torch.add) for length in lengths]
    assert all(torch.equal(total, other) for totals in found for total, other in zip(totals, wanted, strict=True))
