"""The process group of the backend ``popdist``: shared memory for what CPUs do often, gloo and NCCL for the rest.

DeviceMesh, DTensor, FSDP and the functional collectives ask a group for the backend of a device, so the group
holds a gloo group for the CPU and, where there is one, an NCCL group for CUDA. A call is taken in any form that
torch has for it. One that nobody looks at, and whose tensors are numbers in this computer's memory, is done here.
Any other goes torch's way, through its dispatcher: to a mode that looks, to NCCL, to gloo, or back to here
(see `popdist.process_group.dispatched_calls`).

torch calls several operations by an older and a newer name. Its own methods of the older names call those of the
newer ones here; where it has none that do, both names are here. No other may be: torch's method of the newer name
would call it, and so this one again.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final
from weakref import WeakMethod

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
from torch.autograd import profiler
from torch.distributed.distributed_c10d import PrefixStore, Store

from popdist.host_memory.flags import Names
from popdist.host_memory.host_collectives import HostCollectives
from popdist.host_memory.host_group import HostGroup
from popdist.host_memory.shared_storages import StoragePool
from popdist.process_group.call_arguments import SUM, as_list, bare, check_peer, options
from popdist.process_group.dispatched_calls import (
    Showing,
    are_plain,
    are_sparse,
    flat,
    install_kernels,
    is_watched,
    num_modes,
)
from popdist.process_group.group_calls import GroupCalls
from popdist.process_group.movable import MovableTensors
from popdist.process_group.torch_groups import TorchGroups, accept_monitored_barriers, never_traced
from popdist.process_group.work_queue import DONE, WorkQueue, outside_inference
from popdist.transport.host_placement import connect

_CPU: Final = torch.device("cpu")
_CUDA: Final = torch.device("cuda")

Tensors = Sequence[Tensor]
Lists = Any  # of lists of tensors, or one list
Given = Any  # tensors or lists of them; None where they are given by their other name
Work = Any  # dist.Work, of which torch's stubs do not say that its groups return it
Options = Any
"""Of one of torch's many classes, or what such an object holds; see `popdist.process_group.call_arguments`."""


def _shown(tensors: Given) -> bool:
    """Whether a call with these tensors goes torch's way."""
    return num_modes() > 0 or profiler._is_profiler_enabled or not are_plain(tensors)  # noqa: SLF001 - as `is_watched`


