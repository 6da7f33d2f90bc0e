"""Collectives drawn by chance, on ranks that come when chance has them come, with tensors in memory of every kind.

Each number of a list is a seed: all ranks draw the same call from it, and each draws for itself how late it is,
whether it waits at once, and what memory it brings; 0 is no call.
Everything brought is a small whole number, so each rank knows what must come out, in every dtype.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed import ReduceOp

import popdist
from popdist.contract import SHARE_TENSORS
from tests.contract.forked_ranks import Rank

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)
REDUCE: dict[ReduceOp.RedOpType, Callable[[Tensor], Tensor]] = {
    ReduceOp.SUM: lambda rows: rows.sum(0),
    ReduceOp.MIN: lambda rows: rows.amin(0),
    ReduceOp.MAX: lambda rows: rows.amax(0),
    ReduceOp.PRODUCT: lambda rows: rows.prod(0),
}
LARGE = (65_536, 140_000)
"""Elements of what is offered in place, and of what goes in pieces otherwise."""

LARGE_SHARE = 0.12
SHARING = -1
"""The group that may move tensors that come again."""

ASYNC_SHARE = 0.3
MOST_PENDING = 6
DELAYED, LONG_DELAYED = 0.15, 0.01
DELAY_SECONDS, LONG_DELAY_SECONDS = 0.0002, 0.003


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective, the same on every rank.

    Attributes:
        number: Which one it is.
        name: A method below.
        group: Which group it is made in.
        op: For those that reduce.
        dtype: Of what is brought.
        size: Elements of what is brought, for each rank where it is dealt out.
        root: A member, for those that have one.
    """

    number: int
    name: str
    group: int
    op: ReduceOp.RedOpType
    dtype: torch.dtype
    size: int
    root: int


def drawn(number: int, draw: random.Random, members: list[list[int]]) -> Call:
    """The next call."""
    is_large = draw.random() < LARGE_SHARE
    group = SHARING if is_large else draw.randrange(len(members))
    return Call(
        number=number,
        name=draw.choice(sorted(NAMED)),
        group=group,
        op=draw.choice(list(REDUCE)),
        dtype=draw.choice(DTYPES),
        size=draw.choice(LARGE if is_large else (0, 1, 3, 7, 64, 65, 1000, draw.randrange(20_000))),
        root=draw.choice(members[group]),
    )


