"""The laws of the collectives, written once over the number of instances; every instance runs all of them.

The values that an instance brings depend on its index, so that each instance can work out what all others bring.
Nothing here imports pytest: the instances start faster.
"""

import operator
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from fractions import Fraction
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import psutil
import torch
from torch import Tensor, nn

import popdist
from popdist.errors import BackendError
from popdist.exchange.host_memory.barriers import wait_until
from popdist.exchange.host_memory.host_group import HostGroup
from popdist.exchange.transport.torch_backend import MemoryOfSubsets
from popdist.job import context
from popdist.job.collectives import DTYPES, FLOATS
from tests.contract.laws import TIMEOUT_SECONDS
from tests.tree_sums import tree_sum

ALARM_SECONDS = 0.05

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda rows: rows.sum(0),
    "mean": lambda rows: rows.mean(0),
    "min": lambda rows: rows.amin(0),
    "max": lambda rows: rows.amax(0),
}


def run_sums() -> None:
    """The laws of sums only: for instances on several hosts, where some laws of a single host do not hold."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    for law in (
        law_inference_mode_changes_no_later_collective,
        law_all_reduce_combines_every_dtype,
        law_sums_have_the_bits_of_the_tree,
    ):
        law()


@contextmanager
def refused(error: type[Exception], pattern: str) -> Iterator[None]:
    """The block raises ``error`` with a message that has ``pattern`` in it."""
    try:
        yield
    except error as raised:
        message = str(raised)
    else:
        raise AssertionError(f"{error.__name__} with {pattern!r} was not raised")
    assert re.search(pattern, message, re.DOTALL), f"{pattern!r} is not in: {message}"


def brought(instance: int, dtype: torch.dtype, shape: tuple[int, ...] = (3, 2)) -> Tensor:
    """What an instance brings: small whole numbers, so that every dtype adds them exactly."""
    numbers = random.Random(instance).choices(range(10), k=torch.Size(shape).numel())  # noqa: S311 - test values
    return torch.tensor(numbers).reshape(shape).to(dtype)


def all_brought(dtype: torch.dtype, shape: tuple[int, ...] = (3, 2)) -> Tensor:
    """What all instances bring, stacked."""
    return torch.stack([brought(instance, dtype, shape) for instance in range(popdist.num_instances())])


def mine(dtype: torch.dtype, shape: tuple[int, ...] = (3, 2)) -> Tensor:
    """What this instance brings."""
    return brought(popdist.instance_index(), dtype, shape)


def law_a_process_that_an_instance_starts_cannot_join() -> None:
    """Spawned workers run the main file again: an error at once, not a wait; alone nothing is joined."""
    program = "import popdist; popdist.init(timeout_seconds=3)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == (popdist.num_instances() > 1), ended.stderr
    pattern = rf"BackendError: init\(\) in process \d+, which process {os.getpid()} has started, and that one has"
    assert popdist.num_instances() == 1 or re.search(pattern, ended.stderr), ended.stderr


def law_all_reduce_combines_every_dtype() -> None:
    """Sum, mean, min and max of what all bring, in place and with the dtype kept."""
    for dtype in DTYPES:
        for op, reference in OPS.items():
            if (op == "mean" and dtype not in FLOATS) or (op == "sum" and dtype == torch.bool):
                continue
            tensor = mine(dtype)
            wide = torch.float64 if dtype in FLOATS else torch.int64
            expected = reference(all_brought(dtype).to(wide)).to(dtype)

            assert popdist.all_reduce(tensor, op) is tensor  # type: ignore[arg-type] # the names are in the table
            assert tensor.dtype == dtype
            assert tensor.tolist() == expected.tolist(), (dtype, op)


def law_all_gather_stacks_every_dtype_and_shape() -> None:
    """One row for each instance, whatever the dtype, the number of dimensions and the number of elements."""
    for dtype in DTYPES:
        assert torch.equal(popdist.all_gather(mine(dtype)), all_brought(dtype))
    for shape in ((), (0,), (2, 0, 3), (1,) * 8, (1, 2) * 5):
        gathered = popdist.all_gather(mine(torch.float32, shape))
        assert gathered.shape == (popdist.num_instances(), *shape)
        assert torch.equal(gathered, all_brought(torch.float32, shape))


def law_broadcast_gives_the_roots_values() -> None:
    """Everyone has the root's values, in place, for every root and dtype."""
    for root in range(popdist.num_instances()):
        for dtype in DTYPES:
            tensor = mine(dtype)
            assert popdist.broadcast(tensor, root) is tensor
            assert torch.equal(tensor, brought(root, dtype))


