"""A reduction between hosts has the bits of the tree, whatever the hosts, the chunks and the shares.

And the order in which its chunks go on. A sum of posted messages has those bits, too, and may be made again.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from popdist.exchange.host_memory.addition import Combiner, Op
from popdist.exchange.transport import two_level
from popdist.exchange.transport.two_level import BucketAllReduce, TwoLevelReduction, WaitingPeers, in_turns
from popdist.ground.tree import Node, TreeSum, aligned_nodes
from tests.running import DEADLINE_SECONDS
from tests.tree_sums import tree_sum

LENGTHS = (0, 1, 7, 64, 150)
"""Numbers of a row: with the limits that the tests set, one message, several shares, and several chunks."""


class Meeting:
    """A place where as many threads bring a value each and see those of all."""

    def __init__(self, size: int) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = Barrier(size)

    def bring(self, index: int, value: Any) -> list[Any]:
        """The values of all threads, in their order."""
        self._values[index] = value
        self._barrier.wait(DEADLINE_SECONDS)
        values = list(self._values)
        self._barrier.wait(DEADLINE_SECONDS)
        return values


class Member:
    """One thread among several that send each other tensors: a transport, and collectives of a host."""

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self._meeting = meeting
        self._rank = rank
        self.size = size
        self.group = SimpleNamespace(rank=rank)

    def _combined(self, rows: list[Tensor], op: Op) -> Tensor:
        combine = Combiner(op, rows[0].dtype, self.size)
        total = torch.empty_like(rows[0])
        combine(rows, total, combine.memory(total.shape))
        return total

    def all_gather(self, *tensors: Any) -> Any:
        """Every member's tensor."""
        gathered = self._meeting.bring(self._rank, tensors[-1].clone())
        if len(tensors) == 1:
            return torch.stack(gathered)
        for output, tensor in zip(tensors[0], gathered, strict=True):
            output.copy_(tensor)
        return None

    def all_to_all(self, rows: Tensor) -> Tensor:
        """What every member has for this one."""
        return torch.stack([it[self._rank] for it in self._meeting.bring(self._rank, rows.clone())])

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        """In the memory of a host."""
        tensor.copy_(self._combined(self._meeting.bring(self._rank, tensor.clone()), op))

    def reduce_scatter(self, output: Tensor, tensors: Sequence[Tensor], op: Op) -> None:
        """In the memory of a host."""
        brought = self._meeting.bring(self._rank, [it.clone() for it in tensors])
        output.copy_(self._combined([it[self._rank] for it in brought], op))


def in_threads(size: int, run: Callable[[int], Tensor]) -> list[Tensor]:
    """What ``run`` gives for each member."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size), timeout=DEADLINE_SECONDS))


def numbers(length: int, seed: int) -> Tensor:
    """Of many magnitudes, so that another order of additions has other bits."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(length, generator=draw) * 10.0 ** torch.randint(-5, 5, (length,), generator=draw)


@pytest.fixture
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_level, "FEW", 8)
    monkeypatch.setattr(two_level, "CHUNK_SIZE", 32)


@pytest.mark.usefixtures("_small_limits")
@pytest.mark.parametrize("split", [(8,), (4, 4), (3, 5), (1, 6, 1), (2, 3, 3)])
def test_any_split_of_the_replicas_has_the_bits_of_one_instance(split: tuple[int, ...]) -> None:
    """Each member brings the partial sums of its own replicas, as many as they make."""
    num_items = sum(split)
    starts = [sum(split[:it]) for it in range(len(split))]
    nodes = [aligned_nodes(start, start + count, num_items) for start, count in zip(starts, split, strict=True)]
    for length in LENGTHS:
        meeting = Meeting(len(split))
        wanted = tree_sum([numbers(length, seed) for seed in range(num_items)], Tensor.add)

        def add(rank: int, meeting: Meeting = meeting, length: int = length) -> Tensor:
            mine: TreeSum[Tensor] = TreeSum(num_items, Tensor.add, start=starts[rank])
            for item in range(starts[rank], starts[rank] + split[rank]):
                mine.push(numbers(length, item))
            peers = WaitingPeers(Member(meeting, rank, len(split)))
            into = torch.empty(length)
            TwoLevelReduction(peers, nodes, num_items).all_reduce(list(mine.nodes.values()), into=into)
            return into

        assert all(torch.equal(total, wanted) for total in in_threads(len(split), add))


