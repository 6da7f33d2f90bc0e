"""The laws of a torch backend, written once over the number of ranks; every rank runs all of them.

Each rank can work out what all others bring. Whole numbers are compared with what gloo makes of them, all sizes in
one call of it; sums and products of floats with a tree over the ranks, bit by bit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.contract.forked_ranks import Rank
from tests.torch_names import all_gather_single, named, reduce_scatter_single

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
SIZES = (0, 1, 3, 15, 17, 255, 257, 4095, 4097, 65537)
PERIOD, TIMES = 99_991, 31
"""So many numbers, so often in a row, are more than any segment holds, and no piece begins like another one."""

Op = ReduceOp.RedOpType
OPS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)

COMBINE: dict[Op, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}


def brought(rank: int, dtype: torch.dtype, size: int) -> Tensor:
    """What ``rank`` brings: floats of every magnitude, whose sum depends on the order, or small whole numbers."""
    generator = torch.Generator().manual_seed(1000 * rank + size % 997)
    if dtype in FLOATS:
        return (torch.randn(size, generator=generator) * torch.rand(size, generator=generator).exp2()).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (size,), generator=generator).to(dtype)


def tree(rows: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Neighbours combined in pairs until one is left; an odd one out goes up as it is."""
    while len(rows) > 1:
        rows = [combine(*rows[i : i + 2]) if i + 1 < len(rows) else rows[i] for i in range(0, len(rows), 2)]
    return rows[0]


def expected(rows: Sequence[Tensor], op: Op) -> Tensor:
    """What ``op`` of floats gives, bit by bit: half types are added wide and rounded once."""
    dtype = rows[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    whole = tree([row.to(wide) for row in rows], COMBINE[op])
    return (whole / len(rows) if op == ReduceOp.AVG else whole).to(dtype)


def all_brought(rank: Rank, dtype: torch.dtype, size: int) -> list[Tensor]:
    """What every rank brings."""
    return [brought(other, dtype, size) for other in range(rank.num_ranks)]


def same(found: Tensor, wanted: Tensor) -> bool:
    """Whether both have the same dtype, shape and bits; a NaN is one like any other."""
    return (
        found.dtype == wanted.dtype
        and found.shape == wanted.shape
        and bool(
            torch.equal(found.nan_to_num(), wanted.nan_to_num()) and torch.equal(found.isnan(), wanted.isnan())
        )
    )


def reductions() -> list[tuple[Op, torch.dtype]]:
    """Each operation with each dtype that it is for."""
    return [
        (op, dtype)
        for op in OPS
        for dtype in (*FLOATS, *INTEGERS)
        if (dtype in FLOATS or op != ReduceOp.AVG) and (dtype != torch.bool or op in {ReduceOp.MIN, ReduceOp.MAX})
    ]


def wanted_slices(rank: Rank, op: Op, dtype: torch.dtype) -> list[Tensor]:
    """For each of ``SIZES``, the right result: the tree's for floats, gloo's for whole numbers."""
    rows = [torch.cat([brought(other, dtype, size) for size in SIZES]) for other in range(rank.num_ranks)]
    if dtype in FLOATS:
        whole = expected(rows, op)
    else:
        whole = rows[rank.rank].clone()
        distributed.all_reduce(whole, ReduceOp(op), group=rank.gloo)
    return list(whole.split(list(SIZES)))


def law_all_reduce_is_right_for_every_dtype_and_size(rank: Rank) -> None:
    """In place, on every rank, with the tree's bits; sizes without elements and odd ones included."""
    for op, dtype in reductions():
        for size, wanted in zip(SIZES, wanted_slices(rank, op, dtype), strict=True):
            tensor = brought(rank.rank, dtype, size)
            distributed.all_reduce(tensor, ReduceOp(op))
            assert same(tensor, wanted), (op, dtype, size)


def law_reduce_gives_the_root_the_same_bits(rank: Rank) -> None:
    """For every operation and dtype, at the roots in turn."""
    for number, (op, dtype) in enumerate(reductions()):
        root = number % rank.num_ranks
        for size, wanted in zip(SIZES, wanted_slices(rank, op, dtype), strict=True):
            tensor = brought(rank.rank, dtype, size)
            distributed.reduce(tensor, root, ReduceOp(op))
            assert rank.rank != root or same(tensor, wanted), (op, dtype, size)


def law_reduce_scatter_gives_each_rank_its_part(rank: Rank) -> None:
    """The list's form and the tensor's one, with the bits of all_reduce."""
    num_ranks = rank.num_ranks
    for op, dtype in reductions():
        for size in (0, 1, 3, 1025):
            whole = brought(rank.rank, dtype, size * num_ranks)
            wanted = whole.clone()
            distributed.all_reduce(wanted, ReduceOp(op))
            mine = wanted.chunk(num_ranks)[rank.rank] if size else wanted
            parts = list(whole.split(size)) if size else [whole.clone() for _ in range(num_ranks)]
            from_list, from_tensor = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)
            distributed.reduce_scatter(from_list, parts, ReduceOp(op))
            reduce_scatter_single(from_tensor, whole, ReduceOp(op))
            assert same(from_list, mine), (op, dtype, size)
            assert same(from_tensor, mine), (op, dtype, size)