def law_inference_mode_changes_no_later_collective() -> None:
    """The first collective of a kind within inference mode, as in an evaluation, then the same kind outside."""
    numbers = range(1, 1 + popdist.num_instances())
    for is_inference in (True, False, True):
        with torch.inference_mode(mode=is_inference):
            for num_elements in (3, 70_000, 3_000_000):
                for dtype in (torch.float32, torch.bfloat16, torch.int64):
                    own = torch.full((num_elements,), numbers[popdist.instance_index()], dtype=dtype)
                    assert popdist.all_gather(own)[:, -1].tolist() == list(numbers)
                    assert popdist.all_reduce(own)[-1] == sum(numbers)
                    assert popdist.broadcast(own)[0] == sum(numbers)
            assert popdist.broadcast_object({"a": 1}) == {"a": 1}


def law_scalars_and_empty_tensors_take_part() -> None:
    """A tensor without dimensions and one without elements go the same way."""
    count = torch.tensor(1)
    assert popdist.all_reduce(count).item() == popdist.num_instances()
    assert popdist.all_reduce(torch.empty(0, 3)).shape == (0, 3)
    assert popdist.broadcast(torch.empty(0)).shape == (0,)


def law_strides_play_no_part() -> None:
    """Views with holes, transposed or lazily negated, are combined, and nothing beside them changes."""
    whole = torch.full((4, 6), 7.0)
    popdist.all_reduce(whole[:, ::2])
    assert torch.equal(whole[:, 1::2], torch.full((4, 3), 7.0))
    assert torch.equal(whole[:, ::2], torch.full((4, 3), 7.0 * popdist.num_instances()))

    turned = mine(torch.int64).T
    assert torch.equal(popdist.all_reduce(turned), all_brought(torch.int64).sum(0).T)

    negated = torch.complex(torch.ones(2), torch.ones(2)).conj().imag
    assert torch.equal(popdist.all_gather(negated), -torch.ones(popdist.num_instances(), 2))
    assert torch.equal(popdist.broadcast(negated), -torch.ones(2))
    assert torch.equal(popdist.all_reduce(negated), torch.full((2,), -1.0 * popdist.num_instances()))


def law_a_leaf_that_requires_grad_stays_one() -> None:
    """A parameter can be combined in place; a result of autograd is refused."""
    parameter = torch.nn.Parameter(torch.ones(2))
    popdist.all_reduce(parameter)
    assert parameter.tolist() == [popdist.num_instances()] * 2
    assert parameter.requires_grad
    assert parameter.is_leaf
    with refused(popdist.CollectiveError, "detach"):
        popdist.all_reduce(parameter * 2)


def law_sums_have_the_bits_of_the_tree() -> None:
    """Floats are added in the order of the tree, in float32 (float64 for float64), so all have the same bits."""
    for dtype in FLOATS:
        rows = [
            torch.randn(500, generator=torch.Generator().manual_seed(i)).to(dtype)
            for i in range(popdist.num_instances())
        ]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        expected = tree_sum([row.to(wide) for row in rows], operator.add)
        for op, divisor in (("sum", 1), ("mean", len(rows))):
            tensor = popdist.all_reduce(rows[popdist.instance_index()].clone(), op)  # type: ignore[arg-type] # as above
            assert torch.equal(tensor, (expected / divisor).to(dtype))
    assert popdist.all_reduce(torch.tensor(-0.0)).signbit()


def law_nan_wins() -> None:
    """A NaN of one instance is seen by all, in every operation."""
    for op in OPS:
        last = popdist.instance_index() == popdist.num_instances() - 1
        tensor = torch.tensor([float("nan") if last else 1.0])
        assert popdist.all_reduce(tensor, op).isnan().all()  # type: ignore[arg-type] # as above


