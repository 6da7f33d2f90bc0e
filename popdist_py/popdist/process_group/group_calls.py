"""The collectives of one group of torch's over plain CPU tensors, in the form in which torch's C++ calls them.

Each takes lists of tensors and an object of options, checks them, and does the collective in its turn. What cannot
be combined in shared memory, such as complex numbers or bits, goes on to gloo.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import PythonCallbackWork

from popdist.host_memory.offers import MayMove
from popdist.process_group import operations
from popdist.process_group.call_arguments import (
    bare,
    check_exchange,
    check_parts,
    check_root,
    check_rows,
    check_single,
    check_splits,
    check_written,
    op_of,
    seconds,
)
from popdist.process_group.work_queue import WorkQueue

Tensors = Sequence[Tensor]
Lists = Sequence[Sequence[Tensor]]
Work = Any  # dist.Work, of which torch's stubs do not say that its groups return it
Options = Any  # of one of torch's many classes


class GroupCalls:
    """The collectives of a group; methods and arguments have the names that torch's backends have for them.

    Attributes:
        num_calls: How many were called so far.
    """

    def __init__(self, host: operations.Collectives, gloo: Any, queue: WorkQueue) -> None:  # noqa: ANN401 - torch's stubs lack its methods
        self.num_calls = 0
        self._host = host
        self._gloo = gloo
        self._queue = queue

    def _do(self, do: Callable[..., None], opts: Options, results: object, *arguments: object) -> Work:
        self.num_calls += 1
        return self._queue.run(do, (self._host, *arguments), results, is_async=opts.asyncOp)

    def allreduce(self, tensors: Tensors, opts: Options, may_move: MayMove | None = None) -> Work:
        """Combine one tensor over the ranks, in place."""
        check_single("allreduce", tensors)
        return self.allreduce_coalesced(tensors, opts, may_move)

    def allreduce_coalesced(self, tensors: Tensors, opts: Options, may_move: MayMove | None = None) -> Work:
        """Combine each of several tensors; ``may_move`` tells which may be moved to where all ranks map them."""
        if op := op_of(opts.reduceOp, tensors):
            check_written("allreduce", tensors)
            return self._do(operations.all_reduce, opts, list(tensors), bare(tensors), op, may_move)
        call = self._gloo.allreduce if len(tensors) == 1 else self._gloo.allreduce_coalesced
        return call(list(tensors), opts)

    def broadcast(self, tensors: Tensors, opts: Options) -> Work:
        """Overwrite one tensor with the root's."""
        check_single("broadcast", tensors)
        check_root("broadcast", opts.rootRank, self._host.size)
        check_written("broadcast", tensors)
        return self._do(operations.broadcast, opts, list(tensors), bare(tensors), opts.rootRank)

    def reduce(self, tensors: Tensors, opts: Options) -> Work:
        """Combine one tensor over the ranks into the root's."""
        check_single("reduce", tensors)
        check_root("reduce", opts.rootRank, self._host.size)
        if op := op_of(opts.reduceOp, tensors):
            check_written("reduce", tensors)
            return self._do(operations.reduce, opts, list(tensors), bare(tensors), op, opts.rootRank)
        return self._gloo.reduce(list(tensors), opts)

    def allgather(self, outputs: Lists, inputs: Tensors, opts: Options) -> Work:
        """Take every rank's tensor: ``outputs[0][rank]`` becomes that of ``rank``."""
        check_single("allgather", outputs, inputs)
        check_rows("allgather", outputs, inputs, self._host.size)
        check_written("allgather", outputs[0])
        rows = [bare(row) for row in outputs]
        return self._do(operations.all_gather, opts, list(outputs[0]), rows, bare(inputs))

    def allgather_coalesced(self, outputs: Lists, inputs: Tensors, opts: Options) -> Work:
        """Take every rank's tensors: ``outputs[rank][i]`` becomes the ``inputs[i]`` of ``rank``."""
        if len(outputs) != self._host.size or {len(listed) for listed in outputs} != {len(inputs)}:
            raise RuntimeError(
                "popdist::allgather_coalesced: output lists should be equal to world size, each as long as the "
                f"input: expected {self._host.size} of {len(inputs)}, got {[len(row) for row in outputs]}"
            )
        rows = [bare(row) for row in zip(*outputs, strict=True)]
        check_rows("allgather_coalesced", rows, inputs, self._host.size)
        check_written("allgather_coalesced", [tensor for row in rows for tensor in row])
        results = unwrapped(list(map(list, outputs)))
        return self._do(operations.all_gather, opts, results, rows, bare(inputs))

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Options) -> Work:
        return self._gather_parts([output], [tensor], opts, lambda: operations.parts_like(output, tensor))

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Options) -> Work:
        """Take every rank's tensors, one after the other in the output of each."""

        def results() -> Sequence[Any]:
            return by_rank(map(operations.parts_like, outputs, inputs))

        return self._gather_parts(outputs, inputs, opts, results)

    def _gather_parts(
        self, outputs: Tensors, inputs: Tensors, opts: Options, results: Callable[[], Sequence[Any]]
    ) -> Work:
        check_parts("allgather", outputs, inputs, self._host.size)
        check_written("allgather", outputs)
        return self._do(operations.all_gather_single, opts, results, bare(outputs), bare(inputs))

    def reduce_scatter(self, outputs: Tensors, inputs: Lists, opts: Options) -> Work:
        """Take this rank's part of a combination: ``inputs[0][rank]`` is for ``rank``."""
        check_single("reduce_scatter", outputs, inputs)
        if op := op_of(opts.reduceOp, outputs):
            check_rows("reduce_scatter", inputs, outputs, self._host.size)
            check_written("reduce_scatter", outputs)
            rows = [bare(row) for row in inputs]
            return self._do(operations.reduce_scatter, opts, list(outputs), bare(outputs), rows, op)
        return self._gloo.reduce_scatter(list(outputs), list(map(list, inputs)), opts)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Options) -> Work:
        return self.reduce_scatter_tensor_coalesced([output], [tensor], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Options) -> Work:
        """Take this rank's part of combinations; in each input the parts stand one after the other."""
        if op := op_of(opts.reduceOp, outputs):
            check_parts("reduce_scatter", inputs, outputs, self._host.size)
            check_written("reduce_scatter", outputs)
            return self._do(operations.reduce_scatter_single, opts, list(outputs), bare(outputs), bare(inputs), op)
        works = one_by_one(self._gloo._reduce_scatter_base, outputs, inputs, opts)  # noqa: SLF001 - torch's name for it
        return works[0] if len(works) == 1 else all_of(works)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Options) -> Work:
        """``outputs[rank]`` becomes what stands in the ``inputs`` of ``rank`` for this one."""
        check_exchange(outputs, inputs, self._host.size)
        check_written("alltoall", outputs)
        return self._do(operations.all_to_all, opts, list(outputs), bare(outputs), bare(inputs))

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int], opts: Options
    ) -> Work:
        """Do :meth:`alltoall` between tensors cut along their first dimension; no lengths mean equal ones."""
        check_splits(output, tensor, (received, sent), self._host.size)
        check_written("alltoall", [output])
        return self._do(operations.all_to_all_single, opts, [output], *bare([output, tensor]), received, sent)

    def barrier(self, opts: Options) -> Work:
        """Wait for all ranks."""
        return self._do(operations.barrier, opts, [], seconds(opts.timeout))


def one_by_one(call: Callable[..., Work], outputs: Tensors, inputs: Tensors, opts: Options) -> list[Work]:
    """Make ``call`` of a group of torch's own for each of ``outputs`` and ``inputs``; the works."""
    return [call(output, tensor, opts) for output, tensor in zip(outputs, inputs, strict=True)]


def all_of(works: Sequence[Work]) -> Work:
    """A work that is done when all of some works of torch's own are."""
    return PythonCallbackWork(lambda timeout: all(work.wait(timeout) for work in works))


def by_rank(parts: Iterable[Sequence[Tensor]]) -> Sequence[Any]:
    """The results of an all_gather of several tensors: of each rank, its part of every tensor."""
    return unwrapped([list(row) for row in zip(*parts, strict=True)])


def unwrapped(lists: list[list[Tensor]]) -> Sequence[Any]:
    """Lists as gloo's futures hold them: of a single one, its tensors."""
    return lists[0] if len(lists) == 1 else lists
