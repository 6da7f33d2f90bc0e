"""What holds for the memory that the processes of a host share: run on every rank of a real job."""

import errno
import os
import resource
import socket
import threading
import warnings
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Final

import pytest
import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from popdist.errors import BackendError, CollectiveError
from popdist.exchange.host_memory import barriers, host_group, segments
from popdist.exchange.host_memory.host_collectives import HostCollectives
from popdist.exchange.host_memory.host_group import HostGroup, ShortMessages
from tests.tree_sums import tree_sum

TIMEOUT_SECONDS: Final = 300.0

_names = count()


def connect() -> HostGroup | None:
    """A group of all ranks."""
    store: Any = PrefixStore(f"law {next(_names)}", dist.distributed_c10d._get_default_store())
    return HostGroup.connect(store, dist.get_rank(), dist.get_world_size(), timeout_seconds=TIMEOUT_SECONDS)


@contextmanager
def connected() -> Iterator[HostGroup]:
    """A group of all ranks, which leave it together."""
    made = connect()
    assert made is not None
    yield made
    made.barrier()
    made.close()


def values(rank: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers whose sum depends on the order of addition."""
    return torch.randn(length, generator=torch.Generator().manual_seed(rank)).mul_(10.0**rank).to(dtype)


def in_tree_order(dtype: torch.dtype, length: int) -> torch.Tensor:
    """The sum of all ranks' numbers as `popdist.ground.tree` has it."""
    rows = [values(rank, length, dtype).float() for rank in range(dist.get_world_size())]
    return tree_sum(rows, torch.add).to(dtype)


def law_a_reduction_in_place_has_the_bits_of_the_tree() -> None:
    """Of every length, in halves too, and every rank sees the sum in every row; it can be run again."""
    with connected() as made:
        for length in (0, 1, 17, 300_001):
            for dtype in (torch.float32, torch.bfloat16):
                block = made.allocate(max(length, 1) * dtype.itemsize)
                rows = [row.view(dtype)[:length] for row in block.rows]
                reduction = made.reduction(rows)
                for _ in range(2):
                    rows[made.rank].copy_(values(made.rank, length, dtype))
                    reduction.run()
                    assert all(torch.equal(row, in_tree_order(dtype, length)) for row in rows)
                    made.barrier()
                block.release()


def law_a_reduction_in_place_divides_as_torch_does() -> None:
    """The same bits, by powers of two and by others; infinity and NaN in it are no cause for a warning."""
    with connected() as made, warnings.catch_warnings(action="error"):
        for dtype, wide in ((torch.float32,) * 2, (torch.float64,) * 2, (torch.bfloat16, torch.float32)):
            block = made.allocate(1000 * dtype.itemsize)
            rows = [row.view(dtype) for row in block.rows]
            reduction = made.reduction(rows)
            everybody = [values(rank, 1000, dtype).to(wide) for rank in range(made.size)]
            for over in (1, 2, 3.0, 0.25, 7 / 3):
                rows[made.rank].copy_(everybody[made.rank])
                rows[made.rank][:2] = torch.tensor([torch.inf, (-1) ** made.rank * torch.inf])
                reduction.run(over=over)
                expected = tree_sum([row.clone() for row in everybody], torch.add).div_(over).to(dtype)
                assert torch.equal(rows[made.rank][2:], expected[2:])
                assert rows[0][0] == torch.inf
                assert made.size == 1 or rows[0][1].isnan()
                made.barrier()
            block.release()


def law_a_reduction_goes_where_it_is_told() -> None:
    """Into outputs of another dtype, divided as told, in an order of the caller's."""
    with connected() as made:
        block, out = made.allocate(400), made.allocate(200)
        rows = [row.view(torch.float32) for row in block.rows]
        made.reduction(
            rows,
            outputs=[row.view(torch.float16) for row in out.rows],
            pairs=[(0, rank) for rank in range(1, made.size)],
        )
        rows[made.rank].fill_(float(made.rank))
        made.reduction(rows, outputs=[out.rows[0].view(torch.float16)]).run(over=0.25)
        expected = 4.0 * made.size * (made.size - 1) / 2
        assert (out.rows[0].view(torch.float16) == expected).all()


def law_a_rank_that_can_ask_no_other_keeps_all_from_it() -> None:
    """There is no group on any rank, although only one of them failed."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(segments, "_connect", lambda _token, _rank: None)
        assert (connect() is None) == (dist.get_world_size() > 1)


def law_nobody_waits_at_a_socket_whose_queue_is_full() -> None:
    """As strangers could fill it: there is no group then, at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "SOMAXCONN", 0)  # room for one
        assert (connect() is None) == (dist.get_world_size() > 2)