def law_large_tensors_are_reduced_in_pieces() -> None:
    """A tensor of more than one piece is combined whole."""
    tensor = torch.arange(5_000_000, dtype=torch.float64) + popdist.instance_index()
    expected = torch.arange(5_000_000, dtype=torch.float64) + (popdist.num_instances() - 1) / 2
    assert torch.equal(popdist.all_reduce(tensor, "mean"), expected)


def law_what_no_collective_takes_is_refused() -> None:
    """Each refusal names the call and says what to do; the job goes on."""
    refusals: list[tuple[Callable[[], object], str]] = [
        (lambda: popdist.all_reduce(torch.zeros(1, dtype=torch.complex64)), r"complex64.*dtypes are"),
        (lambda: popdist.all_gather(torch.zeros(2).to_sparse()), "to_dense"),
        (lambda: popdist.all_reduce(3.0), "float.*expected a torch.Tensor"),  # type: ignore[type-var] # bad on purpose
        (lambda: popdist.all_reduce(torch.ones(1), "prod"), r"'prod'.*'sum', 'mean', 'min', 'max'"),  # type: ignore[arg-type] # bad on purpose
        (lambda: popdist.all_reduce(torch.ones(1, dtype=torch.int32), "mean"), "mean of torch.int32.*convert"),
        (lambda: popdist.all_reduce(torch.ones(1, dtype=torch.bool)), "bools.*'max'"),
        (lambda: popdist.broadcast(torch.ones(1), root=popdist.num_instances()), "root=.* not one of instance"),
        (lambda: popdist.broadcast(torch.ones(1), root=-1), "root=-1 is not one of instance"),
        (lambda: popdist.all_reduce(torch.ones(1, device="meta")), "on the meta device has no numbers"),
    ]
    for call, pattern in refusals:
        with refused(popdist.CollectiveError, pattern):
            call()


def law_differences_are_errors_on_every_instance() -> None:
    """Another shape, dtype, operation, root or call on the last instance: all raise, all say who brought what."""
    if popdist.num_instances() == 1:
        return
    last = popdist.num_instances() - 1
    is_last = popdist.instance_index() == last
    long = (1,) * 100
    differences: list[tuple[Callable[[], object], Callable[[], object], str, str]] = [
        (lambda: popdist.all_reduce(torch.ones(2)), lambda: popdist.all_reduce(torch.ones(3)), r"\[2\]", r"\[3\]"),
        (
            lambda: popdist.all_gather(torch.ones(1)),
            lambda: popdist.all_gather(torch.ones(1).half()),
            "float32",
            "float16",
        ),
        (
            lambda: popdist.all_reduce(torch.ones(1)),
            lambda: popdist.all_reduce(torch.ones(1), "max"),
            "sum",
            "max",
        ),
        (
            lambda: popdist.broadcast(torch.ones(1), 0),
            lambda: popdist.broadcast(torch.ones(1), 1),
            "root=0",
            "root=1",
        ),
        (popdist.barrier, lambda: popdist.weighted_mean(1, 1), "barrier", "weighted_mean"),
        (
            popdist.barrier,
            lambda: popdist.all_reduce(torch.ones(1, dtype=torch.complex64)),
            "barrier",
            "complex64",
        ),
        (
            lambda: popdist.all_gather(torch.ones(*long, 2, 3)),
            lambda: popdist.all_gather(torch.ones(*long, 3, 2)),
            r"\.\.\. [0-9a-f]{32}",
            r"\.\.\. [0-9a-f]{32}",
        ),
    ]
    others = "instance 0" if last == 1 else rf"instances 0 (to|and) {last - 1}"
    for usual, different, of_others, of_last in differences:
        pattern = (
            "complex64"
            if "complex" in of_last and is_last
            else rf"{others}: .*{of_others}.*instance {last}: .*{of_last}"
        )
        with refused(popdist.CollectiveError, pattern):
            (different if is_last else usual)()
        assert popdist.all_reduce(torch.ones(1)).item() == popdist.num_instances()


