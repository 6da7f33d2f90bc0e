"""The collectives of a torch process group on plain CPU tensors, with the arguments that torch's C++ code passes.

Each collective checks its tensors and options, so that a wrong argument raises an error here (mostly RuntimeError,
like gloo) and not a missing rank. Then the collective runs in its turn, for tensors of any strides, lists and
splits. If shared memory cannot combine the elements, such as complex numbers or bits, gloo runs the collective.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.utils.dlpack import from_dlpack

from popdist.exchange.host_memory.addition import KINDS, Op
from popdist.exchange.host_memory.host_collectives import HostCollectives
from popdist.exchange.host_memory.in_place import MayMove
from popdist.exchange.process_group.watched_calls import call_in_words, do_watched
from popdist.exchange.process_group.work_queue import DoneWork, WorkQueue
from popdist.exchange.transport.hosts import SeveralHosts
from popdist.ground import torch_private_groups
from popdist.ground.progress import progress_page

Collectives = HostCollectives | SeveralHosts
Tensors = Sequence[Tensor]
Lists = Sequence[Sequence[Tensor]]
Work = Any  # dist.Work; torch's stubs do not say that its groups return it
Options = Any  # an object of one of torch's many classes of options


class GroupCalls:
    """The collectives of a process group; methods and arguments have the names that torch's backends use."""

    def __init__(
        self,
        host: Collectives,
        gloo: Any,
        queue: WorkQueue,
        members: Sequence[int] = (),  # the ranks of a part of the job; empty means all ranks
    ) -> None:
        self.num_calls = 0
        self._members = tuple(members)
        self._host = host
        self._gloo = gloo
        self._queue = queue

    def _do(self, do: Callable[..., None], opts: Options, results: object, *arguments: object) -> Work:
        self.num_calls += 1
        if progress_page.is_watched:
            do = partial(do_watched, call_in_words(do, arguments, self._members), self._members, do)
        return self._queue.run(do, (self._host, *arguments), results, is_async=opts.asyncOp)

    def allreduce(self, tensors: Tensors, opts: Options, may_move: MayMove | None = None) -> Work:
        """Combine the single tensor in ``tensors`` over all ranks, in place; return the ``Work`` to wait for."""
        check_single("allreduce", tensors)
        return self.allreduce_coalesced(tensors, opts, may_move)

    def allreduce_coalesced(self, tensors: Tensors, opts: Options, may_move: MayMove | None = None) -> Work:
        """Combine each tensor over all ranks in place; ``may_move`` says if a tensor may move to shared memory."""
        if op := op_of(opts.reduceOp, tensors):
            check_written("allreduce", tensors)
            return self._do(_all_reduce, opts, list(tensors), bare(tensors), op, may_move)
        check_dense("allreduce", tensors)
        call = self._gloo.allreduce if len(tensors) == 1 else self._gloo.allreduce_coalesced
        return call(list(tensors), opts)

    def broadcast(self, tensors: Tensors, opts: Options) -> Work:
        """Overwrite the single tensor in ``tensors`` with the root's tensor; return the ``Work`` to wait for."""
        check_single("broadcast", tensors)
        check_rank("broadcast", opts.rootRank, self._host.size, "root rank")
        check_written("broadcast", tensors)
        return self._do(_broadcast, opts, list(tensors), *bare(tensors), opts.rootRank)

    def reduce(self, tensors: Tensors, opts: Options) -> Work:
        """Combine the single tensor in ``tensors`` over all ranks into the root's tensor; return the ``Work``."""
        check_single("reduce", tensors)
        check_rank("reduce", opts.rootRank, self._host.size, "root rank")
        parts = [torch.view_as_real(it) if it.is_complex() and _is_sum(opts.reduceOp) else it for it in tensors]
        if op := op_of(opts.reduceOp, parts):
            check_written("reduce", tensors)
            return self._do(_reduce, opts, list(tensors), *bare(parts), op, opts.rootRank)
        check_dense("reduce", tensors)
        return self._gloo.reduce(list(tensors), opts)

    def scatter(self, outputs: Tensors, inputs: Lists, opts: Options) -> Work:
        """Send each rank one tensor of the root's list, by gloo; return the ``Work`` to wait for."""
        check_dense("scatter", [*outputs, *(tensor for row in inputs for tensor in row)])
        return self._gloo.scatter(list(outputs), list(map(list, inputs)), opts)

    def allgather(self, outputs: Lists, inputs: Tensors, opts: Options) -> Work:
        """Gather one tensor from every rank: the tensor of each rank is copied into ``outputs[0][rank]``."""
        check_single("allgather", outputs, inputs)
        check_rows("allgather", outputs, inputs, self._host.size)
        check_written("allgather", outputs[0])
        rows = [bare(row) for row in outputs]
        return self._do(_all_gather, opts, list(outputs[0]), rows, bare(inputs))

    def allgather_coalesced(self, outputs: Lists, inputs: Tensors, opts: Options) -> Work:
        """Gather several tensors of every rank: ``inputs[i]`` of each rank is copied to ``outputs[rank][i]``."""
        if len(outputs) != self._host.size or {len(listed) for listed in outputs} != {len(inputs)}:
            raise RuntimeError(
                "popdist::allgather_coalesced: output lists should be equal to world size, each as long as the "
                f"input: expected {self._host.size} of {len(inputs)}, got {[len(row) for row in outputs]}"
            )
        rows = [bare(row) for row in zip(*outputs, strict=True)]
        check_rows("allgather_coalesced", rows, inputs, self._host.size)
        check_written("allgather_coalesced", [tensor for row in rows for tensor in row])
        results = unwrapped(list(map(list, outputs)))
        return self._do(_all_gather, opts, results, rows, bare(inputs))

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Options) -> Work:
        return self._gather_parts([output], [tensor], opts, lambda: _parts_like(output, tensor, self._host.size))

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Options) -> Work:
        """Gather ``inputs[i]`` from all ranks, one after another in rank order, into the tensor ``outputs[i]``."""
        return self._gather_parts(outputs, inputs, opts, lambda: gathered_parts(outputs, inputs, self._host.size))

    def _gather_parts(
        self, outputs: Tensors, inputs: Tensors, opts: Options, results: Callable[[], Sequence[Any]]
    ) -> Work:
        check_parts("allgather", outputs, inputs, self._host.size)
        check_written("allgather", outputs)
        return self._do(_all_gather_single, opts, results, bare(outputs), bare(inputs))

    def reduce_scatter(self, outputs: Tensors, inputs: Lists, opts: Options) -> Work:
        """Reduce and scatter: combine ``inputs[0][rank]`` of all ranks into the output of ``rank``."""
        check_single("reduce_scatter", outputs, inputs)
        if op := op_of(opts.reduceOp, outputs):
            check_rows("reduce_scatter", inputs, outputs, self._host.size)
            check_written("reduce_scatter", outputs)
            rows = [bare(row) for row in inputs]
            return self._do(_reduce_scatter, opts, list(outputs), bare(outputs), rows, op)
        check_dense("reduce_scatter", [*outputs, *inputs[0]])
        return self._gloo.reduce_scatter(list(outputs), list(map(list, inputs)), opts)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Options) -> Work:
        return self.reduce_scatter_tensor_coalesced([output], [tensor], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Options) -> Work:
        """Reduce and scatter several tensors; each input contains a part for every rank, in rank order."""
        if op := op_of(opts.reduceOp, outputs):
            check_parts("reduce_scatter", inputs, outputs, self._host.size)
            check_written("reduce_scatter", outputs)
            return self._do(_reduce_scatter_single, opts, list(outputs), bare(outputs), bare(inputs), op)
        check_dense("reduce_scatter", [*outputs, *inputs])
        return scatter_reduced(self._gloo, outputs, inputs, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Options) -> Work:
        """Send ``inputs[i]`` to rank *i*, for every rank, and receive rank *i*'s tensor into ``outputs[i]``."""
        check_exchange(outputs, inputs, self._host.size)
        check_written("alltoall", outputs)
        return self._do(_all_to_all, opts, list(outputs), bare(outputs), bare(inputs))

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int], opts: Options
    ) -> Work:
        """Send ``sent[i]`` rows of ``tensor`` to each rank *i*, receive ``received[i]``; [] means equal parts."""
        check_splits(output, tensor, (received, sent), self._host.size)
        check_written("alltoall", [output])
        return self._do(_all_to_all_single, opts, [output], *bare([output, tensor]), received, sent)

    def barrier(self, opts: Options) -> Work:
        """Start a barrier of all ranks; return its ``Work``, which is done when all ranks have called this."""
        return self._do(_barrier, opts, [], seconds(opts.timeout))