@pytest.mark.usefixtures("_small_limits")
@pytest.mark.parametrize(("num_hosts", "num_local"), [(2, 2), (3, 2), (2, 4), (3, 1)])
@pytest.mark.parametrize(
    ("op", "dtype"),
    [("sum", torch.float32), ("mean", torch.float16), ("max", torch.int64), ("rounded sum", torch.bfloat16)],
)
def test_members_of_a_host_add_in_its_memory_first(
    num_hosts: int, num_local: int, op: Op, dtype: torch.dtype
) -> None:
    """To the same bits as where all ranks share one memory, by both reductions."""
    size = num_hosts * num_local
    hosts, peers = [Meeting(num_local) for _ in range(num_hosts)], [Meeting(num_hosts) for _ in range(num_local)]
    nodes = [[Node(0, host)] for host in range(num_hosts)]

    def reduction(rank: int) -> TwoLevelReduction:
        host, local = divmod(rank, num_local)
        transport = WaitingPeers(Member(peers[local], host, num_hosts))
        local_collectives: Any = Member(hosts[host], local, num_local) if num_local > 1 else None
        return TwoLevelReduction(transport, nodes, num_hosts, local_collectives)

    for length in LENGTHS:
        rows = [numbers(length, rank).to(dtype) for rank in range(size)]
        combine, wanted = Combiner(op, dtype, size), torch.empty(length, dtype=dtype)
        combine(rows, wanted, combine.memory(wanted.shape))

        def reduce(rank: int, rows: list[Tensor] = rows) -> Tensor:
            mine = rows[rank].clone()
            reduction(rank).all_reduce([mine], op)
            return mine

        def scatter(rank: int, rows: list[Tensor] = rows, length: int = length) -> Tensor:
            made = reduction(rank)
            shares = made.empty_shares(rows[rank], length, op)
            for member in range(size):
                made.share_of(shares, member).copy_(rows[rank] if member == 1 else torch.zeros_like(rows[rank]))
            return made.reduce_scatter(shares, op).to(dtype)

        assert all(torch.equal(total, wanted) for total in in_threads(size, reduce))
        assert torch.equal(in_threads(size, scatter)[1], wanted)


def test_a_work_begins_before_those_before_it_go_on() -> None:
    """So that something travels while the next one computes."""
    told: list[str] = []

    def work(name: str) -> Iterator[bool]:
        told.append(f"{name} begins")
        yield True
        told.append(f"{name} goes on")
        yield True
        told.append(f"{name} ends")

    in_turns(work(name) for name in "abc")

    assert told == [
        "a begins",
        "b begins",
        "a goes on",
        "c begins",
        "b goes on",
        "a ends",
        "c goes on",
        "b ends",
        "c ends",
    ]


@given(st.lists(st.integers(0, 4), max_size=8))
def test_every_work_is_done_once_and_in_its_order(pauses: list[int]) -> None:
    """However often each pauses."""
    done: dict[int, list[int]] = {number: [] for number in range(len(pauses))}

    def work(number: int, times: int) -> Iterator[bool]:
        for step in range(times):
            done[number].append(step)
            yield True
        done[number].append(times)

    in_turns(work(number, times) for number, times in enumerate(pauses))

    assert done == {number: list(range(times + 1)) for number, times in enumerate(pauses)}


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

    def issue(self, do: Any, _tensors: object) -> None:
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
def test_posted_sums_have_the_bits_of_one_instance_for_any_split(
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
        sums = [BucketAllReduce(channel, nodes, num_items, out) for out in outs]
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