def law_exchanges_are_asynchronous_and_ordered() -> None:
    """Numbers arrive from every instance, whether or not it waits; the next collective comes after them."""
    index, instances = popdist.instance_index(), range(popdist.num_instances())
    group = context.current_group()
    first = group.start("first", [index] * (index + 1))
    second = group.start("second", [-index, 2**63 - 1, -(2**63)])
    assert second.wait() == [[-i, 2**63 - 1, -(2**63)] for i in instances]
    assert popdist.all_reduce(torch.ones(1)).item() == len(instances)
    assert first.wait() == first.wait() == [[i] * (i + 1) for i in instances]
    assert group.start("third").wait() == [[] for _ in instances]


def law_an_exchange_that_differs_is_found_later() -> None:
    """An exchange against another call: the other call fails at once, the exchange when it is waited for."""
    if popdist.num_instances() == 1:
        return
    if popdist.is_main():
        handle = context.current_group().start("a promise", [1])
        with refused(popdist.CollectiveError, r"instance 0: a promise.*: barrier\(\)"):
            handle.wait()
    else:
        with refused(popdist.CollectiveError, r"instance 0: a promise.*: barrier\(\)"):
            popdist.barrier()


def law_weighted_mean_is_exact() -> None:
    """The sum of the totals over the sum of the counts, to the last bit, and never a mean of means."""
    index, size = popdist.instance_index(), popdist.num_instances()
    assert popdist.weighted_mean(index * 10, index + 1) == sum(range(size)) * 10 / sum(range(1, size + 1))
    assert popdist.weighted_mean(0.1 if index == 0 else 0, 1 if index == 0 else 0) == 0.1
    assert popdist.weighted_mean(1e300 if index == 0 else 1.0, 1) == (1e300 + (size - 1)) / size
    with refused(popdist.CollectiveError, "add up to 0"):
        popdist.weighted_mean(0, 0)


def law_means_do_not_depend_on_the_split() -> None:
    """Totals of all magnitudes, dealt to the instances in any way, have the exact mean, rounded once."""
    index, size, draw = popdist.instance_index(), popdist.num_instances(), random.Random(3)  # noqa: S311 - no secret
    for largest in (0, 30, 300):
        totals = [draw.uniform(-1, 1) * 10.0 ** draw.randint(-largest, largest) for _ in range(24)]
        counts = [draw.randint(0, 9) for _ in totals]
        wanted = float(sum(map(Fraction, totals)) / sum(counts))
        own, own_counts = totals[index::size], counts[index::size]
        assert popdist.weighted_mean(own, own_counts) == wanted
        assert popdist.weighted_mean(torch.tensor(own, dtype=torch.float64), torch.tensor(own_counts)) == wanted
        mean = popdist.Mean()
        for total, count in zip(reversed(own), reversed(own_counts), strict=True):
            mean.add(torch.tensor(total, dtype=torch.float64, requires_grad=True), count)
        assert mean.compute() == mean.compute() == wanted


def law_a_mean_that_one_instance_refuses_is_refused_on_all() -> None:
    """That instance says what is wrong, the others who, and nobody waits."""
    last = popdist.num_instances() - 1
    for wrong, fault in (("a", "expected numbers"), (1.0, "a finite count of at least 0")):
        is_mine = popdist.instance_index() == last
        with refused(popdist.CollectiveError, fault if is_mine else f"instance {last} brought no numbers"):
            popdist.weighted_mean(wrong if is_mine else 1.0, -2 if is_mine else 1)  # type: ignore[arg-type]  # the mistake
    popdist.barrier()


def law_some_instances_work_alone() -> None:
    """Every set of instances has collectives of its own while the others go on; on a host no data go over gloo."""
    backend: Any = context.current_group().backend
    with ExitStack() as stack:
        if backend.host_group is not None:
            refuse = mock.patch.object(backend._connections, "between_hosts", side_effect=AssertionError)
            stack.enter_context(refuse)
        check_every_set()


