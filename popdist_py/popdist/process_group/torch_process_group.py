"""The process group of the backend ``popdist``: shared memory for what CPUs do often, gloo and NCCL for the rest.

DeviceMesh, DTensor, FSDP and the functional collectives ask a group for the backend of a device, so the group
holds a gloo group for the CPU and, where there is one, an NCCL group for CUDA. Each of its methods calls torch's
own, in any form that torch has for it. That one calls an operator, whose kernel for the CPU calls the group's
collectives (see `popdist.process_group.operators`); for CUDA it is torch's, which calls NCCL.

A group written in Python must never be traced. In a compiled DistributedDataParallel, C++ calls the group in the
middle of what is being traced; a Python method would be traced as a frame of its own, and that fails.
"""

from collections.abc import Callable
from datetime import timedelta
from functools import cache, wraps
from inspect import currentframe
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import BarrierOptions
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from popdist import torch_private
from popdist.host_memory.barriers import Names
from popdist.host_memory.forks import never_destroy_in_children
from popdist.host_memory.host_collectives import HostCollectives
from popdist.host_memory.shared_storages import StoragePool
from popdist.process_group.group_calls import GroupCalls
from popdist.process_group.operators import DispatchedCall, install_kernels
from popdist.process_group.remapping import RemappableStorages
from popdist.process_group.work_queue import WorkQueue
from popdist.transport.hosts import Member, connect, machine

if TYPE_CHECKING:
    from popdist.host_memory.host_group import HostGroup

_CPU: Final = torch.device("cpu")
_CUDA: Final = torch.device("cuda")
_GLOO: Final = dist.ProcessGroup.BackendType.GLOO
_NCCL: Final = dist.ProcessGroup.BackendType.NCCL

_ProcessGroupGloo: Any = dist.ProcessGroupGloo  # torch's stubs lack its methods
_ProcessGroup: Any = dist.ProcessGroup  # with torch's own stubs, no two of its calling forms fit one method

Work = Any  # dist.Work, of which torch's stubs do not say that its groups return it


