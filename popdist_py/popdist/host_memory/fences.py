"""What keeps data and flags in order between processes, where the processor does not.

A rank writes its data, then its flag; a peer reads the flag, then the data. x86 lets others see stores in program
order and does loads in program order, so there nothing is needed. Weaker machines, such as those of ARM and POWER,
may let the flag be seen first. There every rank calls membarrier(2) between the two writes, and between the two
reads: the kernel promises a full memory barrier on every running thread of the processes that registered for it.
"""

import ctypes
import os
import platform
from collections.abc import Callable
from typing import Final

from popdist.errors import BackendError

_STORES_IN_ORDER: Final = frozenset({"x86_64", "AMD64", "i386", "i486", "i586", "i686"})

_SYSCALL_NUMBERS: Final = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365, "s390x": 356}
_GLOBAL_EXPEDITED: Final = 2
_REGISTER_GLOBAL_EXPEDITED: Final = 4

Fence = Callable[[], None]


def make_fence(machine: str | None = None) -> Fence | None:
    """What to call between data and flag; None where nothing is needed.

    Args:
        machine: The kind of processor, as `platform.machine` names it; None means this one.

    Raises:
        BackendError: If one is needed and the kernel has none.
    """
    name = platform.machine() if machine is None else machine
    return None if name in _STORES_IN_ORDER else membarrier()


def membarrier() -> Fence:
    """A full memory barrier on all running threads of all processes that have called this.

    Raises:
        BackendError: If the kernel has none.
    """
    number = _SYSCALL_NUMBERS.get(platform.machine())
    call = ctypes.CDLL(None, use_errno=True).syscall
    if number is None or call(number, _REGISTER_GLOBAL_EXPEDITED, 0, 0) != 0:
        raise BackendError(
            f"shared memory needs membarrier() on {platform.machine()}, and this kernel does not offer it: "
            f"{os.strerror(ctypes.get_errno())}"
        )

    def fence() -> None:
        if call(number, _GLOBAL_EXPEDITED, 0, 0) != 0:
            raise BackendError(f"membarrier() failed: {os.strerror(ctypes.get_errno())}")

    return fence