def law_some_instances_without_room_send_their_data() -> None:
    """When one of them finds no memory to share, on all of them, and those that have begun are not held up."""
    backend: Any = context.current_group().backend
    with ExitStack() as stack:
        if popdist.num_instances() > 1:
            stack.enter_context(mock.patch.object(backend, "_subsets", MemoryOfSubsets(backend._connections)))
        if popdist.instance_index() == popdist.num_instances() - 1:
            stack.enter_context(mock.patch.object(HostGroup, "reserve", side_effect=BackendError("no room")))
        check_every_set()


def check_every_set() -> None:
    """Each set of instances works together."""
    size, index = popdist.num_instances(), popdist.instance_index()
    for bits in range(1, 2**size):
        listed = {instance for instance in range(size) if bits >> instance & 1}
        result = popdist.execute_on_instances(listed, work_together, min(listed), scale=2)
        expected = [2 * instance for instance in sorted(listed)]
        assert result == ((expected, sum(expected), 2 * min(listed)) if index in listed else None)


def work_together(root: int, *, scale: int) -> tuple[list[int], int, int]:
    """Each collective once, among whoever takes part."""
    own = torch.tensor(popdist.instance_index() * scale)
    popdist.barrier()
    gathered = popdist.all_gather(own).tolist()
    numbers = torch.randn(70_000, generator=torch.Generator().manual_seed(popdist.instance_index()))
    rows = list(popdist.all_gather(numbers))
    assert torch.equal(popdist.all_reduce(numbers), tree_sum(rows, torch.add))
    return gathered, int(popdist.all_reduce(own.clone())), int(popdist.broadcast(own, root))


def law_only_instances_that_are_there_can_be_listed() -> None:
    """Unknown numbers, none at all, and numbers outside an enclosing call are refused; an error passes through."""
    size = popdist.num_instances()
    with refused(popdist.CollectiveError, "a set of instances, such as {0}"):
        popdist.execute_on_instances(0, popdist.barrier)  # type: ignore[arg-type]  # the mistake that is tested
    for listed in ({size}, {-1}, set[int]()):
        with refused(popdist.CollectiveError, "expected one or several of instance"):
            popdist.execute_on_instances(listed, popdist.barrier)
    if popdist.is_main():
        with refused(popdist.CollectiveError, "expected one or several of instance 0$"):
            popdist.execute_on_instances({0}, popdist.execute_on_instances, {0, 1}, popdist.barrier)
        with refused(ZeroDivisionError, "zero"):
            popdist.execute_on_instances({0}, operator.truediv, 1, 0)


class Preparing:
    """Counts the instances whenever all are about to part."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def count(self) -> None:
        """A collective of all."""
        self.counts.append(int(popdist.all_reduce(torch.ones(1))))


def law_all_prepare_before_some_go_on_alone() -> None:
    """On every instance, listed or not, but not once they have parted; and an object is forgotten."""
    preparing = Preparing()
    popdist.before_execute_on_instances(preparing.count)
    popdist.execute_on_instances({0}, popdist.execute_on_instances, {0}, popdist.barrier)
    popdist.execute_on_instances({0}, popdist.barrier)
    assert preparing.counts == [popdist.num_instances()] * (3 if popdist.num_instances() == 1 else 2)
    found = preparing.counts
    num_calls = len(found)
    del preparing
    popdist.execute_on_instances({0}, popdist.barrier)
    assert len(found) == num_calls


def law_nothing_listens_off_loopback() -> None:
    """In a one-host job every listening socket of this process is on loopback."""
    connections = psutil.Process().net_connections(kind="inet")
    listening = [connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN]
    assert set(listening) <= {"127.0.0.1"}
    assert listening or popdist.num_instances() == 1


def law_init_is_once_and_again_after_finalize() -> None:
    """The same init() again does nothing; other arguments are refused; after finalize() it connects anew."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    with refused(popdist.BackendError, r"finalize\(\)"):
        popdist.init("gloo", timeout_seconds=TIMEOUT_SECONDS)
    with refused(popdist.BackendError, r"'off'\) after init\(.*'full'\): call init\(\) once.* or finalize\(\)"):
        popdist.init(timeout_seconds=TIMEOUT_SECONDS, checks="off")
    popdist.barrier()
    popdist.finalize()
    popdist.finalize()
    assert not popdist.is_initialized()
    for call in (
        popdist.barrier,
        lambda: popdist.weighted_mean(1, 1),
        lambda: popdist.execute_on_instances({0}, print),
    ):
        with refused(popdist.NotInitializedError, r"popdist\.init\(\)"):
            call()
    popdist.init("gloo", timeout_seconds=TIMEOUT_SECONDS)
    assert popdist.all_reduce(torch.ones(1)).item() == popdist.num_instances()


