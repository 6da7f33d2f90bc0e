"""Collectives while somebody looks: modes of torch's dispatcher, and the profiler, see what they see of gloo's.

What runs is still the exchange of the group, with its bits, also where one rank looks and the others do not.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ReduceOp
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from tests.contract.backend_calls import raised
from tests.contract.backend_laws import brought, expected, same
from tests.contract.forked_ranks import Rank
from tests.torch_names import (
    HAS_FAKE_COLLECTIVES,
    HAS_GLOO_LISTS,
    HAS_GLOO_REDUCE_SCATTER,
    HAS_OPERATORS,
    named,
)

Group = Any  # torch's stubs lack the methods of groups and the types of modes


class Seen(TorchDispatchMode):
    """Lists the collectives that the dispatcher is shown."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Group, types: object, args: Group = (), kwargs: Group = None) -> Group:
        """Call it as it is."""
        if func.namespace == "c10d":
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def no_gloo() -> Iterator[None]:
    """Fail if a collective within goes to gloo; between hosts, messages do."""
    with torch.profiler.profile() as profile:
        yield
    names = {event.name for event in profile.events() or () if event.name.startswith("gloo:")}
    assert names <= {"gloo:send", "gloo:recv"}


def calls(rank: Rank, group: Group) -> list[Callable[[], object]]:
    """Each collective of ``torch.distributed``, and each of a group that it has no function for."""
    size = rank.num_ranks
    part, whole = torch.ones(2) + rank.rank, torch.ones(2 * size)
    parts = list(torch.ones(2 * size).chunk(size))
    others = list(torch.ones(2 * size).chunk(size))
    return [
        lambda: distributed.all_reduce(part, ReduceOp.MAX, group),
        lambda: group.allreduce_coalesced([part, whole]).wait(),
        lambda: distributed.broadcast(part, 0, group),
        lambda: distributed.reduce(part, size - 1, group=group),
        lambda: distributed.all_gather(parts, part, group),
        lambda: distributed.all_gather_into_tensor(whole, part, group),
        lambda: group.allgather_coalesced([[tensor] for tensor in parts], [part]).wait(),
        lambda: named(group, "all_gather_single_coalesced")([whole], [part]).wait(),
        *((lambda: distributed.reduce_scatter(part, parts, group=group),) if HAS_GLOO_REDUCE_SCATTER else ()),
        lambda: distributed.reduce_scatter_tensor(part, whole, group=group),
        lambda: named(group, "reduce_scatter_single_coalesced")([part], [whole]).wait(),
        *((lambda: distributed.all_to_all(parts, others, group),) if HAS_GLOO_LISTS else ()),
        lambda: distributed.all_to_all_single(whole, torch.cat(others), group=group),
        lambda: distributed.barrier(group),
    ]


def seen(rank: Rank, group: Group) -> list[str]:
    """What the dispatcher is shown of :func:`calls`, call by call, waited for at once or later."""
    with Seen() as mode:
        for call in calls(rank, group):
            call()
        work = distributed.all_reduce(torch.ones(3), group=group, async_op=True)
        assert work is not None
        work.wait()
    return list(mode.names)


def law_the_dispatcher_sees_what_it_sees_of_gloo(rank: Rank) -> None:
    """Each operator under its name, once, and nothing goes to gloo."""
    group: Group = distributed.group.WORLD
    with no_gloo():
        found = seen(rank, group)
    assert found == seen(rank, rank.gloo)
    assert len(found) == len(calls(rank, group)) + 1


def law_one_rank_may_look_while_others_do_not(rank: Rank) -> None:
    """Each in turn, in every way to look: all meet, and have the bits of the tree."""
    looks: list[Callable[[], AbstractContextManager[object]]] = [Seen, CommDebugMode, torch.profiler.profile]
    for number, look in enumerate(looks):
        with look() if number % rank.num_ranks == rank.rank else nullcontext():
            for size in (3, 20_000):
                tensor = brought(rank.rank, torch.float32, size)
                distributed.all_reduce(tensor)
                rows = [brought(other, torch.float32, size) for other in range(rank.num_ranks)]
                assert same(tensor, expected(rows, ReduceOp.SUM)), (look, size)
            for call in calls(rank, distributed.group.WORLD):
                call()


