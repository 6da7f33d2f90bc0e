"""What holds for torch's collectives over the backend ``popdist``: run on every rank of a real job.

A law is a function ``law_...``; each computes what it expects from the ranks' numbers alone. Those of the memory
beneath run in the same jobs.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from popdist.ground.progress import progress_page
from tests.contract import host_memory_laws, shared_tensor_laws, sum_laws
from tests.torch_names import HAS_FSDP_ON_CPU, IS_ASYNC_KNOWN, where

TIMEOUT = timedelta(seconds=60)


def run_all() -> int:
    """Every law of this file and the other one, in their order; how many there are."""
    dist.init_process_group("popdist", timeout=TIMEOUT)
    laws = all_laws()
    for law in laws:
        law()
    dist.destroy_process_group()
    return len(laws)


def run_all_mixed() -> int:
    """The same where only every second rank has the extension."""
    return sum_laws.without_it_on_odd_ranks(int(os.environ["RANK"]), run_all)


def all_laws() -> list[Callable[[], None]]:
    """Those of the memory beneath, of small sums, then those of this file."""
    beneath = [item for laws in (host_memory_laws, sum_laws, shared_tensor_laws) for item in vars(laws).items()]
    named = [*beneath, *globals().items()]
    return [law for name, law in named if name.startswith("law_") and law is not None]


def same_everywhere(tensor: Tensor) -> bool:
    """Whether every rank has the same bits."""
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor)
    return all(torch.equal(rows[0], row) for row in rows)


def law_the_page_of_progress_names_the_collective() -> None:
    """With its tensor, and its ranks where they are not all; without poprun it says nothing."""
    ranks = list(range(dist.get_world_size()))
    part = dist.new_group(ranks[:1], backend="popdist")
    is_under_poprun, before = progress_page.is_watched, progress_page.read().num_waits
    progress_page.is_watched = False
    dist.barrier()
    assert progress_page.read().num_waits == before
    progress_page.is_watched = True
    try:
        dist.all_reduce(torch.ones(2, 3))
        assert progress_page.read().collective == "all_reduce(float32[2, 3])"
        dist.barrier()
        said = progress_page.read()
        assert (said.collective, said.member_runs, said.num_waits) == ("barrier()", (), before + 2)
        assert said.waiting_since_seconds is None
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(2), group=part)
            among = " of rank 0" if len(ranks) > 1 else ""
            assert progress_page.read().collective == f"all_reduce(float32[2]){among}"
    finally:
        progress_page.is_watched = is_under_poprun
    dist.barrier()


@contextmanager
def counted_gloo() -> Iterator[dict[str, int]]:
    """How often torch hands something to the gloo group within the block, by operation."""
    counts: dict[str, int] = {}
    with torch.profiler.profile() as profile:
        yield counts
    for event in profile.events() or ():
        if event.name.startswith("gloo:"):
            counts[event.name] = counts.get(event.name, 0) + 1


def law_a_message_to_no_rank_is_refused() -> None:
    """Before it is sent: gloo would wait for ever."""
    size = dist.get_world_size()
    for peer in (size, -2):
        for name, transfer in (("send", dist.send), ("recv", dist.recv)):
            assert f"{name}: invalid rank: {peer} (expected 0 to" in failure(
                partial(transfer, torch.ones(1), peer)
            )


def law_a_forked_child_is_no_rank() -> None:
    """It is refused, and the group goes on when it has ended."""
    if dist.get_world_size() == 1:
        return
    dist.barrier()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if "forked" in failure(lambda: dist.all_reduce(torch.ones(1))) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    dist.barrier()


def law_what_is_rare_goes_through_gloo() -> None:
    """gather, bits, objects."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [torch.empty(2) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.full((2,), float(rank)), rows)
    assert rows is None or [row[0].item() for row in rows] == list(range(size))
    flags = torch.tensor([1 << rank])
    dist.all_reduce(flags, dist.ReduceOp.BOR)
    assert flags.item() == 2**size - 1
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": other} for other in range(size)]