def law_headers_can_be_looked_at_without_waiting() -> None:
    """They are None before all have come, then what wait() returns, and nothing where the instances disagree."""
    group, store = context.current_group(), context._state.store
    index, num_instances = popdist.instance_index(), popdist.num_instances()
    if store is not None and index > 0:
        store.wait(["looked"], timedelta(seconds=TIMEOUT_SECONDS))
    asked = group.start("look", [index])
    if store is not None and index == 0:
        assert asked.peek() is None
        store.set("looked", "")
    assert wait_until(lambda: asked.peek() is not None, TIMEOUT_SECONDS)
    assert asked.peek() == asked.wait() == [[it] for it in range(num_instances)]
    if num_instances > 1:
        other = group.start(f"look at {index}")
        assert wait_until(lambda: other.peek() is not None, TIMEOUT_SECONDS)
        assert other.peek() == []
        with refused(popdist.CollectiveError, "not in the same collective"):
            other.wait()


def law_weights_on_other_devices_are_refused() -> None:
    """Tensors of the host and of another device go by different ways, which would wait for each other."""
    if popdist.num_instances() == 1:
        return
    last = popdist.num_instances() - 1
    weights = {"w": torch.ones(2, device="meta" if popdist.instance_index() == last else "cpu")}
    with refused(popdist.WeightsError, f"devices of instance {last} .*on meta.*on cpu.*same type of device"):
        popdist.broadcast_weights(weights)


def law_messages_stay_on_the_host() -> None:
    """Whatever device a program computes on by default; the meta device has no numbers to send."""
    with torch.device("meta"):
        value = torch.ones(3, device="cpu", requires_grad=True)
        value.grad = torch.ones(3, device="cpu")
        assert popdist.clip_grad_norm_([value], 1.0).square().round() == len(value)
        assert popdist.broadcast_object({"epoch": 3}) == {"epoch": 3}
        assert popdist.weighted_mean(2.0, 1) == 2.0
        mean = popdist.Mean()
        mean.add(4.0, 1)
        assert mean.compute() == 4.0


def law_what_a_signal_interrupts_is_done_before_the_next() -> None:
    """Where an instance has waited for others; they get what it brought, whatever it makes of that meanwhile."""
    calls: list[Callable[[Tensor], object]] = [
        lambda _: popdist.barrier(),
        popdist.all_reduce,
        lambda tensor: popdist.broadcast(tensor, popdist.num_instances() - 1),
        popdist.all_gather,
        lambda tensor: popdist.broadcast_object(tensor.tolist(), popdist.num_instances() - 1),
        popdist.gather,
    ]
    last, store = popdist.num_instances() - 1, context._state.store
    if store is None:
        return
    for number, call in enumerate(calls):
        tensor, wanted = torch.full((2,), 3.0), torch.full((2,), 3.0)
        if popdist.instance_index() == last:
            with interrupted(), refused(InterruptedError, "the alarm"):
                call(tensor)
            tensor.zero_()
            store.set(f"interrupted {number}", "")
        else:
            if popdist.is_main():
                store.wait([f"interrupted {number}"], timedelta(seconds=TIMEOUT_SECONDS))
            result = call(wanted)
            if call is popdist.all_reduce:
                assert torch.equal(wanted, torch.full((2,), 3.0 * popdist.num_instances()))
            elif result is not None:
                assert (torch.as_tensor(result) == 3).all()
        start = time.monotonic()
        assert popdist.all_reduce(torch.ones(1)).item() == popdist.num_instances()
        assert (tensor == (0.0 if popdist.instance_index() == last else 3.0)).all()
        assert time.monotonic() - start < TIMEOUT_SECONDS / 2