def law_what_is_gathered_is_what_was_brought(rank: Rank) -> None:
    """all_gather into a list, into one row each, and end to end."""
    for dtype in (*FLOATS, *INTEGERS):
        for size in SIZES:
            rows, mine = all_brought(rank, dtype, size), brought(rank.rank, dtype, size)
            listed = [torch.empty(size, dtype=dtype) for _ in rows]
            distributed.all_gather(listed, mine)
            stacked = torch.empty(rank.num_ranks, size, dtype=dtype)
            all_gather_single(stacked, mine)
            flat = torch.empty(rank.num_ranks * size, dtype=dtype)
            distributed.all_gather_into_tensor(flat, mine)
            assert all(map(same, listed, rows)), (dtype, size)
            assert same(stacked, torch.stack(rows)), (dtype, size)
            assert same(flat, torch.cat(rows)), (dtype, size)


def law_broadcast_gives_the_roots_values(rank: Rank) -> None:
    """For every root, dtype and size."""
    for root in range(rank.num_ranks):
        for dtype in (*FLOATS, *INTEGERS):
            for size in SIZES:
                tensor = brought(rank.rank, dtype, size)
                distributed.broadcast(tensor, root)
                assert same(tensor, brought(root, dtype, size)), (root, dtype, size)


def law_all_to_all_sends_each_part_to_its_rank(rank: Rank) -> None:
    """Equal parts, parts of their own sizes, and a list of tensors."""
    num_ranks, me = rank.num_ranks, rank.rank
    for dtype in (*FLOATS, *INTEGERS):
        for size in (0, 1, 3, 1025):
            rows = all_brought(rank, dtype, size * num_ranks)
            equal = torch.empty(size * num_ranks, dtype=dtype)
            distributed.all_to_all_single(equal, rows[me])
            wanted = torch.cat([row[size * me : size * (me + 1)] for row in rows])
            assert same(equal, wanted), (dtype, size)

        def part(source: int, target: int, dtype: torch.dtype = dtype) -> Tensor:
            return brought(7 * source + target, dtype, 5 * source + 3 * target)

        sent = [part(me, other) for other in range(num_ranks)]
        received = [part(other, me) for other in range(num_ranks)]
        single = torch.empty(sum(map(len, received)), dtype=dtype)
        sizes = [len(tensor) for tensor in received], [len(tensor) for tensor in sent]
        distributed.all_to_all_single(single, torch.cat(sent), *sizes)
        assert same(single, torch.cat(received)), dtype
        listed = [torch.empty_like(tensor) for tensor in received]
        distributed.all_to_all(listed, sent)
        assert all(map(same, listed, received)), dtype


def law_a_tensor_larger_than_the_segment_is_reduced_whole(rank: Rank) -> None:
    """Grown or in pieces, the bits are those of the tree; then a small one still is."""
    rows = [row.repeat(TIMES) for row in all_brought(rank, torch.float32, PERIOD)]
    length = PERIOD * TIMES
    tensor = rows[rank.rank].clone()
    distributed.all_reduce(tensor)
    assert same(tensor, expected(rows, ReduceOp.SUM))
    gathered = torch.empty(rank.num_ranks * length)
    all_gather_single(gathered, rows[rank.rank])
    assert same(gathered, torch.cat(rows))
    scattered = torch.empty(length)
    reduce_scatter_single(scattered, gathered)
    assert same(scattered, expected([rows[rank.rank]] * rank.num_ranks, ReduceOp.SUM))
    distributed.broadcast(tensor, rank.num_ranks - 1)
    small = torch.ones(3)
    distributed.all_reduce(small)
    assert small.tolist() == [rank.num_ranks] * 3


