"""Calls of a group's own methods: torch's names and forms for arguments, mistakes, futures, and shared memory.

What gloo does with the same call is looked up by calling it.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed import ReduceOp
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard

from tests.contract.forked_ranks import Rank
from tests.torch_names import HAS_GLOO_LISTS, VERSION, all_gather_single, named

TIMEOUT = timedelta(seconds=60)

Group = Any  # torch's stubs lack the methods of groups


def ours() -> Group:
    """The group under test."""
    return distributed.group.WORLD


def row(rank: Rank, length: int = 3) -> Tensor:
    """What a rank brings."""
    return torch.arange(float(length)) + 10 * rank.rank


def rows(rank: Rank, length: int = 3) -> list[Tensor]:
    """Places for what all ranks bring."""
    return [torch.zeros(length) for _ in range(rank.num_ranks)]


def raised(call: Callable[[], Any]) -> type[BaseException] | None:
    """The class of what a call, or the wait for it, raises."""
    try:
        work: Any = call()
        if isinstance(work, distributed.Work):
            work.wait()
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        return type(error)
    return None


def mistakes(rank: Rank, group: Group) -> Iterator[Callable[[], Any]]:
    """Calls that gloo refuses before it sends anything."""
    size, mine = rank.num_ranks, row(rank)
    for root in (-1, size, size + 5):
        yield partial(group.broadcast, mine, root)
        yield partial(group.reduce, mine, root)
        yield partial(group.gather, rows(rank), mine, root)
    yield from (partial(call, []) for call in (group.allreduce, group.allreduce_coalesced, group.broadcast))
    for call in (group.allgather, group.allgather_coalesced, group.reduce_scatter, group.alltoall):
        yield partial(call, [], [])
    yield partial(named(group, "all_gather_single_coalesced"), [], [])
    yield partial(named(group, "reduce_scatter_single_coalesced"), [], [])
    yield partial(group.reduce, [])
    yield partial(group.send, [], 0, 0)
    yield partial(group.allgather, [rows(rank)[1:]], [mine])
    yield partial(group.allgather, [rows(rank, 4)], [mine])
    yield partial(group.allgather, [[tensor.int() for tensor in rows(rank)]], [mine])
    yield partial(group.allgather_coalesced, [[tensor] for tensor in rows(rank)[1:]], [mine])
    yield partial(named(group, "all_gather_single"), torch.zeros(3 * size + 1), mine)
    yield partial(group.reduce_scatter, [mine], [rows(rank)[1:]])
    yield partial(group.alltoall, rows(rank)[1:], rows(rank)[1:])
    yield partial(group.alltoall, [tensor.int() for tensor in rows(rank)], rows(rank))
    yield partial(
        named(group, "all_to_all_single"), torch.zeros(2 * size), torch.zeros(2 * size), [2] * size, [1] * size
    )
    yield partial(group.allreduce, ["a tensor"])
    yield partial(group.allreduce, None)


def law_mistakes_raise_what_gloo_raises(rank: Rank) -> None:
    """On every rank, before anything is sent: the group goes on."""
    pairs = zip(mistakes(rank, ours()), mistakes(rank, rank.gloo), strict=True)
    for number, (mine, theirs) in enumerate(pairs):
        found, wanted = raised(mine), raised(theirs)
        assert found is wanted, (number, found, wanted)
        assert wanted is not None, number
    distributed.barrier()


def law_a_wrong_root_is_told_in_gloos_words(rank: Rank) -> None:
    """Also through ``torch.distributed``, which passes on the root of the default group as it is."""
    for call in (distributed.broadcast, distributed.reduce):
        for root in (-1, rank.num_ranks):
            with pytest.raises(RuntimeError, match=f"invalid root rank: {root}"):
                call(row(rank), root)


def law_tensors_of_one_call_may_share_memory(rank: Rank) -> None:
    """All are combined, sent and gathered as they were before the call, as over gloo."""
    size = rank.num_ranks
    for group in (ours(), rank.gloo):
        whole = torch.arange(5.0) + rank.rank
        wanted = torch.stack([torch.arange(5.0) + other for other in range(size)]).sum(0)
        group.allreduce_coalesced([whole[:3], whole[2:], whole[:3]]).wait()
        assert torch.equal(whole, wanted)
        mine, other = row(rank), torch.zeros(3)
        places = [mine, *[torch.zeros(3) for _ in range(size - 2)], other][:size]
        group.allgather([places], [mine]).wait()
        assert [place[0].item() for place in places] == [10.0 * number for number in range(size)]
    exchanged = torch.arange(float(size)) + 100 * rank.rank
    distributed.all_to_all_single(exchanged, exchanged)
    assert exchanged.tolist() == [100.0 * number + rank.rank for number in range(size)]
    whole = torch.zeros(size, 3)
    whole[0] = row(rank)
    all_gather_single(whole, whole[0])
    assert whole[:, 0].tolist() == [10.0 * number for number in range(size)]


def law_numbers_in_one_place_are_refused_before_the_exchange(rank: Rank) -> None:
    """A tensor of ``expand`` cannot be written into; it can be sent."""
    expanded = torch.ones(1).expand(4)
    group = ours()
    for call in (
        partial(group.allreduce, [expanded]),
        partial(group.broadcast, expanded, 0),
        partial(group.reduce, expanded, 0),
        partial(group.allgather, [[expanded] * rank.num_ranks], [torch.ones(4)]),
        partial(named(group, "all_gather_single"), torch.ones(1).expand(4 * rank.num_ranks), torch.ones(4)),
        partial(group.reduce_scatter, [expanded], [rows(rank, 4)]),
        partial(
            named(group, "all_to_all_single"),
            torch.ones(1).expand(2 * rank.num_ranks),
            rows(rank, 2)[0].repeat(rank.num_ranks),
            [],
            [],
        ),
    ):
        with pytest.raises(RuntimeError, match="single memory location"):
            call()
    places = rows(rank, 4)
    group.allgather([places], [expanded]).wait()
    assert all(place.tolist() == [1.0] * 4 for place in places)


def law_arguments_have_torchs_names(rank: Rank) -> None:
    """Of one tensor, and what would stand in the options."""
    group, size, last = ours(), rank.num_ranks, 10.0 * (rank.num_ranks - 1)
    timeout = {} if VERSION < (2, 8) else {"timeout": TIMEOUT}  # in the options alone
    tensor = row(rank)
    group.allreduce(tensor=tensor, op=ReduceOp.MAX, **timeout).wait()
    assert tensor[0].item() == last
    group.allreduce(tensors=[tensor], op=ReduceOp.MIN).wait()
    tensor = row(rank)
    group.broadcast(tensor=tensor, root=size - 1, **timeout).wait()
    assert tensor[0].item() == last
    tensor = row(rank)
    group.reduce(tensor=tensor, root=0, op=ReduceOp.MAX).wait()
    assert rank.rank or tensor[0].item() == last
    places = rows(rank)
    group.allgather(output_tensors=places, input_tensor=row(rank), **timeout).wait()
    assert places[-1][0].item() == last
    group.reduce_scatter(output=tensor, input=[row(rank)] * size, op=ReduceOp.MAX, **timeout).wait()
    assert tensor[0].item() == last
    named(group, "reduce_scatter_single")(outputTensor=tensor, inputTensor=torch.cat([row(rank)] * size)).wait()
    whole = torch.zeros(size)
    named(group, "all_to_all_single")(
        output=whole, input=row(rank, size), output_split_sizes=[], input_split_sizes=[], **timeout
    ).wait()
    assert whole[-1].item() == last + rank.rank
    group.alltoall_base(output=whole, input=row(rank, size), output_split_sizes=[], input_split_sizes=[]).wait()
    assert whole[-1].item() == last + rank.rank
    group.barrier(**timeout).wait()
    if size > 1:
        sent = group.send(tensors=[row(rank)], dstRank=(rank.rank + 1) % size, tag=0)
        group.recv(tensors=[tensor], srcRank=(rank.rank - 1) % size, tag=0).wait()
        sent.wait()
        assert tensor[0].item() == 10.0 * ((rank.rank - 1) % size)


def futures(rank: Rank, group: Group) -> Iterator[Any]:
    """What the futures of gloo's works hold, collective by collective."""
    size = rank.num_ranks
    whole, parts = torch.zeros(3 * size), rows(rank)
    works = (
        lambda: group.allreduce([row(rank)]),
        lambda: group.allreduce_coalesced([row(rank), row(rank, 2)]),
        lambda: group.broadcast([row(rank)]),
        lambda: group.allgather([rows(rank)], [row(rank)]),
        lambda: group.allgather_coalesced([[tensor] for tensor in rows(rank)], [row(rank)]),
        lambda: named(group, "all_gather_single")(whole, row(rank)),
        lambda: named(group, "all_gather_single_coalesced")(
            [whole, torch.zeros(size)], [row(rank), torch.ones(1)]
        ),
        *((lambda: group.alltoall(rows(rank), parts),) if HAS_GLOO_LISTS else ()),
        lambda: named(group, "all_to_all_single")(torch.zeros(3 * size), whole, [], []),
        group.barrier,
    )
    for work in works:
        yield work().get_future().wait()