def law_a_foreign_segment_proves_no_host() -> None:
    """The token counts: memory in which another one stands is not taken for the rank's that announced it."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(segments, "TOKEN_OFFSET", 0)  # so it writes, and looks for, tokens elsewhere
        found = connect()
    assert (found is None) == (dist.get_world_size() > 1)


def law_a_rank_whose_kernel_has_no_such_memory_keeps_all_from_it() -> None:
    """They are told at once that there is no group, and need not wait for it."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == dist.get_world_size() - 1:
            patch.setattr(os, "memfd_create", refuse)
        assert connect() is None


def refuse(*_arguments: object) -> None:
    """As a sandbox does."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def law_a_shortage_is_an_error_on_every_rank() -> None:
    """No rank has the block then, and the group goes on."""
    with connected() as made:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if made.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        try:
            with pytest.raises(BackendError, match=r"room for .*shared memory"):
                made.allocate(1 << 22)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert made.allocate(1 << 22).mine.sum() == 0


def law_where_memory_is_not_ordered_fences_keep_it() -> None:
    """The same results with a memory barrier around every flag; without one, there is no group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_group, "make_fence", lambda: barriers.make_fence("riscv64"))
        with connected() as made:
            tensor = torch.ones(100_000)
            HostCollectives(made).all_reduce(tensor)
            assert (tensor == made.size).all()
        if dist.get_rank() == 0:
            patch.setattr(barriers, "_MEMBARRIER_NUMBERS", {})
        assert connect() is None


def words(*numbers: int) -> bytes:
    """A message."""
    return array("q", numbers).tobytes()


def law_messages_reach_any_set_of_ranks() -> None:
    """In order, from each to each, whatever the others do; a wait that was too short can be taken up again."""
    with connected() as made:
        boxes = ShortMessages(made, num_bytes=24)
        for turn in range(5):
            others = [rank for rank in range(made.size) if rank != made.rank and (rank + made.rank + turn) % 2]
            numbers = boxes.send(others, words(made.rank, turn, -1))
            received = [boxes.receive(*it, TIMEOUT_SECONDS) for it in zip(others, numbers, strict=True)]
            assert received == [words(it, turn, -1) for it in others]
        made.barrier()
        if made.size > 1 and made.rank == 0:
            (number,) = boxes.send([1], words(1, 2, 3))
            assert boxes.receive(1, number, 0.01) is None
        made.barrier()
        if made.rank == 1:
            boxes.send([0], words(7, 8, 9))
        if made.size > 1 and made.rank == 0:
            assert boxes.receive(1, number, TIMEOUT_SECONDS) == words(7, 8, 9)


def law_messages_are_received_in_any_order() -> None:
    """What was sent first is kept for whoever asks for it later; nobody sends over what was not taken."""
    with connected() as made:
        boxes = ShortMessages(made, num_bytes=8)
        others = [rank for rank in range(made.size) if rank != made.rank]
        sent = [boxes.send(others, words(10 * made.rank + turn)) for turn in range(4)]
        for turn in (2, 0, 3, 1):
            for other, number in zip(others, sent[turn], strict=True):
                assert boxes.receive(other, number, TIMEOUT_SECONDS) == words(10 * other + turn)


def law_a_purpose_can_be_read() -> None:
    """What ranks disagree on is told in words."""
    with connected() as made:
        if made.size > 1:
            with pytest.raises(CollectiveError, match=r"rank 0: allocate.*\n.*ranks? 1.*: barrier"):
                made.allocate(5) if made.rank == 0 else made.barrier()
        assert barriers.describe(barriers.purpose(0)) == "barrier"


def law_a_sleeper_wakes() -> None:
    """A rank that has waited long enough to sleep goes on when the others come, and so does one that is left."""
    with connected() as made:
        if made.rank:
            threading.Event().wait(0.2)
        made.barrier()


def law_a_forked_child_frees_nothing_of_its_parents() -> None:
    """What the child lets go of, as a reading process of a loader may, is there in the parent as before."""
    with connected() as made:
        reservation = made.reserve(1)
        reservation.row.fill_(7)
        child = os.fork()
        if child == 0:
            del reservation
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert int(reservation.row[0]) == 7


def law_who_has_left_is_named() -> None:
    """The others do not wait for it, at this meeting or a later one."""
    made = connect()
    assert made is not None
    made.barrier()
    if made.rank == made.size - 1:
        made.close()
        calls: list[Callable[[], object]] = [made.barrier, lambda: made.allocate(1)]
        for call in calls:
            with pytest.raises(BackendError, match="has left the group"):
                call()
    else:
        for _ in range(2):
            with pytest.raises(BackendError, match=f"rank {made.size - 1} was closed|had given up"):
                made.barrier()
        made.close()
