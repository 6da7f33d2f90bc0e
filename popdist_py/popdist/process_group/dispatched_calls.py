"""Collectives that somebody looks at: torch's dispatcher is shown them, as it is shown those of gloo.

``make_fx``, FakeTensorMode, TorchDispatchMode, CommDebugMode and the profiler see a collective as an operator such
as ``c10d::allreduce_``. A group written in Python is called past the dispatcher, which is faster; where somebody
looks, or a tensor is more than numbers in this computer's memory, it calls torch's own method, which calls the
operator. torch's kernel of that operator for the CPU runs the gloo group beneath, and a rank that looks would not
meet those that do not. So the operators have kernels for the CPU here, which call a group's own collectives; other
groups' calls go to the backends of those, as torch's kernels do.
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch._C import _distributed_c10d
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
from torch.autograd import profiler
from torch.distributed import ProcessGroup
from torch.futures import collect_all

from popdist.process_group.group_calls import all_of, by_rank, one_by_one
from popdist.process_group.torch_groups import TorchGroups, skip_tracing

_CALLS: Final[dict[str, tuple[str, Any]]] = {
    "allreduce_": ("allreduce", AllreduceOptions),
    "allreduce_coalesced_": ("allreduce_coalesced", AllreduceCoalescedOptions),
    "broadcast_": ("broadcast", BroadcastOptions),
    "reduce_": ("reduce", ReduceOptions),
    "allgather_": ("allgather", AllgatherOptions),
    "allgather_coalesced_": ("allgather_coalesced", AllgatherOptions),
    "_allgather_base_": ("_allgather_base", AllgatherOptions),
    "allgather_into_tensor_coalesced_": ("allgather_into_tensor_coalesced", AllgatherOptions),
    "reduce_scatter_": ("reduce_scatter", ReduceScatterOptions),
    "_reduce_scatter_base_": ("_reduce_scatter_base", ReduceScatterOptions),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor_coalesced", ReduceScatterOptions),
    "alltoall_": ("alltoall", AllToAllOptions),
    "alltoall_base_": ("alltoall_base", AllToAllOptions),
    "barrier": ("barrier", BarrierOptions),
}
"""Of each operator: the method of a backend for it, and the class of its options."""

_FIELDS: Final = {
    "reduce_op": "reduceOp",
    "root_rank": "rootRank",
    "root_tensor": "rootTensor",
    "async_op": "asyncOp",
    "timeout": "timeout",
    "device_ids": "device_ids",
}
"""Arguments of the operators that stand in the options of a method."""

_NO_DATA: Final = {*_FIELDS, "process_group", "sparse_indices"}

num_modes: Final[Callable[[], int]] = torch._C._len_torch_dispatch_stack  # noqa: SLF001 - there is no other way to ask
_work_of: Final[Any] = _distributed_c10d._create_work_from_future  # type: ignore[attr-defined] # noqa: SLF001 - torch's stubs lack it
_keys_of: Final = torch._C._dispatch_keys  # noqa: SLF001 - as above


def is_watched() -> bool:
    """Whether somebody looks at what this thread calls: a mode of torch's dispatcher, or the profiler."""
    return num_modes() > 0 or profiler._is_profiler_enabled  # noqa: SLF001 - there is no other way to ask


def _plain_keys() -> frozenset[int]:
    with torch.inference_mode():
        inferred = torch.empty(0, dtype=torch.float32)
    plain = [torch.empty(0, dtype=torch.float32), inferred]
    return frozenset(_keys_of(kind).raw_repr() for tensor in plain for kind in (tensor, tensor._neg_view()))  # noqa: SLF001 - there is no other way to make one


_PLAIN: Final = _plain_keys()


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether there are tensors, and all are numbers in this computer's memory, and nothing more than that.

    Those on other devices, sparse ones, fake ones, and those within a transformation such as ``vmap`` are not.
    """
    return _have_keys(tensors, _PLAIN)


_SPARSE: Final = frozenset({_keys_of(torch.zeros(1, dtype=torch.float32).to_sparse()).raw_repr()})


def are_sparse(tensors: Sequence[Tensor]) -> bool:
    """Whether there are tensors, and all are sparse ones in this computer's memory, and nothing more than that."""
    return _have_keys(tensors, _SPARSE)