class Gloo(_ProcessGroupGloo):  # type: ignore[misc] # as above
    """gloo, which torch takes for the whole group: where it sets the group's timeout, and where it makes tensors.

    ``pool`` is memory for the tensors that the group makes for its collectives; None where it makes none.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, on_timeout: Callable[[float], None]
    ) -> None:
        super().__init__(store, rank, size, timeout)
        self._on_timeout = on_timeout
        self.pool: StoragePool | None = None

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether the group makes tensors on this device that its collectives need not copy."""
        return self.pool is not None and device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor of ``size`` numbers in memory that all ranks can map; what they are is left open."""
        made = torch.empty(0, dtype=dtype, device=device)
        if self.pool is None or not self.supports_tensor_alloc(device) or not size:
            return made.new_empty(size)
        return made.set_(self.pool.storage(size * made.element_size()), 0, (size,), (1,))

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)
        self._on_timeout(timeout.total_seconds())


def _connected_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:  # noqa: ANN401 - as above
    made = torch_private.connect_gloo(store, rank, size, timeout, None)
    never_destroy_in_children(made)
    return made


def _method(name: str, torchs_name: str = "") -> Callable[..., Work]:
    """A method that calls torch's own, and gives back the kernel's work, if it came to a kernel here."""
    torchs_own = getattr(_ProcessGroup, torchs_name or name)

    def method(self: "PopdistProcessGroup", *arguments: Any, **named: Any) -> Work:  # noqa: ANN401 - as torch's
        with DispatchedCall(arguments) as call:
            work = torchs_own(self, *arguments, **named)
        return work if call.work is None else call.work

    named_method: Callable[..., Work] = _named(method, name)
    return named_method


def _named(method: Any, name: str) -> Any:  # noqa: ANN401 - a function
    """The function under torch's name: by that, torch's own method knows its caller and does not call it again."""
    method.__code__ = method.__code__.replace(co_name=name)
    method.__name__ = method.__qualname__ = name
    return torch_private.skip_tracing(method)


class PopdistProcessGroup(_ProcessGroup):  # type: ignore[misc] # as above
    """A process group of torch's over popdist's collectives; made by torch.

    torch calls several operations by an older and a newer name, and its methods of the older names call those of
    the newer ones here. No other may be defined: torch's method of the newer name would call it, and so this one
    again.

    ``members`` are the ranks of this group's ranks in the job, for errors. For ``share_tensors`` see
    `popdist.contract.read_share_tensors`. ``calls`` are the group's collectives over plain CPU tensors.
    """

    calls: GroupCalls

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
        super().__init__(rank, size)
        names = Names(members=members)
        own = PrefixStore("popdist", store)
        member = Member(store=own, rank=rank, names=names, timeout_seconds=timeout.total_seconds())
        self._host = connect(member, machine(), lambda part: _connected_gloo(part, rank, size, timeout))
        self._store = store
        self._gloo = Gloo(PrefixStore("gloo", store), rank, size, timeout, self._host.set_timeout)
        self._gloo._set_sequence_number_for_group()  # noqa: SLF001 - torch's name for it
        self._register_backend(_CPU, _GLOO, self._gloo)
        self._set_default_backend(_GLOO)
        if torch.cuda.is_available() and dist.is_nccl_available():
            nccl = torch_private.connect_nccl(PrefixStore("nccl", store), rank, size, timeout)
            self._register_backend(_CUDA, _NCCL, nccl)
            never_destroy_in_children(nccl)
        never_destroy_in_children(self, self._gloo, store)
        self._remappable = RemappableStorages(is_wanted=share_tensors)
        if isinstance(self._host, HostCollectives) and share_tensors is not False:
            self._gloo.pool = StoragePool()
        self._queue = WorkQueue(self._host.abort)
        self.calls = GroupCalls(self._host, self._gloo, self._queue, self._remappable.keep)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """``popdist``."""
        return "popdist"

    def get_group_store(self) -> Store:
        """The store in which the ranks found each other."""
        return self._store

    @property
    def host_group(self) -> "HostGroup | None":
        """The shared memory of the ranks; None where they do not all share a host."""
        return self._host.group if isinstance(self._host, HostCollectives) else None

    def allreduce(self, *arguments: Any, **named: Any) -> Work:  # noqa: ANN401 - as torch's
        """Combine one tensor over the ranks, in place: the method that torch's reducer calls with its buckets."""
        is_async = any(getattr(it, "asyncOp", False) for it in (*arguments, *named.values()))
        may_move = self._remappable.of_call(currentframe(), is_async=is_async)
        with DispatchedCall(arguments, may_move) as call:
            work = super().allreduce(*arguments, **named)
        return work if call.work is None else call.work

    allreduce_coalesced = _method("allreduce_coalesced")
    broadcast = _method("broadcast")
    reduce = _method("reduce")
    allgather = _method("allgather")
    allgather_coalesced = _method("allgather_coalesced")
    all_gather_single = _allgather_base = _method("all_gather_single", "_allgather_base")
    all_gather_single_coalesced = _method("all_gather_single_coalesced")
    reduce_scatter = _method("reduce_scatter")
    reduce_scatter_single = _reduce_scatter_base = _method("reduce_scatter_single", "_reduce_scatter_base")
    reduce_scatter_single_coalesced = _method("reduce_scatter_single_coalesced")
    alltoall = _method("alltoall")
    all_to_all_single = _method("all_to_all_single")

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:  # noqa: ANN401 - as torch's
        """Wait for all ranks; for what runs on their CUDA devices only where the options name one."""
        if type(opts) is not BarrierOptions:
            opts, chosen = BarrierOptions(), timeout or opts
            opts.timeout = opts.timeout if chosen is None else chosen
        if opts.device_ids if opts.device is None else opts.device.type != "cpu":
            return self._get_backend(opts.device or _CUDA).barrier(opts)
        opts.device = _CPU
        with DispatchedCall([opts]) as call:
            work = super().barrier(opts)
        return work if call.work is None else call.work

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives and messages were called so far: here and, what went there, of gloo."""
        return self.calls.num_calls + int(self._gloo._get_sequence_number_for_group())  # noqa: SLF001 - torch's name

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


for _own in vars(PopdistProcessGroup).values():
    if callable(_own) and hasattr(_own, "__code__"):
        torch_private.skip_tracing(_own)


@cache
def accept_monitored_barriers() -> None:
    """Have ``torch.distributed.monitored_barrier`` take these groups, once in a process.

    torch refuses every group whose backend is not named gloo, also one that can do it.
    """
    torchs_own = distributed_c10d.monitored_barrier

    @wraps(torchs_own)
    def monitored_barrier(
        group: Any = None,  # noqa: ANN401 - torch's stubs lack the method
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,  # noqa: FBT001, FBT002 - as torch's
    ) -> None:
        chosen: Any = dist.group.WORLD if group is None else group
        if isinstance(chosen, PopdistProcessGroup):
            chosen.monitored_barrier(timeout, wait_all_ranks)
        else:
            torchs_own(group, timeout, wait_all_ranks)

    distributed_c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier
