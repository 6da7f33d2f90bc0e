"""The laws of a torch backend about who comes when: asynchronous calls, several groups, ranks that stay away."""

from datetime import timedelta
from threading import Thread, current_thread
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _get_default_store

from popdist.exchange.host_memory import messages
from popdist.exchange.host_memory.barriers import wait_until
from popdist.exchange.process_group import work_queue
from popdist.exchange.process_group.work_queue import PendingWork, WorkQueue
from tests.contract.backend_laws import all_brought, brought, expected, same
from tests.contract.forked_ranks import Rank
from tests.torch_names import named

TIMEOUT_SECONDS = 30.0


def law_a_call_can_return_before_the_others_come(rank: Rank) -> None:
    """The last rank comes only when the others have gone on; waits may come in any order."""
    store = _get_default_store()
    if rank.is_last:
        store.wait([f"gone-on-{other}" for other in range(rank.num_ranks - 1)])
    tensors = [brought(rank.rank, torch.float32, size) for size in (5, 100_000, 3)]
    works = [distributed.all_reduce(tensor, async_op=True) for tensor in tensors]
    if not rank.is_last:
        assert not any(work.is_completed() for work in works if work)
        store.set(f"gone-on-{rank.rank}", "")
    for work in reversed(works):
        assert work is not None
        assert work.wait()
        assert work.is_completed()
    for tensor in tensors:
        assert same(tensor, expected(all_brought(rank, torch.float32, len(tensor)), ReduceOp.SUM))


def law_a_future_brings_the_result(rank: Rank) -> None:
    """As DistributedDataParallel's hooks ask for it."""
    tensor = torch.full((4,), float(rank.rank))
    work = distributed.all_reduce(tensor, async_op=True)
    assert work is not None
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert doubled.wait().tolist() == [2.0 * sum(range(rank.num_ranks))] * 4


def law_a_callback_may_issue_and_wait(rank: Rank) -> None:
    """As hooks that reduce in rounds do; its calls come before those that were issued after the first round."""
    order: list[float] = []

    def follow(future: Any) -> Tensor:
        first = future.value()[0]
        work = distributed.all_reduce(first, async_op=True)
        assert work is not None
        second: Tensor = work.get_future().wait()[0]
        distributed.all_reduce(second)
        order.append(second.item())
        return second

    size = rank.num_ranks
    tensors = [torch.tensor([number + 1.0]) for number in range(20)]
    futures = []
    for tensor in tensors:
        work = distributed.all_reduce(tensor, async_op=True)
        assert work is not None
        futures.append(work.get_future().then(follow))
    assert [future.wait().item() for future in futures] == [size**3 * (number + 1.0) for number in range(20)]
    assert order == sorted(order)


def law_what_fails_raises_where_it_is_waited_for(rank: Rank) -> None:
    """Also over gloo beside the group, by an operator that is called itself, and where only the results fail."""
    gloo: Any = rank.gloo
    odd = torch.ones(2, dtype=torch.uint16)
    work = named(gloo, "all_gather_single_coalesced")([odd.repeat(rank.num_ranks)], [odd])
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        work.wait()

    group: Any = distributed.group.WORLD
    if rank.num_ranks > 1 and group.host_group:
        tensor = torch.ones(3 if rank.is_last else 2)
        with pytest.raises(RuntimeError, match="not in the same collective"):
            torch.ops.c10d.broadcast_([tensor], group.boxed(), 0, 0, True, -1)  # noqa: FBT003 - whose names differ

    pending = PendingWork(lambda: [int("no number")], WorkQueue(lambda: None))
    assert (pending.is_completed(), pending.exception()) == (False, None)
    pending.finish(None)
    with pytest.raises(ValueError, match="no number"):
        pending.wait()
    assert (pending.is_completed(), pending.is_success()) == (True, False)