class Player:
    """Makes the calls of one rank and checks what comes of them, at once or when they are waited for."""

    def __init__(self, rank: Rank) -> None:
        everyone = list(range(rank.num_ranks))
        self.members = [everyone, everyone, everyone[1:] or everyone, everyone]
        self.groups = [distributed.new_group(ranks) for ranks in self.members[:-1]]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(SHARE_TENSORS, "1")
            self.groups.append(distributed.new_group(everyone))
        self.rank = rank.rank
        self._draw = random.Random()  # noqa: S311 - of the call that is played
        self._kept: dict[tuple[torch.dtype, int], Tensor] = {}
        self._pending: deque[tuple[Call, distributed.Work, Callable[[], bool]]] = deque()

    def play(self, call: Call, draw: random.Random) -> None:
        """One call, perhaps late, and perhaps a wait for one before it, as this rank draws."""
        if self.rank not in self.members[call.group]:
            return
        self._draw, chance = draw, draw.random()
        if chance < DELAYED:
            time.sleep(draw.uniform(0, LONG_DELAY_SECONDS if chance < LONG_DELAYED else DELAY_SECONDS))
        work, is_right = NAMED[call.name](self, call)
        if work is None:
            assert is_right(), f"rank {self.rank}: {call}"
        else:
            self._pending.append((call, work, is_right))
        if len(self._pending) > draw.randrange(MOST_PENDING):
            self._wait(draw.randrange(len(self._pending)))

    def finish(self) -> None:
        """Wait for all that was begun."""
        while self._pending:
            self._wait(0)

    def _wait(self, which: int) -> None:
        call, work, is_right = self._pending[which]
        del self._pending[which]
        work.wait()
        assert is_right(), f"rank {self.rank}: {call}"

    def rows(self, call: Call, size: int) -> Tensor:
        """What the members bring, as whole numbers; a row for each."""
        salts = torch.tensor([(31 * member + call.number) % 1009 for member in self.members[call.group]])
        return (torch.arange(size) * 7 + salts[:, None] * 13) % 10

    def reduced(self, call: Call, rows: Tensor) -> Tensor:
        """What must come out."""
        is_exact = not call.dtype.is_floating_point
        return REDUCE[call.op](rows if is_exact else rows.double()).to(call.dtype)

    @property
    def is_async(self) -> bool:
        """Whether this rank waits later; drawn each time."""
        return self._draw.random() < ASYNC_SHARE

    def brought(self, row: Tensor, dtype: torch.dtype) -> Tensor:
        """These numbers in memory of some kind: torch's, all ranks', such that comes again, or with gaps."""
        kind, size = self._draw.choice(("torch's", "shared", "again", "gaps")), len(row)
        if kind == "shared" and size:
            return popdist.shared_empty(size, dtype=dtype).copy_(row)
        if kind == "gaps":
            return torch.empty(size, 2, dtype=dtype)[:, 0].copy_(row)
        if kind == "again" and not self._pending:
            return self._kept.setdefault((dtype, size), torch.empty(size, dtype=dtype)).copy_(row)
        return row.to(dtype)

    def place(self, call: Call) -> int:
        """This rank's place in the group."""
        return self.members[call.group].index(self.rank)

    def all_reduce(self, call: Call) -> "Outcome":
        """Everyone has what all brought, combined."""
        rows = self.rows(call, call.size)
        tensor, wanted = self.brought(rows[self.place(call)], call.dtype), self.reduced(call, rows)
        work = distributed.all_reduce(tensor, ReduceOp(call.op), self.groups[call.group], self.is_async)
        return work, lambda: torch.equal(tensor, wanted)

    def reduce(self, call: Call) -> "Outcome":
        """The root has it."""
        rows = self.rows(call, call.size)
        tensor, wanted = self.brought(rows[self.place(call)], call.dtype), self.reduced(call, rows)
        work = distributed.reduce(tensor, call.root, ReduceOp(call.op), self.groups[call.group], self.is_async)
        return work, lambda: self.rank != call.root or torch.equal(tensor, wanted)

    def broadcast(self, call: Call) -> "Outcome":
        """Everyone has the root's."""
        rows = self.rows(call, call.size).to(call.dtype)
        tensor = self.brought(rows[self.place(call)], call.dtype)
        wanted = rows[self.members[call.group].index(call.root)]
        work = distributed.broadcast(tensor, call.root, self.groups[call.group], self.is_async)
        return work, lambda: torch.equal(tensor, wanted)

    def all_gather(self, call: Call) -> "Outcome":
        """Everyone has everything."""
        rows = self.rows(call, call.size).to(call.dtype)
        whole = torch.empty_like(rows)
        mine = self.brought(rows[self.place(call)], call.dtype)
        work = distributed.all_gather_single(whole.view(-1), mine, self.groups[call.group], self.is_async)
        return work, lambda: torch.equal(whole, rows)

    def reduce_scatter(self, call: Call) -> "Outcome":
        """Each has its part of what all brought, combined."""
        rows = self.rows(call, call.size * len(self.members[call.group]))
        part = torch.empty(call.size, dtype=call.dtype)
        mine = self.brought(rows[self.place(call)], call.dtype)
        wanted = self.reduced(call, rows).view(len(self.members[call.group]), call.size)[self.place(call)]
        group = self.groups[call.group]
        work = distributed.reduce_scatter_single(part, mine, ReduceOp(call.op), group, self.is_async)
        return work, lambda: torch.equal(part, wanted)

    def all_to_all(self, call: Call) -> "Outcome":
        """Each has a part of everyone's."""
        num_members = len(self.members[call.group])
        rows = self.rows(call, call.size * num_members).to(call.dtype)
        received = torch.empty(num_members, call.size, dtype=call.dtype)
        mine = self.brought(rows[self.place(call)], call.dtype)
        group = self.groups[call.group]
        work = distributed.all_to_all_single(received.view(-1), mine, group=group, async_op=self.is_async)
        wanted = rows.view(num_members, num_members, call.size)[:, self.place(call)]
        return work, lambda: torch.equal(received, wanted)

    def barrier(self, call: Call) -> "Outcome":
        """Nobody goes on alone."""
        return distributed.barrier(self.groups[call.group], self.is_async), lambda: True


Outcome = tuple[distributed.Work | None, Callable[[], bool]]

NAMED: dict[str, Callable[[Player, Call], Outcome]] = {
    name: getattr(Player, name)
    for name in ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier")
}


def play(rank: Rank, seeds: Sequence[int]) -> None:
    """The calls of ``seeds``, in their order."""
    player = Player(rank)
    for number, seed in enumerate(seeds):
        if seed:
            call = drawn(number, random.Random(seed), player.members)  # noqa: S311 - the same on all ranks
            player.play(call, random.Random(f"{seed} {rank.rank}"))  # noqa: S311 - delays
    player.finish()
    distributed.barrier()