@never_traced
class PopdistProcessGroup(TorchGroups):
    """A process group of torch's over popdist's collectives; made by torch.

    Each collective has the names of torch's for its arguments, and may be called in each of its forms: of lists of
    tensors and an object of options, or of a tensor and what would stand in the options.

    Args:
        store: Where the ranks find each other.
        rank: This process in the group.
        size: Ranks in the group.
        timeout: How long a lost or late rank is waited for.
        members: Their ranks in the job, for errors.
        share_tensors: See `popdist.contract.read_share_tensors`.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout: timedelta,
        members: tuple[int, ...],
        share_tensors: bool | None = None,
    ) -> None:
        install_kernels()
        accept_monitored_barriers()
        host = connect(
            PrefixStore("popdist", store),
            rank,
            size,
            timeout_seconds=timeout.total_seconds(),
            names=Names(members=members),
        )
        super().__init__(store, rank, size, timeout, host.set_timeout)
        self._host = host
        self._movable = MovableTensors(is_wanted=share_tensors)
        if isinstance(host, HostCollectives) and share_tensors is not False:
            self._gloo.pool = StoragePool()
            if share_tensors:
                host.leave_large()
        self._queue = WorkQueue(host.break_off)
        self.calls = GroupCalls(host, self._gloo, self._queue)
        self._quick = self._quick_call(are_moved=share_tensors is True)
        if self._quick is not None:
            self.__dict__["allreduce"] = self._quick

    def _quick_call(self, *, are_moved: bool) -> Any:  # noqa: ANN401 - a class of the extension, or None
        """What torch calls in place of :meth:`allreduce`: C, which adds what is small and calls that for all else.

        Args:
            are_moved: Whether large tensors may be moved, which that method sees to.
        """
        host, queue = self._host, self._queue
        if not isinstance(host, HostCollectives):
            return None

        def add_large(tensors: Tensors) -> None:
            outside_inference(lambda: host.all_reduce(bare(tensors)[0]), ())

        return host.quick_call(
            *(AllreduceOptions, SUM, queue.pending, queue.turn, num_modes, vars(profiler)),
            *(DONE, None if are_moved else add_large, WeakMethod(self.allreduce)),
        )

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """``popdist``."""
        return "popdist"

    @property
    def host_group(self) -> HostGroup | None:
        """The shared memory of the ranks; None where they do not all share a host."""
        return self._host.group if isinstance(self._host, HostCollectives) else None

    def allreduce(
        self,
        tensors: Given = None,
        opts: Options = None,
        timeout: timedelta | None = None,
        *,
        op: Options = None,
        tensor: Given = None,
    ) -> Work:
        """Combine one tensor over the ranks, in place."""
        if type(opts) is not AllreduceOptions:
            opts = options(AllreduceOptions, reduceOp=op if opts is None else opts, timeout=timeout)
        tensors = as_list(tensors if tensor is None else tensor)
        if _shown(tensors):
            if are_sparse(tensors) and not is_watched():
                # torch's own method would keep Python's lock while gloo waits for a thread that wants it
                return self._gloo.allreduce(tensors, opts)
            with Showing() as taken:
                return taken(super().allreduce(tensors, opts))
        return self.calls.allreduce(tensors, opts, self._movable.of_this_call(is_async=opts.asyncOp))

    def allreduce_coalesced(self, tensors: Tensors, opts: Options = None) -> Work:
        """Combine each of several tensors."""
        opts = opts or AllreduceCoalescedOptions()
        if _shown(tensors):
            with Showing() as taken:
                return taken(super().allreduce_coalesced(tensors, opts))
        return self.calls.allreduce_coalesced(tensors, opts)

    def broadcast(
        self,
        tensors: Given = None,
        opts: Options = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
        tensor: Given = None,
    ) -> Work:
        """Overwrite one tensor with the root's."""
        tensors = as_list(tensors if tensor is None else tensor)
        if type(opts) is not BroadcastOptions:
            opts = options(BroadcastOptions, rootRank=root if opts is None else opts, timeout=timeout)
        if _shown(tensors):
            with Showing() as taken:
                return taken(super().broadcast(tensors, opts))
        return self.calls.broadcast(tensors, opts)

    def reduce(
        self,
        tensors: Given = None,
        opts: Options = None,
        op: Options = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
        tensor: Given = None,
    ) -> Work:
        """Combine one tensor over the ranks into the root's."""
        tensors = as_list(tensors if tensor is None else tensor)
        if type(opts) is not ReduceOptions:
            opts = options(ReduceOptions, rootRank=root if opts is None else opts, reduceOp=op, timeout=timeout)
        if _shown(tensors):
            with Showing() as taken:
                return taken(super().reduce(tensors, opts))
        return self.calls.reduce(tensors, opts)

    def allgather(
        self,
        output_tensors: Lists,
        input_tensors: Given = None,
        opts: Options = None,
        *,
        input_tensor: Given = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Take every rank's tensor: ``output_tensors[0][rank]`` becomes that of ``rank``."""
        input_tensors = input_tensors if input_tensor is None else input_tensor
        if isinstance(input_tensors, Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        if type(opts) is not AllgatherOptions:
            opts = options(AllgatherOptions, timeout=timeout if opts is None else opts)
        if _shown(flat([output_tensors, input_tensors])):
            with Showing() as taken:
                return taken(super().allgather(output_tensors, input_tensors, opts))
        return self.calls.allgather(output_tensors, input_tensors, opts)

    def allgather_coalesced(self, output_lists: Lists, input_list: Tensors, opts: Options = None) -> Work:
        """Take every rank's tensors: ``output_lists[rank][i]`` becomes the ``input_list[i]`` of ``rank``."""
        opts = opts or AllgatherOptions()
        if _shown(flat([output_lists, input_list])):
            with Showing() as taken:
                return taken(super().allgather_coalesced(output_lists, input_list, opts))
        return self.calls.allgather_coalesced(output_lists, input_list, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:  # noqa: A002 - torch's name
        """Take every rank's tensor, one after the other in ``output``."""
        opts = opts or AllgatherOptions()
        if _shown((output, input)):
            with Showing() as taken:
                return taken(super()._allgather_base(output, input, opts))
        return self.calls._allgather_base(output, input, opts)  # noqa: SLF001 - torch's name for it

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Options = None) -> Work:
        """Do :meth:`all_gather_single` of several tensors."""
        opts = opts or AllgatherOptions()
        if _shown(flat([outputs, inputs])):
            with Showing() as taken:
                return taken(super().all_gather_single_coalesced(outputs, inputs, opts))
        return self.calls.allgather_into_tensor_coalesced(outputs, inputs, opts)

    def reduce_scatter(  # noqa: PLR0913 - as torch's
        self,
        output_tensors: Given = None,
        input_tensors: Lists = None,
        opts: Options = None,
        timeout: timedelta | None = None,
        *,
        output: Given = None,
        input: Given = None,  # noqa: A002 - torch's name
        op: Options = None,
    ) -> Work:
        """Take this rank's part of a combination: ``input_tensors[0][rank]`` is for ``rank``."""
        output_tensors = output_tensors if output is None else output
        input_tensors = input_tensors if input is None else input
        if isinstance(output_tensors, Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        if type(opts) is not ReduceScatterOptions:
            opts = options(ReduceScatterOptions, reduceOp=op if opts is None else opts, timeout=timeout)
        if _shown(flat([output_tensors, input_tensors])):
            with Showing() as taken:
                return taken(super().reduce_scatter(output_tensors, input_tensors, opts))
        return self.calls.reduce_scatter(output_tensors, input_tensors, opts)

    def reduce_scatter_single(self, outputTensor: Tensor, inputTensor: Tensor, opts: Options = None) -> Work:  # noqa: N803 - torch's names
        """Take this rank's part of a combination; the parts stand one after the other in ``inputTensor``."""
        opts = opts or ReduceScatterOptions()
        if _shown((outputTensor, inputTensor)):
            with Showing() as taken:
                return taken(super()._reduce_scatter_base(outputTensor, inputTensor, opts))
        return self.calls._reduce_scatter_base(outputTensor, inputTensor, opts)  # noqa: SLF001 - torch's name for it

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Options = None) -> Work:
        """Do :meth:`reduce_scatter_single` of several tensors."""
        opts = opts or ReduceScatterOptions()
        if _shown(flat([outputs, inputs])):
            with Showing() as taken:
                return taken(super().reduce_scatter_single_coalesced(outputs, inputs, opts))
        return self.calls.reduce_scatter_tensor_coalesced(outputs, inputs, opts)

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Options = None) -> Work:
        """``output_tensors[rank]`` becomes what stands in the ``input_tensors`` of ``rank`` for this one."""
        opts = opts or AllToAllOptions()
        if _shown(flat([output_tensors, input_tensors])):
            with Showing() as taken:
                return taken(super().alltoall(output_tensors, input_tensors, opts))
        return self.calls.alltoall(output_tensors, input_tensors, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch's name
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Options = None,
        *,
        timeout: timedelta | None = None,
    ) -> Work:
        """Do :meth:`alltoall` between tensors cut along their first dimension; no sizes mean equal ones."""
        if type(opts) is not AllToAllOptions:
            opts = options(AllToAllOptions, timeout=timeout if opts is None else opts)
        splits = (output_split_sizes, input_split_sizes)
        if _shown((output, input)):
            with Showing() as taken:
                return taken(super().all_to_all_single(output, input, *splits, opts))
        return self.calls.alltoall_base(output, input, *splits, opts)

    def barrier(self, opts: Options = None, timeout: timedelta | None = None) -> Work:
        """Wait for all ranks; for what runs on their CUDA devices only where the options name one."""
        if type(opts) is not BarrierOptions:
            opts = options(BarrierOptions, timeout=timeout or opts)
        if opts.device_ids if opts.device is None else opts.device.type != "cpu":
            return self._get_backend(opts.device or _CUDA).barrier(opts)
        if is_watched():
            opts.device = _CPU
            with Showing() as taken:
                return taken(super().barrier(opts))
        return self.calls.barrier(opts)

    def send(self, tensors: Tensors, dstRank: int, tag: int) -> Work:  # noqa: N803 - torch's name
        """Give one tensor to one rank."""
        check_peer("send", dstRank, self.size())
        self._movable.keep(tensors)
        if _shown(tensors):
            return super().send(tensors, dstRank, tag)
        return self.beneath(tensors).send(tensors, dstRank, tag)

    def recv(self, tensors: Tensors, srcRank: int, tag: int) -> Work:  # noqa: N803 - torch's name
        """Take one tensor from one rank."""
        check_peer("recv", srcRank, self.size())
        self._movable.keep(tensors)
        if _shown(tensors):
            return super().recv(tensors, srcRank, tag)
        return self.beneath(tensors).recv(tensors, srcRank, tag)

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives and messages were called so far: here and, what went there, of gloo."""
        num_quick = 0 if self._quick is None else self._quick.num_sums
        return num_quick + self.calls.num_calls + int(self._gloo._get_sequence_number_for_group())  # noqa: SLF001 - torch's name

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a lost or late rank is waited for from now on."""
        super().set_timeout(timeout)
        self._host.set_timeout(timeout.total_seconds())

    def shutdown(self) -> None:
        """Leave: the other ranks see it, and nothing is held any more."""
        self._queue.stop()
        self._host.close()
        self._gloo.pool = None
        super().shutdown()

    abort = shutdown
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
