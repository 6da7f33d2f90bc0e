"""What holds for sums of small tensors and of rows of shared memory: run on every rank of a real job."""

import threading
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from popdist.errors import CollectiveError
from popdist.ground import extension
from tests.contract.host_memory_laws import connected
from tests.running import DEADLINE_SECONDS
from tests.tree_sums import tree_sum

SMALL_STACK_BYTES = 1 << 18


def without_it_on_odd_ranks(rank: int, run_all: Callable[[], int]) -> int:
    """All laws where only every second rank has the extension."""
    if rank % 2 == 0:
        return run_all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extension, "find", lambda: None)
        return run_all()


def law_nothing_is_added_when_the_ranks_differ() -> None:
    """Each keeps what it brought, hears who brought what, and the next sum is right."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return
    mine = torch.full((4 if rank else 5,), float(rank))
    with pytest.raises(CollectiveError) as caught:
        dist.all_reduce(mine)
    assert "rank 0: all_reduce (sum) of 5 float32" in str(caught.value)
    assert issubclass(CollectiveError, RuntimeError), "as every error of torch's groups"
    assert (mine == rank).all()
    total = torch.full((4,), float(rank))
    dist.all_reduce(total)
    assert (total == size * (size - 1) / 2).all()


def law_overflow_and_infinity_are_as_torch_has_them() -> None:
    """Whole numbers wrap around; infinities of both signs make NaN."""
    rank, size = dist.get_rank(), dist.get_world_size()
    most = torch.full((3,), torch.iinfo(torch.int32).max, dtype=torch.int32)
    wanted = (most.to(torch.int64) * size).to(torch.int32)
    dist.all_reduce(most)
    assert torch.equal(most, wanted)
    infinite = torch.tensor([torch.inf if rank else -torch.inf])
    dist.all_reduce(infinite)
    assert infinite.isnan().all() if size > 1 else infinite.item() == -torch.inf


def law_a_nan_has_the_same_bits_on_every_rank() -> None:
    """Of several NaNs, all take the same one's."""
    for length in (1, 3, 64, 600):
        bits = torch.full((length,), 0x7FC00001 + dist.get_rank(), dtype=torch.int32)
        dist.all_reduce(bits.view(torch.float32))
        first = bits.clone()
        dist.broadcast(first, 0)
        assert torch.equal(bits, first)


def law_a_thread_with_a_small_stack_adds() -> None:
    """What is added lies elsewhere."""
    tensor = torch.ones(5000, dtype=torch.float64)
    before = threading.stack_size(SMALL_STACK_BYTES)
    thread = threading.Thread(target=dist.all_reduce, args=(tensor,))
    thread.start()
    thread.join()
    threading.stack_size(before)
    assert (tensor == dist.get_world_size()).all()


def law_threads_that_add_in_one_group_take_turns() -> None:
    """Also when one waits for a late rank: the sums are of the same call on every rank, and all are there."""
    sums = [[torch.ones(3) for _ in range(20)] for _ in range(2)]
    both = threading.Barrier(2)

    def add_all(tensors: list[Tensor]) -> None:
        both.wait(DEADLINE_SECONDS)
        for tensor in tensors:
            dist.all_reduce(tensor)

    threads = [threading.Thread(target=add_all, args=(tensors,)) for tensors in sums]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((tensor == dist.get_world_size()).all() for tensors in sums for tensor in tensors)


def law_rows_that_are_added_in_one_pass_have_the_bits_of_the_tree() -> None:
    """Two and four of them, over any divisor, with and without the extension."""
    with connected() as made:
        for dtype, num_rows, length in product((torch.float32, torch.float64), (2, 3, 4), (1, 5, 1000)):
            owners = [number % made.size for number in range(num_rows)]
            blocks = [made.allocate(length * dtype.itemsize) for _ in owners]
            rows = [block.rows[owner].view(dtype) for block, owner in zip(blocks, owners, strict=True)]
            reduction = made.reduction(rows)
            is_fused = extension.find() is not None and num_rows in (2, 4)
            assert isinstance(reduction._combine_share, partial) is is_fused
            for over in (1.0, 2.0, 3.0, 0.25, 1e-30, 2.0**-120):
                brought = [some_numbers(length, dtype, seed=number) for number in range(num_rows)]
                wanted = tree_sum([it.clone() for it in brought], Tensor.add) / over
                for row, owner, it in zip(rows, owners, brought, strict=True):
                    if owner == made.rank:
                        row.copy_(it)
                reduction.run(over=over)
                assert all(torch.equal(bits_of(row), bits_of(wanted)) for row in rows), (dtype, num_rows, over)
                made.barrier()


def some_numbers(length: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of many magnitudes, among them zeros of both signs and an infinity."""
    draw = torch.Generator().manual_seed(seed)
    magnitudes = torch.randint(-30, 30, (length,), generator=draw)
    numbers = torch.randn(length, generator=draw, dtype=dtype) * 10.0**magnitudes
    special = torch.tensor([0.0, -0.0, torch.inf], dtype=dtype)[: length // 300]
    return torch.cat([special, numbers[len(special) :]]).to(dtype)


def bits_of(tensor: Tensor) -> Tensor:
    """What tells 0.0 from -0.0."""
    return tensor.view(torch.int64 if tensor.dtype == torch.float64 else torch.int32)