def law_futures_hold_what_gloos_hold(rank: Rank) -> None:
    """Lists of tensors, in the order of the ranks where they come from ranks."""
    for number, (found, wanted) in enumerate(zip(futures(rank, ours()), futures(rank, rank.gloo), strict=True)):
        assert repr(found) == repr(wanted), (number, found, wanted)
    work: Any = distributed.all_reduce(row(rank), group=ours(), async_op=True)
    work.wait()
    assert (work.is_completed(), work.is_success(), work.exception()) == (True, True, None)
    assert torch.equal(work.result()[0], work.get_future().value()[0])


def law_a_monitored_barrier_is_one(rank: Rank) -> None:
    """Of gloo beneath; with both of its arguments, for this group and others, and for those who are in none."""
    gloo: Any = rank.gloo
    distributed.monitored_barrier()
    for group in (ours(), gloo):
        group.monitored_barrier()
        group.monitored_barrier(timeout=TIMEOUT, wait_all_ranks=True)
        distributed.monitored_barrier(group, timeout=TIMEOUT, wait_all_ranks=True)
    first = distributed.new_group([0])
    distributed.monitored_barrier(first)
    if rank.rank == 0:
        distributed.destroy_process_group(first)


def law_collectives_are_counted(rank: Rank) -> None:
    """One each, whoever does it, however it is called; the same number on every rank."""
    group: Any = distributed.new_group()
    counts = [group._get_sequence_number_for_group()]
    calls: list[Callable[[], Any]] = [
        lambda: distributed.all_reduce(torch.ones(3), group=group),
        lambda: group.allreduce(torch.ones(3)).wait(),
        lambda: distributed.broadcast(torch.ones(300_000), 0, group),
        lambda: distributed.all_reduce(torch.ones(3, dtype=torch.int32), ReduceOp.BOR, group),
        lambda: distributed.barrier(group),
    ]
    for call in calls:
        call()
        counts.append(group._get_sequence_number_for_group())
    assert [after - before for before, after in pairwise(counts)] == [1] * 5
    gathered: list[Any] = [None] * rank.num_ranks
    distributed.all_gather_object(gathered, counts)
    assert gathered == [counts] * rank.num_ranks
    distributed.destroy_process_group(group)


def law_sharded_tensors_are_gathered(rank: Rank) -> None:
    """Where there is no CUDA the group is for the CPU alone, and torch makes its tensors there."""
    if torch.cuda.is_available():
        return
    shard = Shard.from_tensor_and_offsets(row(rank)[None], [rank.rank, 0], rank.rank)
    tensor = init_from_local_shards([shard], rank.num_ranks, 3)
    whole = torch.zeros(rank.num_ranks, 3) if rank.rank == 0 else None
    tensor.gather(0, whole)
    assert whole is None or whole[:, 0].tolist() == [10.0 * number for number in range(rank.num_ranks)]
