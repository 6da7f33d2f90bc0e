"""What holds for tensors whose memory all ranks map: run on every rank, in the jobs of process_group_laws."""

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import popdist
from popdist.exchange.host_memory import host_group, shared_storages
from popdist.exchange.host_memory.addition import Reduction
from popdist.exchange.host_memory.in_place import InPlace
from popdist.ground import torch_private
from popdist.ground.contract import SHARE_TENSORS
from tests.torch_names import HAS_FSDP_MEMORY, HAS_SWAPPED_MEMORY, all_gather_single, reduce_scatter_single, where

SUM: Final = dist.ReduceOp.SUM

LARGE: Final = 70_000
"""Numbers of float32: a tensor that is offered and fits a slot."""

LARGER: Final = 300_000
"""One that goes in pieces."""


@contextmanager
def group(setting: str | None) -> Iterator[ProcessGroup]:
    """A group of all ranks, made with this ``POPDIST_SHARE_TENSORS``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(SHARE_TENSORS, raising=False)
        if setting is not None:
            patch.setenv(SHARE_TENSORS, setting)
        made = dist.new_group(backend="popdist")
    yield made
    dist.destroy_process_group(made)


@contextmanager
def counted() -> Iterator[list[int]]:
    """The numbers of elements that were added in place in the block."""
    lengths: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        finish = Reduction.finish

        def count(reduction: Reduction, reason: int) -> None:
            lengths.append(len(reduction._rows[0]))
            finish(reduction, reason)

        patch.setattr(Reduction, "finish", count)
        yield lengths


def is_added_in_place(tensor: Tensor, made: ProcessGroup, op: dist.ReduceOp.RedOpType = SUM) -> bool:
    """All-reduce over the group; whether that was done in place."""
    with counted() as lengths:
        dist.all_reduce(tensor, op, group=made)
    return bool(lengths)


def brought(rank: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers whose sum depends on the order of addition."""
    draw = torch.Generator().manual_seed(rank)
    if not dtype.is_floating_point:
        return torch.randint(0, 100, (length,), generator=draw).to(dtype)
    return (torch.randn(length, generator=draw) * 10.0 ** (rank % 3)).to(dtype)


def is_one() -> bool:
    """Whether there is nobody to share with."""
    return dist.get_world_size() == 1


def law_a_shared_tensor_is_added_in_place_to_the_same_bits() -> None:
    """Of every kind of dtype and operation, also a part of it; what is small goes the other way."""
    rank = dist.get_rank()
    ops = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG)
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
    with group(None) as made:
        for dtype, op in product(dtypes, ops):
            if op == dist.ReduceOp.AVG and not dtype.is_floating_point:
                continue
            shared, plain = popdist.shared_empty(2, LARGER, dtype=dtype), brought(rank, LARGER, dtype)
            assert shared.dtype == dtype
            assert shared.sum() == 0
            shared[1] = plain
            assert is_added_in_place(shared[1], made, op) is not is_one()
            assert not is_added_in_place(plain, made, op)
            assert torch.equal(shared[1], plain), (dtype, op)
            assert shared[0].sum() == 0
        small = popdist.shared_empty(3)
        assert not is_added_in_place(small, made)


