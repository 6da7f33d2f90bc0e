"""The process group of the backend ``popdist``: shared memory for frequent CPU calls, other backends for the rest.

Each method calls torch's own method, which calls an operator such as ``c10d::allreduce_``, so that the profiler
and dispatcher modes see the same operators as with gloo. For CPU tensors the operators have kernels here, which
call the collectives of popdist's groups, and the backends of other groups. No compiler may trace a method. Tensors
of an accelerator are sent through CPU memory if no backend sends between the ranks' accelerators.
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from inspect import currentframe
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Self, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined] # torch exports all of them
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    PrefixStore,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
)

from popdist.errors import Names
from popdist.exchange.host_memory.forks import never_destroy_in_children
from popdist.exchange.host_memory.host_collectives import HostCollectives
from popdist.exchange.host_memory.in_place import MayMove
from popdist.exchange.host_memory.shared_storages import StoragePool
from popdist.exchange.process_group.group_calls import GroupCalls, scatter_reduced
from popdist.exchange.process_group.message_calls import MessageCalls
from popdist.exchange.process_group.work_queue import DoneWork, PendingWork, WorkQueue, are_all_idle
from popdist.exchange.transport.hosts import Member, connect, machine
from popdist.ground import torch_private, torch_private_groups
from popdist.ground.accelerators import accelerator
from popdist.ground.accelerators.sharing import are_distinct

if TYPE_CHECKING:
    from popdist.exchange.host_memory.host_group import HostGroup

_CPU: Final = torch.device("cpu")
_GLOO: Final = dist.ProcessGroup.BackendType.GLOO

_ProcessGroupGloo: Any = dist.ProcessGroupGloo  # torch's stubs lack its methods
_ProcessGroup: Any = dist.ProcessGroup  # no single method fits the calling forms in torch's stubs

Work = Any  # dist.Work, of which torch's stubs do not say that its groups return it


class Gloo(_ProcessGroupGloo):  # type: ignore[misc] # torch's stubs do not describe the base class
    """The gloo group inside a popdist group; torch calls its methods to set timeouts and to allocate tensors."""

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, on_timeout: Callable[[float], None]
    ) -> None:
        super().__init__(store, rank, size, timeout)
        self._on_timeout = on_timeout
        self.pool: StoragePool | None = None  # memory for tensors that torch asks for

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether ``allocate_tensor`` makes tensors on ``device`` that collectives need not copy."""
        return self.pool is not None and device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized flat tensor of ``size`` elements, if possible in memory that ranks share."""
        empty = torch.empty(0, dtype=dtype, device=device)
        if self.pool is None or not self.supports_tensor_alloc(device) or not size:
            return empty.new_empty(size)
        return empty.set_(self.pool.storage(size * empty.element_size()), 0, (size,), (1,))

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)
        self._on_timeout(timeout.total_seconds())


def _connected_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    gloo = torch_private_groups.connect_gloo(store, rank, size, timeout, None)
    never_destroy_in_children(gloo)
    return gloo


def _method(name: str, torchs_name: str = "") -> Callable[..., Work]:
    """Make the method ``name``, which calls torch's method, but returns the ``Work`` of popdist's kernel."""
    torchs_own = getattr(_ProcessGroup, torchs_name or name)

    def method(self: "PopdistProcessGroup", *arguments: Any, **named: Any) -> Work:
        with DispatchedCall((*arguments, *named.values())) as call:
            work = torchs_own(self, *arguments, **named)
        return work if call.work is None else _kept(call.work, currentframe())

    return torch_private.skip_tracing(torch_private_groups.renamed(method, name))


def _kept(work: Work, method_frame: FrameType | None) -> Work:
    """Return ``work``. If a caller in C++ would not keep this Python object (before torch 2.8), wait, and return a
    finished work of torch's own class.
    """
    if not isinstance(work, DoneWork | PendingWork) or torch_private_groups.keeps_works(method_frame):
        return work
    work.wait()
    return cast("Work", torch_private_groups.done_work(work.result()))


class PopdistProcessGroup(_ProcessGroup):  # type: ignore[misc] # torch's stubs do not describe the base class
    """The process group that torch makes for the backend ``popdist``: its collectives use shared memory."""

    calls: GroupCalls  # the group's collectives over plain CPU tensors
    message_calls: MessageCalls

    def __init__(  # noqa: PLR0913 - the facts of a group, by name
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout: timedelta,
        members: tuple[int, ...],  # the job-wide ranks of the group's ranks, for errors
        device: torch.device | None = None,  # the accelerator of this rank
        warns_of_sharing: bool = True,  # whether to warn if ranks share an accelerator
        share_tensors: bool | None = None,  # see `popdist.ground.contract.read_share_tensors`
    ) -> None:
        install_kernels()
        torch_private_groups.accept_monitored_barriers(PopdistProcessGroup)
        torch_private_groups.have_shut_down(PopdistProcessGroup)
        super().__init__(rank, size)
        names = Names(members=members)
        popdist_store = PrefixStore("popdist", store)
        member = Member(store=popdist_store, rank=rank, names=names, timeout_seconds=timeout.total_seconds())
        self._host = connect(member, machine(), lambda part: _connected_gloo(part, rank, size, timeout))
        self._store = store
        self._gloo = Gloo(PrefixStore("gloo", store), rank, size, timeout, self._host.set_timeout)
        self._gloo._set_sequence_number_for_group()  # noqa: SLF001 - torch has no public name for it
        self._register_backend(_CPU, _GLOO, self._gloo)
        self._set_default_backend(_GLOO)
        self.direct_device = self._connect_accelerators(device, timeout, warns=warns_of_sharing)
        never_destroy_in_children(self, self._gloo, store)
        self._share_tensors = share_tensors
        if isinstance(self._host, HostCollectives) and share_tensors is not False:
            self._gloo.pool = StoragePool()
        self._queue = WorkQueue(self._host.abort)
        is_whole = not dist.is_initialized() or size == dist.get_world_size()
        self.calls = GroupCalls(self._host, self._gloo, self._queue, () if is_whole else members)
        self.message_calls = MessageCalls(self._host, self._gloo)

    def _connect_accelerators(
        self, device: torch.device | None, timeout: timedelta, *, warns: bool
    ) -> torch.device | None:
        """Connect the ranks' accelerators; return their device type, None if tensors go through CPU memory."""
        if accelerator.found_type() is None:
            return None
        rank, size = self.rank(), self.size()
        is_distinct = are_distinct(self._host, size, rank, device, machine(), warns=warns)
        if device is None:
            return None
        name = accelerator.collectives_of(device.type)
        if not name or not is_distinct:
            install_kernels(accelerator.dispatch_key(device.type))
            return None
        backend = accelerator.connect(device.type, PrefixStore(name, self._store), rank, size, timeout)
        never_destroy_in_children(backend)
        self._register_backend(
            torch.device(device.type), getattr(dist.ProcessGroup.BackendType, name.upper()), backend
        )
        return torch.device(device.type)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of this process group's backend, ``popdist``."""
        return "popdist"

    def get_group_store(self) -> Store:
        """Return the key-value store in which the ranks of this process group found each other."""
        return self._store

    @property
    def host_group(self) -> "HostGroup | None":
        """The shared memory of the group's ranks; None if the ranks are on several hosts."""
        return self._host.group if isinstance(self._host, HostCollectives) else None

    def allreduce(self, *arguments: Any, **named: Any) -> Work:
        """Combine one tensor over all ranks, in place; DistributedDataParallel calls this for each bucket."""
        with DispatchedCall((*arguments, *named.values()), self._may_move(currentframe())) as call:
            work = super().allreduce(*arguments, **named)
        return work if call.work is None else _kept(call.work, currentframe())

    def _may_move(self, method_frame: FrameType | None) -> MayMove | None:
        """Return a function that says if a tensor may move to shared memory now; None if no tensor ever may."""
        if self._share_tensors is False:
            return None
        if torch_private.is_caller_the_engine(method_frame):  # torch's reducer: only it knows the addresses
            return _is_flat
        return (lambda _: are_all_idle()) if self._share_tensors else None

    # If a method has two names, only the newer name is defined here, and torch's method with the older name calls
    # this method. If both names were defined here, the two methods would call each other without end.
    allreduce_coalesced = _method("allreduce_coalesced")
    broadcast = _method("broadcast")
    reduce = _method("reduce")
    allgather = _method("allgather")
    allgather_coalesced = _method("allgather_coalesced")
    all_gather_single = _allgather_base = _method("all_gather_single", "_allgather_base")
    reduce_scatter = _method("reduce_scatter")
    reduce_scatter_single = _reduce_scatter_base = _method("reduce_scatter_single", "_reduce_scatter_base")
    send = _method("send")
    recv = _method("recv")
    recv_anysource = _method("recv_anysource")
    alltoall = _method("alltoall")

    def gather(self, outputs: Any, inputs: Any, *arguments: Any, **named: Any) -> Work:
        """Gather tensors on the root by gloo; make inputs contiguous first, which gloo needs before torch 2.11."""
        dense = [it.contiguous() for it in inputs] if isinstance(inputs, list) else inputs.contiguous()
        return cast("Work", super().gather(outputs, dense, *arguments, **named))

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Start a barrier; return its ``Work``, which also waits for an accelerator if ``opts`` names a device."""
        if type(opts) is not BarrierOptions:
            opts, chosen = BarrierOptions(), timeout or opts
            opts.timeout = opts.timeout if chosen is None else chosen
        if self.direct_device is not None and (
            opts.device_ids if opts.device is None else opts.device.type != "cpu"
        ):
            return self._get_backend(opts.device or self.direct_device).barrier(opts)
        opts.device = _CPU
        with DispatchedCall([opts]) as call:
            work = super().barrier(opts)
        return work if call.work is None else _kept(call.work, currentframe())

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives and messages of this group so far, by popdist and by gloo together."""
        num_calls = self.calls.num_calls + self.message_calls.num_calls
        return num_calls + int(self._gloo._get_sequence_number_for_group())  # noqa: SLF001 - torch's name

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long later calls of this group wait for a lost or late rank before raising an error."""
        if hasattr(_ProcessGroup, "set_timeout"):  # not in torch 2.6; nor is shutdown
            super().set_timeout(timeout)
        self._host.set_timeout(timeout.total_seconds())

    def shutdown(self) -> None:
        """Leave the process group, and release its memory; the other ranks detect that this rank has left."""
        self._queue.stop()
        self._host.close()
        self._gloo.pool = None
        if hasattr(_ProcessGroup, "shutdown"):
            super().shutdown()

    abort = shutdown


for _newer, _older in torch_private_groups.RENAMED_METHODS.items():
    _name = _newer if hasattr(_ProcessGroup, _newer) else _older
    setattr(PopdistProcessGroup, _name, _method(_name))

for _name, _own in list(vars(PopdistProcessGroup).items()):
    if callable(_own) and hasattr(_own, "__code__"):
        setattr(PopdistProcessGroup, _name, torch_private.skip_tracing(_own))


def _is_flat(tensor: Tensor) -> bool:
    """Whether ``tensor`` is flat, as DDP's buckets are; a gradient that a C++ hook sends is mostly not flat."""
    return tensor.dim() == 1