@contextmanager
def interrupted(within: str = "") -> Iterator[None]:
    """Have a signal handler raise an error in the block, when that waits for headers, in that function."""

    def on_alarm(_: int, frame: FrameType | None) -> None:
        names = set()
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
        if names >= {"_receive", within or "_receive"}:
            raise InterruptedError("the alarm")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, ALARM_SECONDS, ALARM_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def law_an_instance_interrupted_in_its_data_leaves() -> None:
    """It says what was interrupted in each further call; the others hear at once that it has left."""
    if popdist.num_instances() == 1:
        return
    group, last = context.current_group(), popdist.num_instances() - 1

    def interrupt(*_: object) -> None:
        raise InterruptedError("the alarm")

    start = time.monotonic()
    if popdist.instance_index() == last:
        patched = mock.patch.object(type(group.backend), "all_reduce", interrupt)
        with patched, refused(InterruptedError, "the alarm"):
            popdist.all_reduce(torch.ones(1))
        with refused(popdist.CollectiveError, r"barrier\(\): all_reduce\(.*interrupted here by InterruptedError"):
            popdist.barrier()
    else:
        with refused(popdist.BackendError, "ended or was lost|has left|was closed"):
            popdist.all_reduce(torch.ones(1))
    assert time.monotonic() - start < TIMEOUT_SECONDS / 2
    popdist.finalize()
    popdist.init("gloo", timeout_seconds=TIMEOUT_SECONDS)


def law_an_instance_interrupted_among_exchanges_leaves() -> None:
    """Of weights, of batch norm groups, and at the end of a step, before the last that the others wait for."""

    def broadcast(come: Callable[[], object]) -> None:
        come()
        popdist.broadcast_weights(nn.Linear(2, 1))

    def take_step(come: Callable[[], object]) -> None:
        model = popdist.ReplicatedModel(nn.Linear(2, 1))
        for part in model.micro_batches(torch.ones(popdist.num_replicas(), 2)):
            model(part).sum().backward()
            come()

    def normalize(come: Callable[[], object]) -> None:
        num_replicas = popdist.num_replicas()
        model = popdist.ReplicatedModel(nn.BatchNorm1d(2), batch_norm_group_size=num_replicas)
        for part in model.micro_batches(torch.ones(num_replicas, 2)):
            come()
            model(part).sum().backward()

    if popdist.num_local_replicas() == 1:  # several replicas of an instance take turns in run_micro_batches only
        assert_leaves("exchange among batch norm groups", normalize, within="_exchange")
    assert_leaves(r"broadcast_weights\(root=0\)", broadcast, within="_different")
    assert_leaves("the end of a step", take_step, within="_finish_together")


def assert_leaves(text: str, call: Callable[[Callable[[], object]], None], *, within: str) -> None:
    """The last instance is interrupted in ``call``, which lets the others come later: all hear of it at once."""
    last, store = popdist.num_instances() - 1, context._state.store
    backend: Any = context.current_group().backend
    if store is None or backend.host_group is None:  # a wait of gloo's ends before a signal handler is called
        return
    if popdist.instance_index() == last:
        with interrupted(within), refused(InterruptedError, "the alarm"):
            call(lambda: None)
        with refused(popdist.CollectiveError, rf"barrier\(\): {text}.*interrupted here by InterruptedError"):
            popdist.barrier()
        store.set(f"left {text}", "")
    else:
        start = time.monotonic()
        with refused(popdist.BackendError, "ended or was lost|has left|was closed"):
            call(partial(store.wait, [f"left {text}"], timedelta(seconds=TIMEOUT_SECONDS)))
        assert time.monotonic() - start < TIMEOUT_SECONDS / 2
    popdist.finalize()
    popdist.init("gloo", timeout_seconds=TIMEOUT_SECONDS)


def law_an_instance_that_left_is_named() -> None:
    """Who waits for an instance that has left gets an error that names it, and so does every later call."""
    last = popdist.num_instances() - 1
    if popdist.instance_index() == last:
        popdist.finalize()
        return
    for _ in range(2):
        with refused(popdist.BackendError, rf"in barrier\(\): .* instance.* {last}.* was closed"):
            popdist.barrier()