def law_a_mode_gets_works_of_its_own(rank: Rank) -> None:
    """They are those of the group, with all their methods; a mistake is what it is where nobody looks."""
    group: Group = distributed.group.WORLD
    tensor = torch.ones(300_000)
    with Seen():
        work = group.allreduce([tensor])
        work.wait()
        for root in (-1, rank.num_ranks):
            with pytest.raises(RuntimeError, match=f"invalid root rank: {root}"):
                group.broadcast(torch.ones(3), root)
    assert work.is_completed()
    assert work.result()[0] is tensor
    assert work.get_future().value()[0] is tensor


def law_communication_is_counted(rank: Rank) -> None:
    """By torch's own mode for it, as of gloo."""
    counts = []
    for group in (distributed.group.WORLD, rank.gloo):
        with CommDebugMode() as mode:
            for call in calls(rank, group):
                call()
        counts.append(Counter(mode.get_comm_counts()))
    assert counts[0] == counts[1]
    assert counts[0].total() > 0


def law_the_profiler_sees_collectives(rank: Rank) -> None:
    """The operators of torch."""
    found = []
    for group in (distributed.group.WORLD, rank.gloo):
        with torch.profiler.profile() as profile:
            for call in calls(rank, group):
                call()
        names = Counter(event.name for event in profile.events() or ())
        found.append({name: count for name, count in names.items() if name.startswith("c10d::")})
    assert found[0] == found[1]
    assert found[0]["c10d::allreduce_"] == 1


def traced(tensor: Tensor) -> Tensor:
    """What is traced: a collective between other operations."""
    doubled = tensor * 2
    distributed.all_reduce(doubled)
    return doubled + 1


def law_a_traced_function_has_its_collectives(rank: Rank) -> None:
    """The trace does what the function does, on ranks that have traced and on one that has not."""
    mine = torch.arange(3.0) + rank.rank
    wanted = traced(mine)
    for mode in ("real", "fake", "symbolic") if HAS_FAKE_COLLECTIVES else ("real",):
        function: Callable[[Tensor], Tensor] = traced
        are_all = mode == "real" or rank.num_ranks == 1 or not HAS_OPERATORS
        if are_all or not rank.is_last:  # with fake tensors nothing is sent
            function = make_fx(traced, tracing_mode=mode)(mine)
            assert "c10d.allreduce_" in function.code
            if not HAS_OPERATORS:
                with pytest.raises(RuntimeError, match=r"a c10d operator itself needs torch 2\.11"):
                    function(mine)
                continue
        assert same(function(mine), wanted), mode


def law_fake_tensors_start_no_exchange(rank: Rank) -> None:
    """One rank makes calls that the others do not; also with fake tensors outside of their mode, and meta ones."""
    world: Group = distributed.group.WORLD
    if rank.rank == 0 and HAS_FAKE_COLLECTIVES:
        with FakeTensorMode() as mode:
            found = [[raised(call) for call in calls(rank, group)] for group in (world, rank.gloo)]
            assert found[0] == found[1]
            assert found[0].count(None) >= 9, "torch has nothing for fake tensors in calls of several ones"
            fake = torch.ones(3)
        for tensor in (fake, torch.ones(3, device="meta")):
            distributed.all_reduce(tensor)
            distributed.broadcast(tensor, 0)
        assert fake.fake_mode is mode  # type: ignore[attr-defined] # it is fake
    distributed.barrier()


def law_other_groups_are_as_before(rank: Rank) -> None:
    """Those of gloo give gloo's results through torch's dispatcher, and go to gloo."""
    size = rank.num_ranks
    for call in calls(rank, rank.gloo):
        with torch.profiler.profile() as profile:
            call()
        assert any(event.name.startswith("gloo:") for event in profile.events() or ())
    whole, part = torch.zeros(size * 2), torch.zeros(2)
    gloo: Group = rank.gloo
    named(gloo, "all_gather_single_coalesced")([whole], [torch.full((2,), float(rank.rank))]).wait()
    assert whole[::2].tolist() == list(map(float, range(size)))
    named(gloo, "reduce_scatter_single_coalesced")([part], [whole]).wait()
    assert part.tolist() == [float(rank.rank * size)] * 2


def law_a_parameter_is_a_tensor_like_any_other(rank: Rank) -> None:
    """And so is one of inference mode, and one with a gradient; watched or not."""
    for look in (nullcontext, Seen):
        with look():
            tensors = [torch.nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)]
            with torch.inference_mode():
                tensors += [torch.ones(3), torch.ones(3, dtype=torch.bfloat16)]
                for tensor in tensors:
                    distributed.all_reduce(tensor)
            for tensor in tensors:
                distributed.all_reduce(tensor)
                distributed.broadcast(tensor, 0)
                assert tensor.tolist() == [rank.num_ranks**2] * 3