_OPERATORS: Final[dict[str, Any]] = {
    "allreduce_": torch_private_groups.with_async_op(AllreduceOptions),
    "allreduce_coalesced_": torch_private_groups.with_async_op(AllreduceCoalescedOptions),
    "broadcast_": torch_private_groups.with_async_op(BroadcastOptions),
    "reduce_": torch_private_groups.with_async_op(ReduceOptions),
    "allgather_": torch_private_groups.with_async_op(AllgatherOptions),
    "allgather_coalesced_": torch_private_groups.with_async_op(AllgatherOptions),
    "_allgather_base_": torch_private_groups.with_async_op(AllgatherOptions),
    "allgather_into_tensor_coalesced_": torch_private_groups.with_async_op(AllgatherOptions),
    "reduce_scatter_": torch_private_groups.with_async_op(ReduceScatterOptions),
    "_reduce_scatter_base_": torch_private_groups.with_async_op(ReduceScatterOptions),
    "reduce_scatter_tensor_coalesced_": torch_private_groups.with_async_op(ReduceScatterOptions),
    "alltoall_": torch_private_groups.with_async_op(AllToAllOptions),
    "alltoall_base_": torch_private_groups.with_async_op(AllToAllOptions),
    "scatter_": torch_private_groups.with_async_op(ScatterOptions),
    "barrier": torch_private_groups.with_async_op(BarrierOptions),
    "send": None,
    "recv_": None,
    "recv_any_source_": None,
}
"""The class of torch's options for each operator of ``torch.ops.c10d``; None for sending and receiving."""

_RETURN_TENSORS: Final = (
    *("allreduce_", "broadcast_", "allgather_", "_allgather_base_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "alltoall_", "scatter_"),
)
"""The operators that return tensors (their first argument) in addition to the work."""

_FIELDS: Final = {
    "reduce_op": "reduceOp",
    "root_rank": "rootRank",
    "root_tensor": "rootTensor",
    "async_op": "asyncOp",
    "asyncOp": "asyncOp",  # the name in torch 2.6
    "timeout": "timeout",
    "device_ids": "device_ids",
}
"""For each option that operators take as an argument, the option's name in the options object of a method."""

_NO_DATA: Final = {*_FIELDS, "process_group", "sparse_indices"}


class _Current(threading.local):
    """The call of a process group's method that the current thread is making; calls may be nested."""

    call: "DispatchedCall | None" = None


_current: Final = _Current()


class DispatchedCall:
    """A call of a process group's method: torch's dispatcher passes the call to popdist's kernel, which stores the
    ``Work`` of the collective in this object.
    """

    def __init__(self, arguments: Sequence[object], may_move: MayMove | None = None) -> None:
        self.arguments = arguments
        self.options = arguments[-1] if arguments else None  # the caller's options, if any, need not be made again
        self.may_move = may_move
        self.work: Any = None  # set by the kernel, because the dispatcher's work lacks the Python methods
        self._outer: DispatchedCall | None = None

    def __enter__(self) -> Self:
        self._outer, _current.call = _current.call, self
        return self

    def __exit__(self, *_error: object) -> None:
        _current.call = self._outer


@cache
def install_kernels(device_key: str = "CPU") -> Any:
    """Register popdist's kernels of torch's collectives, for the CPU or an accelerator, once in a process."""
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the kernels that are replaced
        for name, options in _OPERATORS.items():
            kernel = torch_private.skip_tracing(_kernel(name, options))
            # torch's own kernels for Negative and Conjugate would write into a copy
            keys = ["CPU", "Negative", "Conjugate"] if device_key == "CPU" else [device_key]
            for key in [*keys, f"Sparse{device_key}"] if name == "allreduce_" and device_key == "CPU" else keys:
                library.impl(name, kernel, key)
    return library


def _kernel(name: str, options: Any) -> Callable[..., object]:
    names = torch_private_groups.arguments_of(name)  # the arguments depend on torch's version
    method = "recv_anysource" if name == "recv_any_source_" else name.removesuffix("_")

    def kernel(*arguments: Any) -> object:
        data, named = [], {}
        for argument, value in zip(names, arguments, strict=False):
            if argument in _NO_DATA:
                named[argument] = value
            else:
                data.append(value)
        group = dist.ProcessGroup.unbox(named["process_group"])
        calls = getattr(group, "message_calls" if options is None else "calls", None)
        if calls is None and torch_private.is_older_than(2, 11):
            return torch_private_groups.call_torchs_kernel(name, group, arguments)
        call = _current.call
        if options is None:
            opts: tuple[Any, ...] = ()
        elif call is not None and type(call.options) is options:
            opts = (call.options,)
        else:
            opts = (_options(options, named, call),)
        first = _first_tensor(data)
        if method == "barrier":
            data.clear()  # a tensor that only selects the backend
        is_ours = calls is not None
        if is_ours and first.device.type != "cpu" and getattr(group, "direct_device", None) is None:
            boxed = _call_over_host(calls, method, data, opts)
        elif is_ours and first.device.type == "cpu" and first.layout is torch.strided:
            boxed = _call_group(calls, method, data, opts, call)
        else:
            boxed = _call_backend(group._get_backend(first.device), method, data, opts)  # noqa: SLF001 - a backend of torch has this method
        return (arguments[0], boxed) if name in _RETURN_TENSORS else boxed

    return kernel


def _options(make: Any, named: dict[str, Any], call: DispatchedCall | None) -> Any:
    options = make()
    for name, field in _FIELDS.items():
        value = named.get(name)
        if value is None:
            continue
        if name == "reduce_op":
            value = torch_private_groups.reduce_op(value, None if call is None else call.arguments)
        elif name == "timeout":
            if value < 0:
                continue
            value = timedelta(milliseconds=value)
        setattr(options, field, value)
    return options


def _call_over_host(calls: Any, method: str, data: list[Any], opts: tuple[Any, ...]) -> Any:
    """Run a collective on CPU copies of accelerator tensors, which no backend sends; copy the results back."""
    copies: list[tuple[Tensor, Tensor]] = []

    def staged(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [staged(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        copies.append((value, value.cpu()))
        return copies[-1][1]

    boxed = _call_group(calls, method, staged(data), opts, None)
    dist.Work.unbox(boxed).wait()
    for tensor, copy in copies:
        tensor.copy_(copy)
    return boxed


def _call_group(
    calls: Any,
    method: str,
    data: list[Any],
    opts: tuple[Any, ...],
    call: DispatchedCall | None,
) -> Any:
    """Run popdist's collective ``method``; return its work boxed as a ScriptObject, as torch's operators return
    works. If ``call`` is given, put the work into ``call``, and return a finished placeholder instead.
    """
    if method == "scatter":
        return calls.scatter(*data, *opts).boxed()
    if call is None:  # if the operator was called directly, its work is torch's and cannot fail later
        for options in opts:
            options.asyncOp = False
        return getattr(calls, method)(*data, *opts).boxed()
    if method == "allreduce":
        call.work = calls.allreduce(data[0], opts[0], call.may_move)
    else:
        call.work = getattr(calls, method)(*data, *opts)
    return _placeholder()


@cache
def _placeholder() -> Any:
    return torch_private_groups.done_work([]).boxed()


def _call_backend(backend: Any, method: str, data: list[Any], opts: tuple[Any, ...]) -> Any:
    """Call ``method`` of torch's own backend; return its work (the object to wait for) as a ScriptObject, because
    torch's operators also return a work as a ScriptObject.
    """
    if method == "allgather_into_tensor_coalesced":  # torch has no Python binding of this and the next method
        rows = zip(*(output.chunk(backend.size()) for output in data[0]), strict=False)
        return backend.allgather_coalesced(list(map(list, rows)), data[1], *opts).boxed()
    if method == "reduce_scatter_tensor_coalesced":
        return scatter_reduced(backend, *data, *opts).boxed()
    return getattr(backend, method)(*data, *opts).boxed()


def _first_tensor(data: Sequence[Any]) -> Any:
    """Return the first tensor in ``data`` (tensors, nested lists of tensors, numbers); None without a tensor."""
    for value in data:
        tensor = _first_tensor(value) if isinstance(value, list | tuple) else value
        if isinstance(tensor, Tensor):
            return tensor
    return None