def _all_reduce(host: Collectives, tensors: Sequence[Tensor], op: Op, may_move: MayMove | None) -> None:
    """Combine each of ``tensors`` over all ranks, in place; tensors that share memory are first copied."""
    combined = [tensor.clone() for tensor in tensors] if _share_memory(tensors) else tensors
    for tensor in combined:
        host.all_reduce(tensor, op, may_move)
    if combined is not tensors:
        for tensor, values in zip(tensors, combined, strict=True):
            tensor.copy_(values)


def _broadcast(host: Collectives, tensor: Tensor, root: int) -> None:
    """Overwrite ``tensor``, of any strides, on every rank with the tensor of rank ``root``."""
    flat = flat_values(tensor)
    host.broadcast(flat, root)
    give_back([tensor], [flat])


def _reduce(host: Collectives, tensor: Tensor, op: Op, root: int) -> None:
    """Combine the tensors of all ranks by ``op`` into the tensor of rank ``root``; any strides are allowed."""
    flat = flat_values(tensor)
    host.reduce(flat, op, root)
    give_back([tensor], [flat])


def _all_gather(host: Collectives, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor]) -> None:
    """Copy ``tensors[i]`` of each rank into ``outputs[i][rank]`` on every rank, for every index *i*."""
    for row, tensor in zip(outputs, tensors, strict=True):
        places = [place_of(tensor) for tensor in row]
        host.all_gather(places, _apart(flat_values(tensor), places, places[host.rank]))
        give_back(row, places)