def _have_keys(tensors: Sequence[Tensor], keys: frozenset[int]) -> bool:
    try:
        for tensor in tensors:
            if _keys_of(tensor).raw_repr() not in keys:
                return False
        return len(tensors) > 0
    except TypeError:  # something is no tensor; torch says so in its own words
        return False


class Shown(threading.local):
    """A call of a thread that is shown to the dispatcher; calls may lie within calls."""

    current: "Showing | None" = None


_shown: Final = Shown()


class Showing:
    """The work of a call that is shown: with ``with``, the one that the kernel here made, if it came to that.

    A work that has gone through the dispatcher has lost its methods in Python.
    """

    def __init__(self) -> None:
        self.work: Any = None
        self._before: Showing | None = None

    def __enter__(self) -> Self:
        self._before, _shown.current = _shown.current, self
        return self

    def __exit__(self, *_error: object) -> None:
        _shown.current = self._before

    def __call__(self, work: Any) -> Any:  # noqa: ANN401 - dist.Work
        """The work to hand back, where torch hands back ``work``."""
        return work if self.work is None else self.work


@cache
def install_kernels() -> Any:  # noqa: ANN401 - torch's library, which must be kept
    """Set the kernels, once in a process."""
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the kernels that are replaced
        for name, (method, make) in _CALLS.items():
            library.impl(name, _kernel(getattr(torch.ops.c10d, name).default, method, make), "CPU")
    return library


def _kernel(operator: Any, method: str, make: Any) -> Callable[..., object]:  # noqa: ANN401 - of torch's many classes
    """The kernel of an operator, which calls ``method`` with options made by ``make``."""
    names = [argument.name for argument in operator._schema.arguments]  # noqa: SLF001 - there is no other way to ask
    returns_tensors = len(operator._schema.returns) > 1  # noqa: SLF001 - as above

    def kernel(*arguments: Any) -> object:  # noqa: ANN401 - as the operator's schema says
        given = dict(zip(names, arguments, strict=False))
        data = [value for name, value in given.items() if name not in _NO_DATA]
        group = ProcessGroup.unbox(given["process_group"])
        boxed = _call(group, method, data, _options(make, given))
        return (arguments[0], boxed) if returns_tensors else boxed

    return skip_tracing(kernel)


def _options(make: Any, given: dict[str, Any]) -> Any:  # noqa: ANN401 - of torch's many classes
    made = make()
    for name, field in _FIELDS.items():
        value = given.get(name)
        if name == "reduce_op" and value is not None:
            value = ReduceOp(ReduceOp.RedOpType(value.op()))
        elif name == "timeout":
            value = None if value is None or value < 0 else timedelta(milliseconds=value)
        if value is not None:
            setattr(made, field, value)
    return made


def _call(group: ProcessGroup, method: str, data: list[Any], opts: Any) -> Any:  # noqa: ANN401 - as torch's
    """Call a method of the group's own, or of its backend's; its work, as operators return it."""
    tensors = flat(data)
    if isinstance(group, TorchGroups) and are_plain(tensors):
        if method == "barrier":
            data = []
        work = getattr(group.calls, method)(*data, opts)
        if _shown.current is not None:
            _shown.current.work = work
        return _work_of(work.get_future()).boxed()
    backend: Any = group._get_backend(tensors[0].device)  # noqa: SLF001 - torch's name for it
    if method == "allgather_into_tensor_coalesced":  # torch has not bound this method, and the next one
        return _gather_one_by_one(backend, data, opts).boxed()
    if method == "reduce_scatter_tensor_coalesced":
        return all_of(one_by_one(backend._reduce_scatter_base, data[0], data[1], opts)).boxed()  # noqa: SLF001 - torch's name for it
    return getattr(backend, method)(*([] if method == "barrier" else data), opts).boxed()


def _gather_one_by_one(backend: Any, data: list[Any], opts: Any) -> Any:  # noqa: ANN401 - as torch's
    works = one_by_one(backend._allgather_base, data[0], data[1], opts)  # noqa: SLF001 - torch's name for it
    gathered = collect_all([work.get_future() for work in works])
    return _work_of(gathered.then(lambda done: by_rank(part.value() for part in done.value())))


def flat(data: Sequence[Any]) -> list[Tensor]:
    """The tensors of arguments that are tensors, lists of tensors, or lists of lists; numbers are left out."""
    found: list[Tensor] = []
    for value in data:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += flat(value)
    return found
