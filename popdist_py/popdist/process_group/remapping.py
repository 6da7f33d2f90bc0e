"""Which storages may be remapped into memory that all ranks of a host share, where their next sums copy nothing.

By itself a group remaps DistributedDataParallel's buckets only. They are the tensors that torch's reducer brings:
autograd's engine calls the group from C++, with no Python between. Nobody but the reducer knows where they lie.
The first time, this torch is tried out (`popdist.torch_private.is_caller_the_engine`); one that behaves in another
way has its buckets copied.

With ``POPDIST_SHARE_TENSORS=1`` a group also remaps others that come again, parameters included: not what was sent
to other ranks, or what torch knows to have an owner elsewhere, as numpy's; and nothing while another operation
goes on.
"""

from collections.abc import Sequence
from types import FrameType
from typing import Final

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from popdist import torch_private
from popdist.host_memory.in_place import LEAST_BYTES, MayMove
from popdist.process_group.work_queue import are_all_idle

_MOST_KEPT: Final = 1 << 10


class RemappableStorages:
    """The storages of one group that may be remapped.

    ``is_wanted`` is True for all that can be, None for DistributedDataParallel's buckets, False for none.
    """

    def __init__(self, *, is_wanted: bool | None) -> None:
        self._is_wanted = is_wanted
        self._kept: set[StorageWeakRef] = set()

    def of_call(self, method_frame: FrameType | None, *, is_async: bool) -> MayMove | None:
        """What to ask whether a tensor may be moved that a call brings; ``method_frame`` is the group's method."""
        if self._is_wanted is False:
            return None
        if torch_private.is_caller_the_engine(method_frame):
            return _is_flat
        return self._is_free if self._is_wanted and not is_async else None

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Remap none of these ever: their addresses are handed on."""
        if not self._is_wanted:
            return
        if len(self._kept) >= _MOST_KEPT:
            self._kept = {kept for kept in self._kept if not kept.expired()}
        self._kept |= {
            StorageWeakRef(tensor.untyped_storage())
            for tensor in tensors
            if tensor.is_cpu and tensor.nbytes >= LEAST_BYTES
        }

    def _is_free(self, tensor: Tensor) -> bool:
        is_kept = StorageWeakRef(tensor.untyped_storage()) in self._kept
        return not is_kept and are_all_idle()


def _is_flat(tensor: Tensor) -> bool:
    """As buckets are; a gradient that a hook written in C++ brings mostly is not."""
    return tensor.dim() == 1
