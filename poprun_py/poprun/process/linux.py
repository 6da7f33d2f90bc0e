"""Calls of Linux that Python does not offer: two of prctl(2), and set_mempolicy(2)."""

import errno
import os
from collections.abc import Collection

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MPOL_BIND = 2
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""The number of the call, for which the C library has no function (asm/unistd_64.h, asm-generic/unistd.h)."""


def become_subreaper() -> None:
    """Adopt every descendant whose own parent dies, so that none escapes by losing its parent."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signum: int) -> None:
    """Have the kernel send ``signum`` to this process when the *thread* that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def take_memory_from(nodes: Collection[int]) -> None:
    """Have the kernel take this process's memory from these NUMA nodes only; what it starts inherits that.

    Raises:
        OSError: If a node is not to be had, or the call is forbidden, as it is in many containers.
    """
    import ctypes  # noqa: PLC0415 - only what is bound to a node needs it

    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    mask = sum(1 << node for node in nodes).to_bytes(8 * (max(nodes) // 64 + 1), "little")
    c_library = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than it is told to.
    if c_library.syscall(number, _MPOL_BIND, mask, ctypes.c_ulong(8 * len(mask) + 1)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _prctl(option: int, argument: int) -> None:
    # Of ctypes the part that calls functions: the rest of it takes longer to load than a shim to start.
    try:
        from _ctypes import call_function, dlopen, dlsym  # noqa: PLC0415 - what forks shims needs it, a plan does not
    except ImportError:
        import ctypes  # noqa: PLC0415 - another Python than CPython

        ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)
    else:
        this_program = dlopen(None, os.RTLD_NOW)  # type: ignore[arg-type] # dlopen(3) takes no name for it
        call_function(dlsym(this_program, "prctl"), (option, argument, 0, 0, 0))