def law_what_is_common_takes_no_gloo() -> None:
    """Every operation in every form that torch has for it, the functional ones included; waited for or not."""
    size = dist.get_world_size()
    whole, part, world = torch.ones(2 * size), torch.ones(2), dist.group.WORLD
    parts = list(whole.clone().chunk(size))
    functional: Any = _functional_collectives
    torchs_own: Any = dist
    calls: list[Callable[..., Any]] = [
        partial(dist.all_reduce, part),
        partial(dist.all_reduce_coalesced, [part, whole]),
        partial(dist.broadcast, part, 0),
        partial(dist.reduce, part, 0),
        partial(dist.reduce_scatter, part, parts),
        partial(dist.reduce_scatter_tensor, part, whole),
        partial(dist.all_gather, parts, part),
        partial(dist.all_gather_into_tensor, whole, part),
        partial(dist.all_gather_coalesced, [parts] * size, parts),
        partial(dist.all_to_all, parts, list(whole.chunk(size))),
        partial(dist.all_to_all_single, whole.clone(), whole),
        dist.barrier,
        partial(dist.barrier, device_ids=[0]),
    ]
    chained: list[Callable[[], Any]] = [
        partial(functional.all_reduce, part, "avg", world),
        partial(functional.broadcast, part, 0, world),
        partial(functional.all_gather_tensor, part, 0, world),
        partial(functional.reduce_scatter_tensor, whole, "sum", 0, world),
        partial(functional.all_to_all_single, whole, None, None, world),
        lambda: functional.all_reduce_coalesced([part, whole], "sum", world)[0],
        lambda: functional.all_gather_into_tensor_coalesced([part, whole], world)[0],
        lambda: functional.reduce_scatter_tensor_coalesced([whole, whole], "sum", [0, 0], world)[0],
    ]
    with counted_gloo() as counts:
        for call in calls:
            call()
            call(async_op=True).wait()
        for call in chained:
            assert call().sum().isfinite()
        torchs_own._broadcast_coalesced(world, [part, whole], 1 << 10, 0)
    assert counts == {}


@where(IS_ASYNC_KNOWN)
def law_a_synchronous_call_starts_no_thread() -> None:
    """It is done where it is made; the first asynchronous one starts the group's thread."""
    group: Any = dist.new_group(backend="popdist")
    has_thread = []
    for is_async in (False, True):
        work = dist.all_reduce(torch.ones(3), group=group, async_op=is_async)
        has_thread.append(group._queue._thread is not None)
    assert work is not None
    work.wait()
    assert has_thread == [False, True]
    dist.destroy_process_group(group)


def law_torch_can_change_the_timeout() -> None:
    """By both of its ways; the last rank does not come."""
    if dist.get_world_size() == 1:
        return
    soon = timedelta(seconds=0.3)
    for is_public in (False, True):
        group: Any = dist.new_group(backend="popdist", timeout=TIMEOUT)
        if is_public:
            group.set_timeout(soon)
        else:
            dist.distributed_c10d._set_pg_timeout(soon, group)
        if dist.get_rank() < dist.get_world_size() - 1:
            assert "did not come within the timeout of 0.3 seconds" in failure(
                partial(dist.all_reduce, torch.ones(3), group=group)
            )
        dist.barrier()
        dist.destroy_process_group(group)


def law_gloo_and_python_do_not_lock_each_other_out() -> None:
    """However often gloo's threads let go of tensors while the next ones are handed to gloo."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(600):
        flags = torch.tensor([1 << rank])
        dist.all_reduce(flags, dist.ReduceOp.BOR)
        assert flags.item() == 2**size - 1


def law_sums_of_sparse_tensors_end() -> None:
    """Whoever calls gloo holds no lock of Python's: gloo's threads want it when they let go of a tensor."""
    size = dist.get_world_size()
    places = torch.arange(2)[None]
    for _ in range(300):
        rows = torch.sparse_coo_tensor(places, torch.ones(2), (3,), check_invariants=True, is_coalesced=True)
        dist.all_reduce(rows)
    assert rows.to_dense().tolist() == [size, size, 0]


def law_a_ddp_step_takes_no_gloo() -> None:
    """Nothing of it is sent, and every rank has the mean of the gradients."""
    torch.manual_seed(dist.get_rank())
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    model(torch.randn(4, 8)).sum().backward()
    with counted_gloo() as counts:
        model(torch.randn(4, 8)).sum().backward()
    assert counts == {}
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert same_everywhere(parameter.grad)


@where(HAS_FSDP_ON_CPU)
def law_a_fully_sharded_step_takes_no_gloo() -> None:
    """Gathering, scattering and clipping of ``fully_shard``, and ``full_tensor`` of what it makes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    with counted_gloo() as counts:
        model(torch.randn(4, 8)).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        weight = next(model.parameters())
        assert isinstance(weight, DTensor)
        assert isinstance(norm, DTensor)
        whole, length = weight.full_tensor(), norm.full_tensor()
    assert counts == {}
    assert whole.shape == (7, 8)
    assert same_everywhere(whole.detach())
    assert same_everywhere(length.detach())


def law_calls_to_gloo_are_counted() -> None:
    """What says that there are none sees those that there are."""
    if dist.get_world_size() > 1:
        with counted_gloo() as counts:
            law_what_is_rare_goes_through_gloo()
        assert counts["gloo:gather"] == 1


def law_threads_end_with_their_group() -> None:
    """A group that is destroyed leaves no thread and no descriptor."""
    before = threading.active_count(), num_descriptors()
    group = dist.new_group(backend="popdist")
    dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()
    dist.destroy_process_group(group)
    del group
    dist.barrier()
    after = threading.active_count(), num_descriptors()
    assert after[0] <= before[0]
    assert after[1] <= before[1]


def num_descriptors() -> int:
    """How many files this process holds open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def failure(call: Callable[[], object]) -> str:
    """What ``call`` raises, in words; empty if it does not."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - torch raises of every kind
        return f"{type(error).__name__}: {error}"
    return ""
