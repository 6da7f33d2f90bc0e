"""The groups of torch's own that a group of popdist's holds, for what it does not do itself."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch.distributed.distributed_c10d import Store

_ProcessGroupGloo: Any = dist.ProcessGroupGloo  # torch's stubs lack its methods


class Gloo(_ProcessGroupGloo):  # type: ignore[misc] # as above
    """gloo, which torch takes for the whole group where it sets the group's timeout.

    Args:
        store: Where the ranks find each other; used by nobody else under its prefix.
        rank: This process.
        size: Ranks in the group.
        timeout: How long a lost or late rank is waited for.
        tell: Hears of every other timeout, in seconds.
    """

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
