"""Which tensors may be moved into memory that all ranks of a host map, where their next sums copy nothing.

By itself a group moves DistributedDataParallel's buckets only. They are the tensors that torch's reducer brings:
C++ calls the group while autograd runs, with no Python between. Nobody but the reducer knows where they lie.

With ``POPDIST_SHARE_TENSORS=1`` it also moves others that come again, unless something shows that their addresses
are known elsewhere: a parameter or buffer of a module, or an operation that goes on meanwhile.
"""

import gc
import sys
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.multiprocessing.reductions import StorageWeakRef

from popdist.host_memory.offers import LEAST_BYTES, MayMove
from popdist.host_memory.shared_storages import key_of
from popdist.process_group.work_queue import are_all_idle

_RUN_BACKWARD: Final = graph._engine_run_backward.__code__  # noqa: SLF001 - the frame in which autograd runs
_graph_task: Final[Callable[[], int]] = torch._C._current_graph_task_id  # noqa: SLF001 - there is no other way to ask

_MOST_KEPT: Final = 1 << 10


class MovableTensors:
    """The tensors of one group that may be moved.

    Args:
        is_wanted: True for all that can be, None for DistributedDataParallel's buckets, False for none.
    """

    def __init__(self, *, is_wanted: bool | None) -> None:
        self._is_wanted = is_wanted
        self._kept: dict[int, StorageWeakRef] = {}

    def of_this_call(self, *, is_async: bool) -> MayMove | None:
        """What to ask whether a tensor may be moved that the caller's caller brings, when it comes again."""
        if self._is_wanted is False:
            return None
        if _graph_task() >= 0 and _is_called_by_reducer():
            return _always
        return self._is_free if self._is_wanted and not is_async else None

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Move none of these ever: their addresses are handed on."""
        if not self._is_wanted:
            return
        if len(self._kept) >= _MOST_KEPT:
            self._kept = {key: kept for key, kept in self._kept.items() if not kept.expired()}
        for tensor in tensors:
            if tensor.is_cpu and tensor.nbytes >= LEAST_BYTES:
                storage = tensor.untyped_storage()
                self._kept[key_of(storage)] = StorageWeakRef(storage)

    def _is_free(self, tensor: Tensor) -> bool:
        key = key_of(tensor.untyped_storage())
        return key not in self._kept and are_all_idle() and key not in _in_modules()


def _always(_tensor: Tensor) -> bool:
    return True


def _is_called_by_reducer() -> bool:
    try:
        return sys._getframe(3).f_code is _RUN_BACKWARD  # noqa: SLF001 - there is no other way to ask
    except ValueError:  # there is no Python at all: a thread of autograd's own
        return True


def _in_modules() -> set[int]:
    """Torch's objects of the memory of all parameters, and of all modules' buffers."""
    found: set[int] = set()
    are_holders: dict[type, bool] = {}
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in are_holders:
            are_holders[kind] = issubclass(kind, nn.Module | nn.Parameter)
        if not are_holders[kind]:
            continue
        held = vars(thing)
        tensors = [thing, *held.get("_parameters", {}).values(), *held.get("_buffers", {}).values()]
        found |= {_key_of(it) for it in tensors if isinstance(it, Tensor)}
    return found


def _key_of(tensor: Tensor) -> int:
    try:
        return key_of(tensor.untyped_storage())
    except Exception:  # noqa: BLE001 - a sparse one or a lazy parameter has no such memory, and says so in many ways
        return 0
