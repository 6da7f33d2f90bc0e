"""The process groups of torch's own, gloo and NCCL, which do what a group of popdist's does not do itself.

A group written in Python must never be traced. In a compiled DistributedDataParallel, C++ calls the group in the
middle of what is being traced; a Python method would be traced as a frame of its own, and that fails.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._dynamo import eval_frame
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from popdist.host_memory.forks import never_destroy_in_children
from popdist.process_group.group_calls import GroupCalls

if TYPE_CHECKING:
    from popdist.host_memory.shared_storages import StoragePool

_SKIP: Final = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)  # noqa: SLF001 - what torch.compiler.disable() does, without the seconds that importing the compiler takes

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., object])


def skip_tracing(function: F) -> F:
    """A decorator: the compiler runs the function, and what it calls, as it is."""
    eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    return function


def never_traced(cls: C) -> C:
    """A decorator: the compiler runs the class's own methods, and what they call, as they are."""
    for method in vars(cls).values():
        if isinstance(method, FunctionType):
            skip_tracing(method)
    return cls


_CPU: Final = torch.device("cpu")
_CUDA: Final = torch.device("cuda")
_GLOO: Final = dist.ProcessGroup.BackendType.GLOO
_NCCL: Final = dist.ProcessGroup.BackendType.NCCL

_ProcessGroupGloo: Any = dist.ProcessGroupGloo  # torch's stubs lack its methods
_ProcessGroup: Any = dist.ProcessGroup  # with torch's own stubs, no two of its calling forms fit one method

Tensors = Sequence[Tensor]
Work = Any  # dist.Work, of which torch's stubs do not say that its groups return it


class Gloo(_ProcessGroupGloo):  # type: ignore[misc] # as above
    """gloo, which torch takes for the whole group: where it sets the group's timeout, and where it makes tensors.

    Attributes:
        pool: Memory for the tensors that the group makes for its collectives; None where it makes none.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, tell: Callable[[float], None]
    ) -> None:
        super().__init__(store, rank, size, timeout)
        self._tell = tell
        self.pool: StoragePool | None = None

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether the group makes tensors on this device that its collectives need not copy."""
        return self.pool is not None and device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor of ``size`` numbers in memory that all ranks can map; what they are is left open."""
        made = torch.empty(0, dtype=dtype, device=device)
        if self.pool is None or not self.supports_tensor_alloc(device) or not size:
            return made.new_empty(size)
        return made.set_(self.pool.take(size * made.element_size()), 0, (size,), (1,))

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)
        self._tell(timeout.total_seconds())


def make_nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Any:  # noqa: ANN401 - no class without CUDA
    """NCCL, for tensors on CUDA devices; as :class:`Gloo`."""
    chosen = dist.ProcessGroupNCCL.Options()
    chosen._timeout = timeout  # noqa: SLF001 - the only way to set it
    return dist.ProcessGroupNCCL(store, rank, size, chosen)


@never_traced
class TorchGroups(_ProcessGroup):  # type: ignore[misc] # as above
    """A process group that has gloo beneath it and, where there is CUDA, NCCL.

    What it hands on to them it hands on itself. On torch's way there, through a group that is written in Python,
    the call holds the interpreter's lock and waits for a lock of gloo's; a thread of gloo's may hold that one and
    wait for the interpreter's, to let go of a tensor. And NCCL may be waiting for another rank.

    Attributes:
        calls: The group's own collectives, over plain CPU tensors.
    """

    calls: GroupCalls

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, tell: Callable[[float], None]
    ) -> None:
        super().__init__(rank, size)
        self._store = store
        self._gloo = Gloo(PrefixStore("gloo", store), rank, size, timeout, tell)
        self._gloo._set_sequence_number_for_group()  # noqa: SLF001 - torch's name for it
        self._register_backend(_CPU, _GLOO, self._gloo)
        self._set_default_backend(_GLOO)
        if torch.cuda.is_available() and dist.is_nccl_available():
            nccl = make_nccl(PrefixStore("nccl", store), rank, size, timeout)
            self._register_backend(_CUDA, _NCCL, nccl)
            never_destroy_in_children(nccl)
        never_destroy_in_children(self, self._gloo, store)

    def get_group_store(self) -> Store:
        """The store in which the ranks found each other."""
        return self._store

    def beneath(self, tensors: Tensors) -> Any:  # noqa: ANN401 - torch's stubs lack its methods
        """The group of torch's own for the device of these tensors."""
        return self._get_backend(tensors[0].device)


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
        chosen = distributed_c10d._get_default_group() if group is None else group  # noqa: SLF001 - as torch's
        if isinstance(chosen, TorchGroups):
            chosen.monitored_barrier(timeout, wait_all_ranks)
        else:
            torchs_own(group, timeout, wait_all_ranks)

    distributed_c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier
