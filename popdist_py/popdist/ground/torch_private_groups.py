"""All private names of torch.distributed that popdist uses, and names that differ between versions.

`popdist.ground.torch_private` says in which versions names were looked for, and what "without the name" means. All
of these versions have all names, except:

=====================================  ===============================================
name                                   seen in torch
=====================================  ===============================================
``c10d._shutdown_backend``             2.6; later torchs call ``ProcessGroup.shutdown``
``op`` of an operator's operation      2.11 and later
``asyncOp`` of all options             2.8 and later
methods in ``RENAMED_METHODS``         by their newer names 2.13, 2.15
=====================================  ===============================================
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, wraps
from types import FrameType
from typing import Any, Final, NoReturn, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ReduceOp, TCPStore, distributed_c10d  # type: ignore[attr-defined] # torch exports it all the same
from torch.distributed.distributed_c10d import Store
from torch.futures import Future

from popdist.ground.torch_private import caller_of, find, is_older_than, needs

F = TypeVar("F", bound=Callable[..., object])

_create_work_from_future: Final = find(find(torch._C, "_distributed_c10d"), "_create_work_from_future")


def done_work(results: list[Any]) -> Any:
    """Return a finished ``Work`` of torch with ``results``. Raises RuntimeError if this torch cannot do so."""
    if _create_work_from_future is None:
        raise RuntimeError(f"torch {torch.__version__} lacks _create_work_from_future: use the backend gloo")
    future: Future[list[Any]] = Future()
    future.set_result(results)  # never an error, which the wait() of torch's work would not raise
    return _create_work_from_future(future)


def arguments_of(operator: str) -> list[str]:
    """Return the argument names of the c10d operator ``operator``. Raises RuntimeError if torch lacks it."""
    schema = find(find(find(torch.ops.c10d, operator), "default"), "_schema")
    if schema is None:
        raise RuntimeError(f"torch {torch.__version__} lacks c10d::{operator}: use the backend gloo")
    return [argument.name for argument in schema.arguments]


def tcp_store(*where: Any, **named: Any) -> TCPStore:
    """Make a TCPStore; without libuv before torch 2.8, where libuv cannot use a socket that already listens."""
    named["use_libuv"] = not is_older_than(2, 8)
    return TCPStore(*where, **named)


RENAMED_METHODS: Final = {
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""Newer names of methods of process groups, with the names that torch used before 2.12."""


def with_async_op(options: Any) -> Any:
    """Return the class ``options``; if torch 2.6 lacks its field ``asyncOp``, a subclass that has the field."""
    return options if hasattr(options, "asyncOp") else type(options.__name__, (options,), {"asyncOp": True})


def reduce_op(boxed: Any, arguments: Sequence[object] | None) -> ReduceOp:
    """Return the reduction in ``boxed``, such as SUM; before torch 2.11, the reduction among ``arguments``."""
    if hasattr(boxed, "op"):
        return ReduceOp(ReduceOp.RedOpType(boxed.op()))
    if arguments is None:
        raise RuntimeError(f"{needs(2, 11, 'a c10d operator itself')}; call torch.distributed's function")
    candidates = [getattr(argument, "reduceOp", argument) for argument in arguments]
    op = next((it for it in candidates if isinstance(it, ReduceOp | ReduceOp.RedOpType)), ReduceOp.SUM)
    return op if isinstance(op, ReduceOp) else ReduceOp(op)


def call_torchs_kernel(operator: str, group: Any, arguments: Sequence[Any]) -> object:
    """Call torch's own kernel of ``operator`` for a ``group`` that is not popdist's; needed before torch 2.11."""
    device = torch.device("privateuseone")  # the device of torch's own kernel, which calls the registered backend
    gloo = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(device, gloo, group._get_backend(torch.device("cpu")))
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
    return getattr(torch.ops.c10d, operator).default.redispatch(keys, *arguments)


def reduce_scatter_of(backend: Any) -> Callable[..., Any]:
    """Return a function that reduces and scatters a tensor by any operation; old versions of gloo only add."""
    is_wrong = is_older_than(2, 11) and isinstance(backend, dist.ProcessGroupGloo)

    def call(output: Tensor, tensor: Tensor, opts: Any) -> Any:
        if not is_wrong or opts.reduceOp == ReduceOp.SUM:
            return backend._reduce_scatter_base(output, tensor, opts)
        whole, options = tensor.clone(), dist.AllreduceOptions()
        options.reduceOp, options.timeout = opts.reduceOp, opts.timeout
        backend.allreduce([whole], options).wait()
        output.copy_(whole.view(backend.size(), *output.shape)[backend.rank()])
        return done_work([output])

    return call


_shutdown_backend: Final = find(distributed_c10d, "_shutdown_backend")


def have_shut_down(kind: type[Any]) -> None:
    """Make ``destroy_process_group`` call ``shutdown()`` of groups of the class ``kind``, as newer torchs do."""
    if _shutdown_backend is not None:
        distributed_c10d._shutdown_backend = lambda group: (  # type: ignore[attr-defined]
            group.shutdown() if isinstance(group, kind) else _shutdown_backend(group)
        )


_set_unwrap_func: Final = find(Future, "_set_unwrap_func")


def set_failure(future: Any, value: object, reveal: Callable[[Any], NoReturn]) -> None:
    """Finish ``future`` so that ``wait()`` calls ``reveal(value)``, which raises; if this torch cannot do so,
    ``wait()`` returns ``value``.
    """
    if _set_unwrap_func is not None:
        _set_unwrap_func(future, reveal)
    future.set_result(value)


def keeps_works(function_frame: FrameType | None) -> bool:
    """Whether the caller of the frame's function keeps the Python object of the ``Work`` that it returns.

    Before torch 2.8, C++ callers do not keep the object, and then wait for ever. There, only torch.distributed
    counts as a caller in Python.
    """
    if not is_older_than(2, 8):
        return True
    caller = None if function_frame is None else caller_of(function_frame)
    return caller is not None and caller.f_globals is vars(distributed_c10d)


def connect_gloo(store: Store, rank: int, size: int, timeout: timedelta, address: str | None) -> Any:
    """Make a gloo group at ``address`` of this host; gloo chooses if None, or if torch lacks the option."""
    gloo: Any = dist.ProcessGroupGloo
    make_options = find(gloo, "_Options")
    options: Any = None if make_options is None else make_options()
    if address is None or not (hasattr(options, "_devices") and hasattr(options, "_timeout")):
        return gloo(store, rank, size, timeout)
    options._devices, options._timeout = [gloo.create_device(hostname=address)], timeout
    return gloo(store, rank, size, options)


def connect_direct(kind: Any, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a group of the class ``kind``, such as NCCL's, with ``timeout`` if the class has such an option."""
    options = kind.Options()
    if hasattr(options, "_timeout"):
        options._timeout = timeout
    return kind(store, rank, size, options)


_world: Final = find(distributed_c10d, "_world")


def num_collectives(apart_from: Collection[int] = ()) -> int:
    """Return how many collectives torch's groups have made, without the groups whose ranks are all in
    ``apart_from``. Return 0 if this torch does not show the number.
    """
    number, groups = 0, find(_world, "pg_map") or ()
    for group in groups:
        with suppress(RuntimeError):  # a backend that does not count collectives raises this error
            if not apart_from or set(dist.get_process_group_ranks(group)) - set(apart_from):
                number += int(group._get_sequence_number_for_group())
    return number


def gather_into(backend: Any, output: Tensor, tensor: Tensor) -> None:
    """Gather the flat ``tensor`` of all ranks of torch's own ``backend`` into the flat ``output``, and wait."""
    backend._allgather_base(output, tensor).wait()


def renamed(method: F, name: str) -> F:
    """Rename ``method`` to ``name``, by which torch's own method recognizes its caller and does not recurse."""
    method.__code__ = method.__code__.replace(co_name=name)
    method.__name__ = method.__qualname__ = name
    return method


@cache
def accept_monitored_barriers(kind: type[Any]) -> None:
    """Make ``torch.distributed.monitored_barrier``, which accepts only gloo, accept groups of class ``kind``."""
    torchs_own = distributed_c10d.monitored_barrier

    @wraps(torchs_own)
    def monitored_barrier(
        group: Any = None,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> None:
        chosen: Any = dist.group.WORLD if group is None else group
        if isinstance(chosen, kind):
            timeouts = {} if timeout is None else {"timeout": timeout}  # torch 2.6 takes no None
            chosen.monitored_barrier(**timeouts, wait_all_ranks=wait_all_ranks)
        else:
            torchs_own(group, timeout, wait_all_ranks)

    distributed_c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier
