"""torch's operators for collectives, such as ``c10d::allreduce_``: the one way to this backend's collectives.

Every call of a group goes through torch's dispatcher, so ``make_fx``, FakeTensorMode, TorchDispatchMode,
CommDebugMode and the profiler see it as they see gloo's. For tensors on the CPU the operators have kernels here.
They call the collectives of the group if it is one of popdist's; other groups' calls go to the backends of those,
as with torch's own kernels. Those would run the gloo group beneath a group of popdist's, and would hold Python's
lock while gloo waits for a thread that wants it.
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
)
from torch.distributed import ProcessGroup
from torch.futures import Future, collect_all

from popdist import torch_private
from popdist.host_memory.in_place import MayMove
from popdist.process_group.group_calls import GroupCalls, all_of, by_rank, one_by_one


class _Operator(NamedTuple):
    """A collective's operator: the method of a backend for it, and the names of its arguments.

    Arguments called ``data`` are the method's own; the others stand in its options.
    """

    method: str
    options: Any
    arguments: str


_RETURN_TENSORS: Final = (
    *("allreduce_", "broadcast_", "allgather_", "_allgather_base_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "alltoall_"),
)
"""Operators that return their first tensors, too."""

_OPERATORS: Final = {
    "allreduce_": _Operator("allreduce", AllreduceOptions, "data group reduce_op sparse async_op timeout"),
    "allreduce_coalesced_": _Operator(
        "allreduce_coalesced", AllreduceCoalescedOptions, "data group reduce_op async_op timeout"
    ),
    "broadcast_": _Operator("broadcast", BroadcastOptions, "data group root root_tensor async_op timeout"),
    "reduce_": _Operator("reduce", ReduceOptions, "data group reduce_op root root_tensor async_op timeout"),
    "allgather_": _Operator("allgather", AllgatherOptions, "data data group async_op timeout"),
    "allgather_coalesced_": _Operator("allgather_coalesced", AllgatherOptions, "data data group async_op"),
    "_allgather_base_": _Operator("_allgather_base", AllgatherOptions, "data data group async_op timeout"),
    "allgather_into_tensor_coalesced_": _Operator(
        "allgather_into_tensor_coalesced", AllgatherOptions, "data data group async_op"
    ),
    "reduce_scatter_": _Operator(
        "reduce_scatter", ReduceScatterOptions, "data data group reduce_op async_op timeout"
    ),
    "_reduce_scatter_base_": _Operator(
        "_reduce_scatter_base", ReduceScatterOptions, "data data group reduce_op async_op timeout"
    ),
    "reduce_scatter_tensor_coalesced_": _Operator(
        "reduce_scatter_tensor_coalesced", ReduceScatterOptions, "data data group reduce_op async_op timeout"
    ),
    "alltoall_": _Operator("alltoall", AllToAllOptions, "data data group async_op timeout"),
    "alltoall_base_": _Operator("alltoall_base", AllToAllOptions, "data data group data data async_op timeout"),
    "barrier": _Operator("barrier", BarrierOptions, "device group device_ids async_op timeout"),
    "send": _Operator("send", None, "data group data data"),
    "recv_": _Operator("recv", None, "data group data data"),
}

_FIELDS: Final = {
    "reduce_op": "reduceOp",
    "root": "rootRank",
    "root_tensor": "rootTensor",
    "async_op": "asyncOp",
    "timeout": "timeout",
    "device_ids": "device_ids",
}
"""Arguments of the operators that stand in the options of a method."""


class _Current(threading.local):
    """The call of a group's method that a thread makes; calls may lie within calls."""

    call: "DispatchedCall | None" = None


_current: Final = _Current()


class DispatchedCall:
    """A call of a group's method on its way through the dispatcher, from ``with`` to the kernel here.

    A work that has gone through the dispatcher has lost its methods in Python, so the kernel leaves its own here;
    what the operator returns then is a placeholder. Options that the caller has made need not be made again.
    """

    def __init__(self, arguments: Sequence[object], may_move: MayMove | None = None) -> None:
        self.options = arguments[-1] if arguments else None
        self.may_move = may_move
        self.work: Any = None
        self._outer: DispatchedCall | None = None

    def __enter__(self) -> Self:
        self._outer, _current.call = _current.call, self
        return self

    def __exit__(self, *_error: object) -> None:
        _current.call = self._outer


@cache
def install_kernels() -> Any:  # noqa: ANN401 - torch's library, which must be kept
    """Set the kernels, once in a process."""
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the kernels that are replaced
        for name, operator in _OPERATORS.items():
            kernel = torch_private.skip_tracing(_kernel(name, operator))
            for key in ("CPU", "Negative"):  # torch's kernel for Negative would write into a copy
                library.impl(name, kernel, key)
        library.impl(
            "allreduce_", torch_private.skip_tracing(_kernel("allreduce_", _OPERATORS["allreduce_"])), "SparseCPU"
        )
    return library


def _kernel(name: str, operator: _Operator) -> Callable[..., object]:
    names = operator.arguments.split()

    def kernel(*arguments: Any) -> object:  # noqa: ANN401 - as the operator's schema says
        data, given = [], {}
        for argument, value in zip(names, arguments, strict=False):
            if argument == "data":
                data.append(value)
            else:
                given[argument] = value
        group = ProcessGroup.unbox(given["group"])
        call = _current.call
        if operator.options is None:
            opts: tuple[Any, ...] = ()
        elif call is not None and type(call.options) is operator.options:
            opts = (call.options,)
        else:
            opts = (_options(operator.options, given),)
        tensors = [given["device"]] if operator.method == "barrier" else flat(data)
        calls: GroupCalls | None = getattr(group, "calls", None)
        if calls is not None and tensors and tensors[0].layout is torch.strided:
            boxed = _call_group(calls, operator.method, data, opts, call)
        else:
            boxed = _call_backend(group._get_backend(tensors[0].device), operator.method, data, opts)  # noqa: SLF001 - torch's name for it
        return (arguments[0], boxed) if name in _RETURN_TENSORS else boxed

    return kernel


def _options(make: Any, given: dict[str, Any]) -> Any:  # noqa: ANN401 - of torch's many classes
    made = make()
    for name, field in _FIELDS.items():
        value = given.get(name)
        if value is None:
            continue
        if name == "reduce_op":
            value = ReduceOp(ReduceOp.RedOpType(value.op()))
        elif name == "timeout":
            if value < 0:
                continue
            value = timedelta(milliseconds=value)
        setattr(made, field, value)
    return made


def _call_group(
    calls: GroupCalls,
    method: str,
    data: list[Any],
    opts: tuple[Any, ...],
    call: DispatchedCall | None,
) -> Any:  # noqa: ANN401 - as torch's
    """Do a collective of popdist's; its work, as operators return it."""
    if method in ("send", "recv"):
        return getattr(calls, method)(*data).boxed()
    if method == "allreduce":
        work = calls.allreduce(data[0], opts[0], None if call is None else call.may_move)
    else:
        work = getattr(calls, method)(*data, *opts)
    if call is not None:
        call.work = work
        return _placeholder()
    return torch_private.work_of(work.get_future()).boxed()


@cache
def _placeholder() -> Any:  # noqa: ANN401 - as torch's
    done = Future[list[Tensor]]()
    done.set_result([])
    return torch_private.work_of(done).boxed()


def _call_backend(backend: Any, method: str, data: list[Any], opts: tuple[Any, ...]) -> Any:  # noqa: ANN401 - as torch's
    """Call a backend of torch's own; its work, as operators return it."""
    if method == "allgather_into_tensor_coalesced":  # torch has not bound this method, and the next one
        works = one_by_one(backend._allgather_base, *data, *opts)  # noqa: SLF001 - torch's name for it
        gathered = collect_all([work.get_future() for work in works])
        parts = gathered.then(lambda done: by_rank(part.value() for part in done.value()))
        return torch_private.work_of(parts).boxed()
    if method == "reduce_scatter_tensor_coalesced":
        return all_of(one_by_one(backend._reduce_scatter_base, *data, *opts)).boxed()  # noqa: SLF001 - torch's name for it
    return getattr(backend, method)(*data, *opts).boxed()


def flat(data: Sequence[Any]) -> list[Tensor]:
    """The tensors of arguments that are tensors, lists of tensors, or lists of lists; numbers are left out."""
    found: list[Tensor] = []
    for value in data:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += flat(value)
    return found