def _reduce_scatter(
    host: Collectives, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], op: Op
) -> None:
    """Combine this rank's tensors, one of each rank's list ``inputs[i]``, into ``outputs[i]``, for every *i*."""
    for output, row in zip(outputs, inputs, strict=True):
        place = place_of(output)
        host.reduce_scatter(place, [_apart(flat_values(tensor), [place], place) for tensor in row], op)
        give_back([output], [place])


def _all_to_all(host: Collectives, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Send ``inputs[i]`` to rank *i*, for every rank, and receive rank *i*'s tensor into ``outputs[i]``."""
    places = [place_of(output) for output in outputs]
    host.all_to_all(places, [_apart(flat_values(tensor), places) for tensor in inputs])
    give_back(outputs, places)


def _all_gather_single(host: Collectives, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Gather ``tensors[i]`` of all ranks, one after another in rank order, into the tensor ``outputs[i]``."""
    for output, tensor in zip(outputs, tensors, strict=True):
        place = place_of(output)
        parts = _parts(place, host)
        host.all_gather(parts, _apart(flat_values(tensor), [place], parts[host.rank]))
        give_back([output], [place])


def _reduce_scatter_single(host: Collectives, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Op) -> None:
    """Combine into ``outputs[i]`` the parts for this rank of all ranks' ``inputs[i]``, with one part per rank."""
    for output, tensor in zip(outputs, inputs, strict=True):
        place = place_of(output)
        parts = [_apart(part, [place], place) for part in _parts(flat_values(tensor), host)]
        host.reduce_scatter(place, parts, op)
        give_back([output], [place])


def _all_to_all_single(
    host: Collectives, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
) -> None:
    """Send ``sent[i]`` rows of ``tensor`` to each rank *i*, receive ``received[i]`` rows; [] means equal parts."""
    place = place_of(output)
    flat = _apart(flat_values(tensor), [place])
    host.all_to_all(_cut(place, output, received, host), _cut(flat, tensor, sent, host))
    give_back([output], [place])


def _barrier(host: Collectives, timeout_seconds: float | None) -> None:
    """Wait until all ranks are in this call. Raises BackendError after ``timeout_seconds``."""
    host.barrier(timeout_seconds)


def _parts_like(output: Tensor, tensor: Tensor, size: int) -> list[Tensor]:
    """Return the tensor of each rank in the gathered tensor ``output``, in rank order, shaped like ``tensor``."""
    return list(output.reshape(size, *tensor.shape).unbind())


def _parts(flat: Tensor, host: Collectives) -> Sequence[Tensor]:
    return flat.view(host.size, len(flat) // host.size).unbind()


def _cut(flat: Tensor, tensor: Tensor, lengths: Sequence[int], host: Collectives) -> Sequence[Tensor]:
    if not lengths:
        return _parts(flat, host)
    width = tensor[:1].numel()
    return list(flat.split([length * width for length in lengths]))


def flat_values(tensor: Tensor) -> Tensor:
    """Return the elements of ``tensor`` as a contiguous flat tensor, in the memory of ``tensor`` if possible."""
    return _run(tensor.resolve_conj().resolve_neg().contiguous())


def place_of(tensor: Tensor) -> Tensor:
    """Return flat memory for a result like ``tensor``: the memory of ``tensor`` if contiguous, else new memory."""
    return _run(tensor) if _is_run(tensor) else torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")


def _is_run(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _run(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as a flat tensor of stride 1; ``view()`` may give one element another stride."""
    return tensor.as_strided((tensor.numel(),), (1,))


def give_back(tensors: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    """Copy the results in ``places`` to each of ``tensors`` for which :func:`place_of` made other memory."""
    for tensor, place in zip(tensors, places, strict=True):
        if not _is_run(tensor):
            tensor.copy_(place.view(tensor.shape))


def _apart(tensor: Tensor, outputs: Sequence[Tensor], allowed: Tensor | None = None) -> Tensor:
    """Return ``tensor``, or a copy if ``tensor`` shares memory with one of ``outputs``. No copy is needed for
    exactly the memory of ``allowed``, because that memory is read before it is written.
    """
    if allowed is not None and (tensor.data_ptr(), tensor.nbytes) == (allowed.data_ptr(), allowed.nbytes):
        return tensor
    return tensor.clone() if any(_share_memory([tensor, output]) for output in outputs) else tensor


def _share_memory(tensors: Sequence[Tensor]) -> bool:
    if len(tensors) == 1:
        return False
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}
    return len(storages) < sum(tensor.numel() > 0 for tensor in tensors)


def scatter_reduced(backend: Any, outputs: Tensors, inputs: Tensors, opts: Options) -> Work:
    """Reduce and scatter ``inputs`` by torch's ``backend``; return a ``Work``, already done for several inputs."""
    call = torch_private_groups.reduce_scatter_of(backend)
    works = [call(output, tensor, opts) for output, tensor in zip(outputs, inputs, strict=True)]
    if len(works) == 1:
        return works[0]
    for work in works:  # gloo's works have no futures for waiting together
        work.wait()
    return DoneWork(list(outputs))


def gathered_parts(outputs: Tensors, inputs: Tensors, size: int) -> list[Any]:
    """Return a list for each rank with its tensors in the gathered ``outputs``; for one rank, only its list."""
    parts = [_parts_like(output, tensor, size) for output, tensor in zip(outputs, inputs, strict=True)]
    return unwrapped([list(row) for row in zip(*parts, strict=True)])


def unwrapped(lists: list[list[Tensor]]) -> list[Any]:
    """Return ``lists`` in the form of gloo's results: the list itself if there is only one, else all lists."""
    return lists[0] if len(lists) == 1 else lists


_OPS: Final[dict[Any, Op]] = {
    c10d.ReduceOp.SUM: "sum",
    c10d.ReduceOp.AVG: "mean",
    c10d.ReduceOp.MIN: "min",
    c10d.ReduceOp.MAX: "max",
    c10d.ReduceOp.PRODUCT: "product",
}


def bare(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return ``tensors`` without gradient, in the same memory, so that autograd does not record writes."""
    return [tensor.data if not tensor.is_inference() else _writable(tensor) for tensor in tensors]


def _writable(tensor: Tensor) -> Tensor:
    """Return an inference-mode tensor as a tensor that may be written outside of inference mode; same memory."""
    with torch.inference_mode(mode=False):
        return from_dlpack(tensor.resolve_neg())


def op_of(reduce_op: Any, tensors: Sequence[Tensor]) -> Op | None:
    """Return popdist's name of torch's ``reduce_op``; None if popdist cannot combine ``tensors`` in this way."""
    for tensor in tensors:
        if tensor.dtype not in KINDS:
            return None
    op = _OPS.get(getattr(reduce_op, "op", reduce_op))
    return None if op == "mean" and not all(tensor.is_floating_point() for tensor in tensors) else op


def _is_sum(reduce_op: Any) -> bool:
    return _OPS.get(getattr(reduce_op, "op", reduce_op)) in ("sum", "mean")


def seconds(timeout: timedelta | None) -> float | None:
    """Return a timeout in seconds; None if ``timeout`` is None or negative, with which torch means no timeout."""
    return None if timeout is None or timeout < timedelta(0) else timeout.total_seconds()


def check_rank(call: str, rank: int, size: int, what: str = "rank") -> None:
    """Raise RuntimeError unless the group has the rank ``rank``: gloo would wait for ever or crash."""
    if not 0 <= rank < size:
        raise RuntimeError(f"popdist::{call}: invalid {what}: {rank} (expected 0 to {size - 1})")


def check_single(call: str, *tensors: Sequence[object]) -> None:
    """Raise RuntimeError unless each of the lists ``tensors`` has exactly one element."""
    for listed in tensors:
        if len(listed) != 1:  # gloo treats several tensors as tensors of several devices, and combines them
            raise RuntimeError(f"popdist::{call}: expected a single tensor, got {len(listed)}")


def check_written(call: str, tensors: Iterable[Tensor]) -> None:
    """Raise RuntimeError if elements of a tensor to be written share memory, as after ``expand()``."""
    for tensor in tensors:
        dimensions = zip(tensor.shape, tensor.stride(), strict=True)
        if not tensor.is_contiguous() and any(length > 1 and stride == 0 for length, stride in dimensions):
            raise RuntimeError(
                f"popdist::{call}: more than one element of the written-to tensor refers to a single memory "
                f"location, as after expand(): {_describe(tensor)}. Please clone() the tensor before."
            )


def check_dense(call: str, tensors: Iterable[Tensor]) -> None:
    """Raise RuntimeError if a tensor is not contiguous, because gloo would read other elements."""
    for tensor in tensors:
        if not _is_run(tensor):
            raise RuntimeError(
                f"popdist::{call}: {_describe(tensor)} has strides {tensor.stride()} or a later sign; gloo, "
                "which does this call, would take other numbers. Call contiguous() or resolve_conj() before."
            )


def check_rows(call: str, rows: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], size: int) -> None:
    """Raise RuntimeError unless ``rows[i]`` has, for each rank, a tensor shaped and typed as ``tensors[i]``."""
    if len(rows) != len(tensors):
        raise RuntimeError(
            f"popdist::{call}: expected as many lists as tensors, got {len(rows)} and {len(tensors)}"
        )
    for row, tensor in zip(rows, tensors, strict=True):
        if len(row) != size:
            raise RuntimeError(
                f"popdist::{call}: invalid tensor list: expected a tensor for each of the {size} ranks (the world "
                f"size), got {len(row)}"
            )
        for part in row:
            if part.shape != tensor.shape or part.dtype != tensor.dtype or not part.is_cpu:
                what = "type" if part.dtype != tensor.dtype else "size"
                raise RuntimeError(
                    f"popdist::{call}: invalid tensor {what}: expected {_describe(tensor)} for every rank, got "
                    f"{_describe(part)}"
                )


def check_parts(call: str, wholes: Sequence[Tensor], parts: Sequence[Tensor], size: int) -> None:
    """Raise RuntimeError unless ``wholes[i]`` has the dtype and ``size`` times the elements of ``parts[i]``."""
    if len(wholes) != len(parts):
        raise RuntimeError(
            f"popdist::{call}: expected as many outputs as inputs, got lists of {len(wholes)} and {len(parts)}"
        )
    for whole, part in zip(wholes, parts, strict=True):
        if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
            what = "type" if whole.dtype != part.dtype else "size"
            raise RuntimeError(
                f"popdist::{call}: invalid tensor {what}: {_describe(whole)} is not made of {size} parts of "
                f"{_describe(part)}, one for each rank"
            )


def check_exchange(outputs: Sequence[Tensor], inputs: Sequence[Tensor], size: int) -> None:
    """Raise RuntimeError unless ``outputs`` and ``inputs`` have one tensor per rank, all of the same dtype."""
    for name, listed in (("input", inputs), ("output", outputs)):
        if len(listed) != size:
            raise RuntimeError(
                f"popdist::alltoall: {name} tensor list size {len(listed)} does not match world size {size}"
            )
    _check_dtypes([*outputs, *inputs])


def check_splits(output: Tensor, input: Tensor, lengths: Sequence[Sequence[int]], size: int) -> None:  # noqa: A002 - torch's name
    """Raise RuntimeError unless ``lengths`` cut both tensors into one part per rank; empty means equal parts."""
    _check_dtypes([output, input])
    for tensor, parts in zip((output, input), lengths, strict=True):
        rows = len(tensor) if tensor.dim() else 0
        problem = ""
        if not parts:
            problem = "dim 0 does not divide equally across group size" if rows % size else ""
        elif len(parts) != size:
            problem = "Number of tensor splits not equal to group size"
        elif sum(parts) != rows or min(parts) < 0:
            problem = "Split sizes doesn't match total dim 0 size"
        if problem:
            asked = list(parts) or "equal lengths"
            raise RuntimeError(
                f"popdist::alltoall: {problem}: {_describe(tensor)} cannot be cut into {asked} for {size} ranks"
            )


def _check_dtypes(tensors: Sequence[Tensor]) -> None:
    if len({tensor.dtype for tensor in tensors}) > 1:
        kinds = ", ".join(sorted({_describe(tensor) for tensor in tensors}))
        raise RuntimeError(
            f"popdist::alltoall: input and output tensors must have the same type, but there are {kinds}"
        )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device.type}"