def law_who_waits_does_what_was_issued(rank: Rank) -> None:
    """The group's thread does it where a future is asked for, where more is issued, or in the end."""
    del rank
    me, queue, found = current_thread(), WorkQueue(lambda: None), list[Thread]()

    def issue() -> Any:
        return queue.run(lambda: found.append(current_thread()), (), [], is_async=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work_queue, "_HAND_OVER_SECONDS", TIMEOUT_SECONDS)
        issue().wait()
        assert found.pop() is me
        issue().get_future().wait()
        assert found.pop() is not me
        assert all(wait_until(work.is_completed, TIMEOUT_SECONDS) for work in (issue(), issue()))
    queue.stop()
    queue = WorkQueue(lambda: None)
    assert wait_until(issue().is_completed, TIMEOUT_SECONDS)
    queue.stop()
    assert me not in found


def law_two_groups_may_be_used_in_opposite_order(rank: Rank) -> None:
    """Each has its own worker, so neither waits for the other one."""
    groups = [distributed.new_group(), distributed.new_group()]
    tensors = [torch.full((1000,), 1.0), torch.full((1000,), 2.0)]
    order = (0, 1) if rank.rank % 2 else (1, 0)
    works = {which: distributed.all_reduce(tensors[which], group=groups[which], async_op=True) for which in order}
    for which in order:
        work = works[which]
        assert work is not None
        work.wait()
        assert tensors[which].tolist() == [rank.num_ranks * (which + 1.0)] * 1000
    for group in groups:
        distributed.destroy_process_group(group)


def neighbours(rank: Rank) -> tuple[int, int]:
    """The rank before this one, and the one after it."""
    return (rank.rank - 1) % rank.num_ranks, (rank.rank + 1) % rank.num_ranks


def law_all_may_send_before_they_receive(rank: Rank) -> None:
    """Messages of any length, of which those with one tag stay in order; they are read after other collectives."""
    if rank.num_ranks == 1:
        return
    before, after = neighbours(rank)
    lengths = (0, 3, 1_500_000, 70_000, 1)
    sent = [distributed.isend(brought(rank.rank, torch.float32, it), after, tag=it % 2) for it in lengths]
    distributed.barrier()
    for length in sorted(lengths, key=lambda it: it % 2):
        found = torch.empty(length)
        assert distributed.recv(found, before, tag=length % 2) == before
        assert same(found, brought(before, torch.float32, length)), length
    for work in sent:
        assert work is not None
        work.wait()


def law_batches_may_be_waited_for_in_any_order(rank: Rank) -> None:
    """Each receipt has the message that is its own, whoever is waited for first."""
    if rank.num_ranks == 1:
        return
    before, after = neighbours(rank)
    lengths = (300_000, 2, 5)
    found = [torch.empty(length) for length in lengths]
    batch = [distributed.P2POp(distributed.irecv, it, before) for it in found]
    batch += [distributed.P2POp(distributed.isend, brought(rank.rank, torch.float32, it), after) for it in lengths]
    for work in reversed(distributed.batch_isend_irecv(batch)):
        work.wait()
    assert all(same(it, brought(before, torch.float32, len(it))) for it in found)


def law_a_message_of_any_rank_has_a_source(rank: Rank) -> None:
    """The last rank receives one of each other, at once and later."""
    others = range(rank.num_ranks - 1)
    if not rank.is_last:
        for _ in range(2):
            distributed.send(torch.full((3,), float(rank.rank)), rank.num_ranks - 1, tag=7)
        return
    found: list[int] = []
    for _ in others:
        tensor = torch.empty(3)
        found.append(distributed.recv(tensor, tag=7))
        assert tensor.tolist() == [found[-1]] * 3
    for _ in others:
        work: Any = distributed.irecv(tensor, tag=7)
        work.wait()
        found.append(work._source_rank())
        assert tensor.tolist() == [found[-1]] * 3
    assert sorted(found) == sorted([*others, *others])


