"""The process group of the backend ``popdist``: shared memory for what CPUs do often, gloo and NCCL for the rest.

DeviceMesh, DTensor, FSDP and the functional collectives ask a group for the backend of a device, so the group
holds a gloo group for the CPU and, where there is one, an NCCL group for CUDA. Every call that it takes itself
looks at the tensors first: what is on a CUDA device, or cannot be combined in shared memory, goes on to them.
torch calls several operations by an older and a newer name: both are here.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceOptions,
    ReduceScatterOptions,
)
from torch.distributed.distributed_c10d import PrefixStore, Store

from popdist.host_memory.flags import Names
from popdist.host_memory.host_collectives import HostCollectives
from popdist.host_memory.host_group import HostGroup
from popdist.process_group import operations
from popdist.process_group.call_arguments import (
    SUM,
    as_list,
    bare,
    check_exchange,
    check_parts,
    check_rows,
    check_splits,
    op_of,
    options,
    seconds,
)
from popdist.process_group.host_placement import connect
from popdist.process_group.torch_groups import TorchGroups, never_traced
from popdist.process_group.work_queue import DONE, WorkQueue

_CUDA: Final = torch.device("cuda")
_TAKEN: Final = {(True, torch.strided)}

Tensors = Sequence[Tensor]
Lists = Any  # of lists of tensors, or one list
Work = Any  # dist.Work, of which torch's stubs do not say that its groups return it
Options = Any
"""Of one of torch's many classes, or what such an object holds; see `popdist.process_group.call_arguments`."""


