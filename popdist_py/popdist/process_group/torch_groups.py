"""The process groups of torch's own, gloo and NCCL, which do what a group of popdist's does not do itself.

A group written in Python must never be traced. In a compiled DistributedDataParallel, C++ calls the group in the
middle of what is being traced; a Python method would be traced as a frame of its own, and that fails.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._dynamo import eval_frame
from torch.distributed.distributed_c10d import PrefixStore, Store

from popdist.process_group.work_queue import DONE

_SKIP: Final = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)  # noqa: SLF001 - what torch.compiler.disable() does, without the seconds that importing the compiler takes

C = TypeVar("C", bound=type)


def never_traced(cls: C) -> C:
    """A decorator: the compiler runs the class's own methods, and what they call, as they are."""
    for method in vars(cls).values():
        if isinstance(method, FunctionType):
            eval_frame.set_code_exec_strategy(method.__code__, _SKIP)
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
    """gloo, which torch takes for the whole group where it sets the group's timeout."""

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, tell: Callable[[float], None]
    ) -> None:
        super().__init__(store, rank, size, timeout)
        self._tell = tell

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
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, tell: Callable[[float], None]
    ) -> None:
        super().__init__(rank, size)
        self._store = store
        self._gloo = Gloo(PrefixStore("gloo", store), rank, size, timeout, tell)
        self._register_backend(_CPU, _GLOO, self._gloo)
        self._set_default_backend(_GLOO)
        if torch.cuda.is_available() and dist.is_nccl_available():
            self._register_backend(_CUDA, _NCCL, make_nccl(PrefixStore("nccl", store), rank, size, timeout))

    def get_group_store(self) -> Store:
        """The store in which the ranks found each other."""
        return self._store

    def beneath(self, *tensors: Tensor) -> Any:  # noqa: ANN401 - torch's stubs lack its methods
        """The group of torch's own for the device of these tensors."""
        return self._get_backend(tensors[0].device if tensors else _CPU)

    def one_by_one(self, call: str, outputs: Tensors, inputs: Tensors, opts: object) -> Work:
        """Make ``call`` of torch's own group for each of ``outputs`` and ``inputs``."""
        do = getattr(self.beneath(*outputs), call)
        works = [do(output, tensor, opts) for output, tensor in zip(outputs, inputs, strict=True)]
        for work in works[:-1]:
            work.wait()
        return works[-1] if works else DONE

    def send(self, tensors: Tensors, destination: int, tag: int) -> Work:
        """Give one tensor to one rank."""
        return self.beneath(*tensors).send(tensors, destination, tag)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work:
        """Take one tensor from one rank."""
        return self.beneath(*tensors).recv(tensors, source, tag)