def law_strides_play_no_part(rank: Rank) -> None:
    """A tensor with holes is reduced, gathered and sent; what lies in the holes stays as it was."""
    whole = torch.full((6, 10), 7.0)
    distributed.all_reduce(whole[:, ::2])
    assert torch.equal(whole[:, 1::2], torch.full((6, 5), 7.0))
    assert torch.equal(whole[:, ::2], torch.full((6, 5), 7.0 * rank.num_ranks))
    parameter = torch.nn.Parameter(torch.tensor(2.0))
    distributed.all_reduce(parameter)
    assert parameter.item() == 2.0 * rank.num_ranks

    turned = torch.arange(12.0).reshape(3, 4).T + rank.rank
    distributed.broadcast(turned, rank.num_ranks - 1)
    assert torch.equal(turned, torch.arange(12.0).reshape(3, 4).T + rank.num_ranks - 1)

    pairs = torch.complex(torch.arange(6.0), torch.ones(6)).reshape(2, 3)
    mine = pairs.clone() if rank.is_last else pairs.T.contiguous().T
    distributed.reduce(mine, rank.num_ranks - 1)
    assert torch.equal(mine, pairs * rank.num_ranks if rank.is_last else pairs)
    bits, rows = torch.ones(4, dtype=torch.int32), [torch.ones(2)] * rank.num_ranks
    calls: tuple[Callable[[], object], ...] = (
        lambda: distributed.reduce(bits[::2], 0, ReduceOp.BOR),
        lambda: distributed.all_reduce(bits[::2], ReduceOp.BXOR),
        lambda: distributed.reduce_scatter(bits[:2], [bits[::2]] * rank.num_ranks, ReduceOp.BXOR),
        lambda: reduce_scatter_single(bits[::2], bits.repeat(rank.num_ranks)[::2], ReduceOp.BXOR),
        lambda: distributed.scatter(torch.empty(4)[::2], rows if rank.is_last else None, rank.num_ranks - 1),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match=r"strides \(2,\).*contiguous\(\)"):
            call()


def law_negative_bits_play_no_part(rank: Rank) -> None:
    """What conj() and imag leave as a sign for later is sent and gathered, also where there is nothing of it."""
    negative = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
    following, before = (rank.rank + 1) % rank.num_ranks, (rank.rank - 1) % rank.num_ranks
    if following != rank.rank:
        sent, received = distributed.isend(negative, following), torch.empty(2)
        distributed.recv(received, before)
        assert sent is not None
        sent.wait()
        assert received.tolist() == [-2, -4]
    for part in (negative, negative[:0], negative[:1]):
        rows = [torch.empty(len(part)) for _ in range(rank.num_ranks)]
        distributed.all_gather(rows, part)
        assert all(torch.equal(row, part.resolve_neg()) for row in rows)

    conjugate = torch.tensor([1 + 2j, rank.rank]).conj()
    group: Any = distributed.group.WORLD
    group.broadcast(conjugate, rank.num_ranks - 1).wait()
    assert conjugate.tolist() == [1 - 2j, rank.num_ranks - 1]
    with pytest.raises(RuntimeError, match=r"later sign.*resolve_conj"):
        distributed.reduce(conjugate, 0, ReduceOp.PRODUCT)


def law_a_coalesced_gather_may_have_an_empty_part(rank: Rank) -> None:
    """Also where it is not done at once, and so has results to hand over."""
    wholes = [torch.empty(0), torch.empty(2 * rank.num_ranks)]
    group: Any = distributed.group.WORLD
    results = (
        named(group, "all_gather_single_coalesced")(wholes, [torch.empty(0), torch.ones(2)]).get_future().wait()
    )
    assert wholes[1].tolist() == [1.0] * (2 * rank.num_ranks)
    assert len(results) == rank.num_ranks if rank.num_ranks > 1 else len(results) == 2


def law_signs_of_zero_are_kept(rank: Rank) -> None:
    """No addition starts from a zero of the backend's own."""
    zero = torch.tensor([-0.0])
    distributed.all_reduce(zero)
    assert zero.signbit().all(), rank


def law_coalesced_calls_are_the_single_ones(rank: Rank) -> None:
    """Several tensors, and dtypes, in one call."""
    tensors = [brought(rank.rank, dtype, size) for dtype in (torch.float32, torch.int64) for size in (3, 257)]
    singly = [tensor.clone() for tensor in tensors]
    with _coalescing_manager():
        for tensor in tensors[:2]:
            distributed.all_reduce(tensor)
    for tensor in (*tensors[2:], *singly):
        distributed.all_reduce(tensor)
    assert all(map(same, tensors, singly))
    whole = [torch.empty(rank.num_ranks, 3), torch.empty(rank.num_ranks, 5)]
    with _coalescing_manager():
        for tensor in whole:
            distributed.all_gather_into_tensor(tensor, torch.full(tensor.shape[1:], float(rank.rank)))
    for tensor in whole:
        assert torch.equal(tensor, torch.arange(rank.num_ranks).float()[:, None].expand_as(tensor))
    parts = [torch.empty(3), torch.empty(5)]
    with _coalescing_manager():
        for part, tensor in zip(parts, whole, strict=True):
            distributed.reduce_scatter_tensor(part, tensor)
    assert all(torch.equal(part, torch.full_like(part, rank.rank * rank.num_ranks)) for part in parts)