def law_who_has_no_such_tensor_has_all_go_the_other_way() -> None:
    """In the same call and whoever it is, in one piece and in several; the next one is in place again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with group(None) as made:
        for length in (LARGE, LARGER):
            total = brought(0, length) * 0
            dist.all_reduce(total.copy_(brought(rank, length)))
            shared = popdist.shared_empty([length])
            for without in (None, None, *range(size), None):
                tensor = torch.empty(length) if rank == without else shared
                is_in_place = is_added_in_place(tensor.copy_(brought(rank, length)), made)
                assert is_in_place is (without is None and not is_one())
                assert torch.equal(tensor, total)


def law_after_many_plain_tensors_a_shared_one_is_soon_added_in_place() -> None:
    """Then most calls of that length do not ask who has a place; one in sixteen still does."""
    size = dist.get_world_size()
    with group(None) as made:
        plain, shared = torch.empty(LARGE), popdist.shared_empty([LARGE])
        for _ in range(40):
            assert not is_added_in_place(plain.fill_(1), made)
            assert (plain == size).all()
        are_in_place = [is_added_in_place(shared.fill_(1), made) for _ in range(32)]
        assert (shared == size).all()
        assert any(are_in_place[:16]) is all(are_in_place[16:]) is not is_one()


def law_tensors_may_come_in_another_order() -> None:
    """Each rank brings the one that it likes, and each is added where it lies."""
    rank = dist.get_rank()
    with group(None) as made:
        first, second = popdist.shared_empty(LARGE), popdist.shared_empty(LARGE)
        for tensors in ((first, second), (second, first) if rank else (first, second)):
            for tensor in tensors:
                tensor.fill_(rank + 1)
                assert is_added_in_place(tensor, made) is not is_one()
                assert (tensor == sum(range(1, dist.get_world_size() + 1))).all()


def law_one_rank_may_move_a_tensor_where_the_others_may_not() -> None:
    """A call whose memory is in use meanwhile and others that may move theirs: the same sum in any size."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with group("1") as made:
        for length, busy in product((LARGE, LARGER, 2 * LARGER), range(size)):
            tensors = [torch.full((length,), rank + 1.0 + time) for time in range(3)]
            for time, tensor in enumerate(tensors):
                work = dist.all_reduce(tensor, group=made, async_op=rank == busy)
                if work is not None:
                    work.wait()
                assert (tensor == size * (size + 1) / 2 + size * time).all()


def law_ddp_joins_ranks_that_have_less_to_do() -> None:
    """Ranks that are done bring zeros of their own where the others' buckets have moved."""
    rank, trained = dist.get_rank(), {}
    for setting in (None, "0"):
        with group(setting) as made:
            torch.manual_seed(0)
            net = nn.Sequential(*(nn.Linear(400, 400) for _ in range(3)))
            model = DistributedDataParallel(net, process_group=made, bucket_cap_mb=1)
            with model.join():
                for _ in range(4 + rank):
                    model(torch.full((2, 400), rank + 1.0)).square().mean().backward()
            gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
            trained[setting] = nn.utils.parameters_to_vector(gradients)
    assert torch.equal(trained[None], trained["0"])


def law_no_room_or_no_way_is_no_error() -> None:
    """A rank that cannot map, or cannot reserve, has all go the other way from then on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for trouble in ("no way", "no room"):
        with group("1") as made, pytest.MonkeyPatch.context() as patch:
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            dist.all_reduce(torch.ones(LARGE), group=made)
            tensor = torch.empty(LARGE) if trouble == "no room" else popdist.shared_empty(LARGE)
            if rank == 0 and trouble == "no way":
                patch.setattr(host_group, "open_through_proc", refuse)
            elif rank == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
            try:
                for _ in range(3):
                    assert not is_added_in_place(tensor.fill_(1), made)
                    assert (tensor == size).all()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def refuse(*_arguments: object) -> int:
    """As where ``/proc`` is another container's."""
    raise FileNotFoundError


@where(HAS_SWAPPED_MEMORY)
def law_buckets_of_ddp_move_and_weights_keep_their_bits() -> None:
    """Whatever DDP is told, and however gradients are cleared; and none moves where that is forbidden."""
    for view, unused, is_dropped in ((False, False, True), (True, True, False)):
        trained = {}
        for setting in (None, "0"):
            with group(setting) as made, counted() as lengths:
                options = {"gradient_as_bucket_view": view, "find_unused_parameters": unused}
                trained[setting] = train_ddp(made, is_dropped=is_dropped, **options)
            assert bool(lengths) is (setting is None and not is_one())
        assert torch.equal(trained[None], trained["0"])