def law_messages_in_memory_fit_any_tensor(rank: Rank) -> None:
    """With strides, in inference mode, longer than what comes, also a rank's own; what does not fit is named."""
    group: Any = distributed.group.WORLD
    if not group.host_group:
        return
    before, after = neighbours(rank)
    irecv: Any = distributed.irecv
    turned, wide = torch.zeros(4, 3).T, torch.zeros(20)
    with torch.inference_mode():
        works = [distributed.isend(torch.arange(12.0).reshape(4, 3).T, after) for _ in range(3)]
        made_there = torch.zeros(12)
        irecv(made_there, before).wait()
    for into in (turned, wide):
        work = irecv(into, before)
        assert work.wait()
        assert (work.is_completed(), work.is_success(), work.exception()) == (True, True, None)
    assert torch.equal(turned, torch.arange(12.0).reshape(4, 3).T)
    wanted = torch.arange(12.0).reshape(4, 3).T.flatten()
    assert torch.equal(made_there, wanted)
    assert torch.equal(wide, torch.cat([wanted, torch.zeros(8)]))
    assert all(work is not None and work.wait() for work in works)

    too_long = distributed.isend(torch.ones(3), after)
    with pytest.raises(RuntimeError, match=f"rank {before} has sent 12 bytes, and the tensor .* has 8"):
        irecv(torch.ones(2), before).wait()
    late = irecv(turned, before)
    with pytest.raises(RuntimeError, match=r"not come within 0\.01 seconds"):
        late.wait(timedelta(seconds=0.01))
    distributed.barrier()
    distributed.isend(torch.ones(12), after)
    assert late.wait()
    assert turned.eq(1).all()
    assert too_long is not None
    too_long.wait()


def law_messages_use_their_memory_again(rank: Rank) -> None:
    """A sender whose messages pile up waits for their receipt."""
    group: Any = distributed.group.WORLD
    if not group.host_group or rank.num_ranks == 1:
        return
    before, after = neighbours(rank)
    tensor, sizes = torch.ones(300_000), []
    for _ in range(5):
        work = distributed.isend(tensor, after)
        distributed.recv(tensor.clone(), before)
        distributed.barrier()
        sizes.append(group.host_group.num_bytes)
    assert len(set(sizes)) == 1
    assert work is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "MOST_AHEAD_BYTES", tensor.nbytes)
        works = [distributed.isend(tensor, after), distributed.isend(tensor, after)]
        assert [work.is_completed() for work in works if work] == [False, False]
        distributed.barrier()
        distributed.recv(tensor.clone(), before)
        distributed.barrier()
        assert [work.is_completed() for work in works if work] == [True, True]
        distributed.recv(tensor.clone(), before)


def law_a_part_of_the_ranks_is_a_group_too(rank: Rank) -> None:
    """Roots are numbers of the whole job; the tree is over the group's own ranks."""
    members = list(range(0, rank.num_ranks, 2))
    group = distributed.new_group(members)
    if rank.rank in members:
        tensor = brought(rank.rank, torch.float32, 1025)
        distributed.all_reduce(tensor, group=group)
        assert same(tensor, expected([brought(member, torch.float32, 1025) for member in members], ReduceOp.SUM))
        distributed.broadcast(tensor.fill_(rank.rank), members[-1], group=group)
        assert tensor.tolist() == [members[-1]] * 1025
        distributed.destroy_process_group(group)


def law_a_rank_that_does_not_come_is_named(rank: Rank) -> None:
    """When the timeout of the group is over, by those that came, and in later calls; who comes then is told so."""
    group: Any = distributed.new_group(timeout=timedelta(seconds=1))
    for is_async in (False, True) if rank.num_ranks > 1 and not rank.is_last else ():
        message = ""
        try:
            work = distributed.all_reduce(torch.ones(3), group=group, async_op=is_async)
            assert work is not None
            work.wait()
        except RuntimeError as error:
            message = str(error)
        assert f"rank {rank.num_ranks - 1}" in message, message
    distributed.barrier(rank.gloo)
    if rank.num_ranks > 1 and rank.is_last and group.host_group:
        distributed.all_reduce(torch.ones(3), group=group)  # of which the others' parts are there
        with pytest.raises(RuntimeError, match="had given up waiting"):
            distributed.all_reduce(torch.ones(3), group=group)
    distributed.barrier(rank.gloo)
    other: Any = distributed.new_group(timeout=timedelta(seconds=0.2))
    if rank.num_ranks > 1 and other.host_group:
        message = ""
        if not rank.is_last:
            try:
                distributed.recv(torch.ones(3), rank.num_ranks - 1, group=other)
            except RuntimeError as error:
                message = str(error)
            assert f"rank {rank.num_ranks - 1} did not come within the timeout of 0.2 seconds" in message, message
    distributed.barrier(rank.gloo)