@never_traced
class PopdistProcessGroup(TorchGroups):
    """A process group of torch's over popdist's collectives; made by torch.

    Args:
        store: Where the ranks find each other.
        rank: This process in the group.
        size: Ranks in the group.
        timeout: How long a lost or late rank is waited for.
        members: Their ranks in the job, for errors.
    """

    def __init__(
        self, store: Store, rank: int, size: int, *, timeout: timedelta, members: tuple[int, ...]
    ) -> None:
        host = connect(
            PrefixStore("popdist", store),
            rank,
            size,
            timeout_seconds=timeout.total_seconds(),
            names=Names(members=members),
        )
        super().__init__(store, rank, size, timeout, host.set_timeout)
        self._host = host
        self._quick_sum = host.quick_sum
        self._queue = WorkQueue(host.break_off)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """``popdist``."""
        return "popdist"

    @property
    def host_group(self) -> HostGroup | None:
        """The shared memory of the ranks; None where they do not all share a host."""
        return self._host.group if isinstance(self._host, HostCollectives) else None

    def _takes(self, *tensors: Tensor) -> bool:
        """Whether popdist itself does what is asked of these tensors."""
        return {(tensor.is_cpu, tensor.layout) for tensor in tensors} <= _TAKEN

    def _do(self, do: Callable[..., None], opts: Options, results: object, *arguments: object) -> Work:
        return self._queue.run(do, (self._host, *arguments), results, is_async=opts.asyncOp)

    def allreduce(self, tensors: Tensor | Tensors, opts: Options = None, timeout: timedelta | None = None) -> Work:
        """Combine one tensor over the ranks, in place."""
        if type(opts) is not AllreduceOptions:
            opts = options(AllreduceOptions, reduceOp=opts, timeout=timeout)
        if not opts.asyncOp and opts.reduceOp == SUM and self._queue.try_now(self._quick_sum, tensors):
            return DONE
        tensors = as_list(tensors)
        if self._takes(*tensors) and (op := op_of(opts.reduceOp, tensors)):
            return self._do(operations.all_reduce, opts, tensors, bare(tensors), op)
        return self.beneath(*tensors).allreduce(tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Options = None) -> Work:
        """Combine each of several tensors."""
        opts = opts or AllreduceCoalescedOptions()
        if self._takes(*tensors) and (op := op_of(opts.reduceOp, tensors)):
            return self._do(operations.all_reduce, opts, tensors, bare(tensors), op)
        return self.beneath(*tensors).allreduce_coalesced(tensors, opts)

    def broadcast(self, tensors: Tensor | Tensors, opts: Options = None, timeout: timedelta | None = None) -> Work:
        """Overwrite one tensor with the root's."""
        tensors = as_list(tensors)
        if type(opts) is not BroadcastOptions:
            opts = options(BroadcastOptions, rootRank=opts, timeout=timeout)
        if self._takes(*tensors):
            return self._do(operations.broadcast, opts, tensors, bare(tensors), opts.rootRank)
        return self.beneath(*tensors).broadcast(tensors, opts)

    def reduce(
        self,
        tensors: Tensor | Tensors,
        opts: Options = None,
        op: Options = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Combine one tensor over the ranks into the root's."""
        tensors = as_list(tensors)
        if type(opts) is not ReduceOptions:
            opts = options(ReduceOptions, rootRank=opts, reduceOp=op, timeout=timeout)
        if self._takes(*tensors) and (named := op_of(opts.reduceOp, tensors)):
            return self._do(operations.reduce, opts, tensors, bare(tensors), named, opts.rootRank)
        return self.beneath(*tensors).reduce(tensors, opts)

    def allgather(self, output_tensors: Lists, input_tensors: Tensor | Tensors, opts: Options = None) -> Work:
        """Take every rank's tensor: ``output_tensors[0][rank]`` becomes that of ``rank``."""
        if isinstance(input_tensors, Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        if type(opts) is not AllgatherOptions:
            opts = options(AllgatherOptions, timeout=opts)
        if self._takes(*input_tensors):
            check_rows(output_tensors, input_tensors, self.size())
            rows = [bare(row) for row in output_tensors]
            return self._do(operations.all_gather, opts, output_tensors, rows, bare(input_tensors))
        return self.beneath(*input_tensors).allgather(output_tensors, input_tensors, opts)

    def allgather_coalesced(self, output_lists: Lists, input_list: Tensors, opts: Options = None) -> Work:
        """Take every rank's tensors: ``output_lists[rank][i]`` becomes the ``input_list[i]`` of ``rank``."""
        opts = opts or AllgatherOptions()
        if self._takes(*input_list):
            rows = [bare(row) for row in zip(*output_lists, strict=True)]
            check_rows(rows, input_list, self.size())
            return self._do(operations.all_gather, opts, output_lists, rows, bare(input_list))
        return self.beneath(*input_list).allgather_coalesced(output_lists, input_list, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:  # noqa: A002 - torch's name
        """Take every rank's tensor, one after the other in ``output``."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Options = None) -> Work:
        """Do :meth:`all_gather_single` of several tensors."""
        opts = opts or AllgatherOptions()
        if self._takes(*outputs, *inputs):
            check_parts(outputs, inputs, self.size())
            return self._do(operations.all_gather_single, opts, outputs, bare(outputs), bare(inputs))
        return self.one_by_one("_allgather_base", outputs, inputs, opts)

    def reduce_scatter(
        self,
        output_tensors: Tensor | Tensors,
        input_tensors: Lists,
        opts: Options = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Take this rank's part of a combination: ``input_tensors[0][rank]`` is for ``rank``."""
        if isinstance(output_tensors, Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        if type(opts) is not ReduceScatterOptions:
            opts = options(ReduceScatterOptions, reduceOp=opts, timeout=timeout)
        if self._takes(*output_tensors) and (op := op_of(opts.reduceOp, output_tensors)):
            check_rows(input_tensors, output_tensors, self.size())
            rows = [bare(row) for row in input_tensors]
            return self._do(operations.reduce_scatter, opts, output_tensors, bare(output_tensors), rows, op)
        return self.beneath(*output_tensors).reduce_scatter(output_tensors, input_tensors, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:  # noqa: A002 - torch's name
        """Take this rank's part of a combination; the parts stand one after the other in ``input``."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Options = None) -> Work:
        """Do :meth:`reduce_scatter_single` of several tensors."""
        opts = opts or ReduceScatterOptions()
        if self._takes(*outputs, *inputs) and (op := op_of(opts.reduceOp, outputs)):
            check_parts(inputs, outputs, self.size())
            return self._do(operations.reduce_scatter_single, opts, outputs, bare(outputs), bare(inputs), op)
        return self.one_by_one("_reduce_scatter_base", outputs, inputs, opts)

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Options = None) -> Work:
        """``output_tensors[rank]`` becomes what stands in the ``input_tensors`` of ``rank`` for this one."""
        if type(opts) is not AllToAllOptions:
            opts = options(AllToAllOptions, timeout=opts)
        if self._takes(*output_tensors, *input_tensors):
            check_exchange(output_tensors, input_tensors, self.size())
            return self._do(operations.all_to_all, opts, output_tensors, bare(output_tensors), bare(input_tensors))
        return self.beneath(*output_tensors).alltoall(output_tensors, input_tensors, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch's name
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Options = None,
    ) -> Work:
        """Do :meth:`alltoall` between tensors cut along their first dimension; no sizes mean equal ones."""
        if type(opts) is not AllToAllOptions:
            opts = options(AllToAllOptions, timeout=opts)
        if self._takes(output, input):
            check_splits(output, output_split_sizes, self.size())
            check_splits(input, input_split_sizes, self.size())
            splits = (output_split_sizes, input_split_sizes)
            return self._do(operations.all_to_all_single, opts, [output], output.data, input.data, *splits)
        return self.beneath(output).alltoall_base(output, input, output_split_sizes, input_split_sizes, opts)

    def barrier(self, opts: Options = None, timeout: timedelta | None = None) -> Work:
        """Wait for all ranks; for what runs on their CUDA devices only where the options name one."""
        if type(opts) is not BarrierOptions:
            opts = options(BarrierOptions, timeout=timeout or opts)
        if opts.device_ids if opts.device is None else opts.device.type != "cpu":
            return self._get_backend(opts.device or _CUDA).barrier(opts)
        return self._do(operations.barrier, opts, [], seconds(opts.timeout))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a lost or late rank is waited for from now on."""
        super().set_timeout(timeout)
        self._host.set_timeout(timeout.total_seconds())

    def shutdown(self) -> None:
        """Leave: the other ranks see it, and nothing is held any more."""
        self._queue.stop()
        self._host.close()
        super().shutdown()

    abort = shutdown
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