@where(HAS_SWAPPED_MEMORY)
def law_buckets_of_ddp_are_copied_where_torch_is_not_understood() -> None:
    """As in a torch that starts its engine in another way: nothing moves, and the weights have the same bits."""
    trained = []
    for is_understood in (True, False):
        with group(None) as made, counted() as lengths, pytest.MonkeyPatch.context() as patch:
            if not is_understood:
                patch.setattr(torch_private, "_engine_starter", lambda: None)
            trained.append(train_ddp(made, is_dropped=True))
        assert bool(lengths) is (is_understood and not is_one())
    assert torch.equal(*trained)


def train_ddp(made: ProcessGroup, *, is_dropped: bool, **options: Any) -> Tensor:
    """The weights after a few steps."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))
    model = DistributedDataParallel(net, process_group=made, bucket_cap_mb=0.5, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        optimizer.zero_grad(set_to_none=is_dropped)
        model(torch.randn(2, 300, generator=draw)).square().mean().backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach()


@where(HAS_SWAPPED_MEMORY)
def law_a_program_that_asks_has_its_own_tensors_moved() -> None:
    """When they come again; not numpy's, parts of one, or those of asynchronous calls."""
    tensor, beside = torch.ones(LARGE), torch.ones(LARGE)
    address = beside.data_ptr()
    seen_by_numpy = torch.ones(LARGE)
    seen_by_numpy.numpy()
    part = torch.ones(2, LARGE)[1]
    kept = (seen_by_numpy, part, torch.from_numpy(np.ones(LARGE)))
    with group("1") as made, group(None) as other:
        view = tensor[5:9]
        for time in range(3):
            work = dist.all_reduce(beside, group=made, async_op=True)
            assert work is not None
            work.wait()
            assert beside.data_ptr() == address
            assert is_added_in_place(tensor.fill_(1), made) is (time > 0 and not is_one())
            assert (view == dist.get_world_size()).all()
            for it in kept:
                assert not is_added_in_place(it, made)
                assert not is_added_in_place(torch.ones(LARGE), other)
        assert is_added_in_place(tensor, other) is not is_one()  # where it lies is no secret of one group


def law_what_the_group_makes_is_scattered_and_gathered_where_it_lies() -> None:
    """As `fully_shard` does with tensors of the group's own; and as well where one rank brings another tensor."""
    rank, size = dist.get_rank(), dist.get_world_size()
    every = [brought(other, size * LARGE) for other in range(size)]
    with group("0") as plain, group(None) as made:
        made_by: Any = made._get_backend(torch.device("cpu"))
        assert made_by.supports_tensor_alloc(torch.device("cpu"))
        apart: Any = plain._get_backend(torch.device("cpu"))
        assert not apart.supports_tensor_alloc(torch.device("cpu"))
        wanted, total, addresses = torch.empty(LARGE), torch.empty(LARGE), set[int]()
        for op, without in product((SUM, dist.ReduceOp.AVG), (None, 0)):
            reduce_scatter_single(wanted, every[rank].clone(), op, group=plain)
            given = made_by.allocate_tensor(size * LARGE, dtype=torch.float32, device=torch.device("cpu"))
            addresses.add(given.data_ptr())
            with in_places() as count:
                reduce_scatter_single(
                    total, every[rank].clone() if rank == without else given.copy_(every[rank]), op, group=made
                )
            assert bool(count) is (without is None and not is_one())
            assert torch.equal(total, wanted)
            with in_places() as count:
                own = torch.empty(LARGE) if rank == without else given[rank * LARGE : (rank + 1) * LARGE]
                all_gather_single(given, own.fill_(rank), group=made)
            assert bool(count) is (without is None and not is_one())
            assert torch.equal(given, torch.arange(size).repeat_interleave(LARGE).float())
        del given, own
        again = made_by.allocate_tensor(size * LARGE, dtype=torch.float32, device=torch.device("cpu"))
        assert again.data_ptr() in addresses


@where(HAS_FSDP_MEMORY)
def law_fully_sharded_weights_keep_their_bits_in_the_groups_memory() -> None:
    """And after the first steps the group makes no more of it."""
    trained = []
    for is_pooled in (False, True):
        with group(None) as made, in_places() as count:
            trained.append(trained_in_shards(made, is_pooled=is_pooled))
            assert bool(count) is (is_pooled and not is_one())
    assert torch.equal(*trained)


def trained_in_shards(made: ProcessGroup, *, is_pooled: bool) -> Tensor:
    """This rank's weights after some steps of `fully_shard`, with its buffers in the group's memory or not."""
    torch.manual_seed(0)
    model, mesh = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3))), DeviceMesh.from_group(made, "cpu")
    for module in [*model, model]:
        fully_shard(module, mesh=mesh).set_allocate_memory_from_process_group_for_comm(is_pooled)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw, files = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(12):
        model(torch.randn(2, 300, generator=draw)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        files.append(mapped())
    assert files[1] == files[-1]
    weights: list[Any] = list(model.parameters())
    return nn.utils.parameters_to_vector([it.to_local() for it in weights]).detach()


@contextmanager
def in_places() -> Iterator[list[object]]:
    """The places in which something was done in the block."""
    found: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        rows = InPlace.rows

        def count(in_place: InPlace, *arguments: Any) -> list[Tensor]:
            found.append(arguments)
            return rows(in_place, *arguments)

        patch.setattr(InPlace, "rows", count)
        yield found


def law_a_forked_child_writes_elsewhere() -> None:
    """It sees the numbers, and changes its own."""
    gc.collect()  # a child that collects a gloo group waits for threads that it has not, and crashes
    with group(None) as made:
        made_by: Any = made._get_backend(torch.device("cpu"))
        of_group = made_by.allocate_tensor(LARGE, dtype=torch.float32, device=torch.device("cpu"))
        tensors = [popdist.shared_empty(LARGE).fill_(1), of_group.fill_(1)]
        child = os.fork()
        if child == 0:
            is_right = all((tensor == 1).all() for tensor in tensors)
            is_right &= all((tensor.fill_(2) == 2).all() for tensor in tensors)
            tensors.clear()
            gc.collect()
            os._exit(0 if is_right else 1)
        assert os.waitpid(child, 0)[1] == 0
        for tensor in tensors:
            assert (tensor == 1).all()
            assert is_added_in_place(tensor, made) is not is_one()


def law_what_is_gone_is_let_go() -> None:
    """Freed, or moved elsewhere by torch: nobody maps it any more, and nothing is left open."""
    with group("1") as made:
        dist.all_reduce(torch.ones(LARGE), group=made)
        gc.collect()
        shared_storages.release_gone()
        before = mapped()
        for _ in range(3):
            tensor = torch.ones(LARGE)
            for _ in range(3):
                dist.all_reduce(tensor, group=made)
            del tensor
        elsewhere = popdist.shared_empty(LARGE)
        assert is_added_in_place(elsewhere, made) is not is_one()
        elsewhere.untyped_storage()._share_filename_cpu_()
        assert not is_added_in_place(elsewhere.fill_(1), made)
        assert (elsewhere == dist.get_world_size()).all()
        dist.all_reduce(torch.ones(LARGE), group=made)
        dist.barrier(made)
        dist.all_reduce(torch.ones(LARGE), group=made)
        assert shared_storages.find(elsewhere.untyped_storage()) is None
        assert mapped() == before
        assert not any(shared.is_gone for shared in shared_storages._shared.values())


def mapped() -> tuple[int, int]:
    """How many files in memory this process maps and holds open."""
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return Path("/proc/self/maps").read_text().count("/memfd:popdist"), sum("memfd:popdist" in it for it in links)


def law_a_setting_that_is_none_is_refused() -> None:
    """By the program's own call and by a new group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SHARE_TENSORS, "yes")
        with pytest.raises(popdist.ContractError, match="POPDIST_SHARE_TENSORS='yes' must be 0 or 1"):
            popdist.shared_empty(3)
        patch.setenv(SHARE_TENSORS, "0")
        assert not popdist.shared_empty(3).is_shared()
