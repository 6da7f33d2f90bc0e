"""The signal at which a Python program writes the stacks of its threads behind its progress page.

`popdist` or the start-up hook (``startup/sitecustomize.py``) registers the signal. The hook loads this file by its
path into the Python of the program: so it is written for Python 3.8 and imports almost nothing. The handler is
faulthandler's, in C, and answers even if the program is blocked in C.
"""

from __future__ import annotations

import faulthandler
import os
import sys

PAGE_NAME = "poprun-progress"
"""The name of the progress page's file; a descriptor that was reused for another file has another name."""

_PID_AT, _PID_BYTES = 8, 8
_SIGNAL_AT, _SIGNAL_BYTES = 16, 4
"""The places on the progress page of the process ID and of the signal, as in `popdist.ground.progress`."""

_TRAINED_ALONE_AT = 23
"""The place on the progress page of the flag that the process has trained without other processes."""

RECORDER_AT, RECORDER_BYTES = 264, 4
"""The place on the progress page of the descriptor for the recorder of torch's collectives."""

_USES_JAX_AT = 268
"""The place on the progress page of the flag that JAX has read its job."""

_FIRST, _LAST = 40, 63
"""The real-time signals (signal(7)) that no C library uses itself."""


def is_page(descriptor: int) -> bool:
    """Whether ``descriptor`` belongs to a progress page, the memory that poprun reads."""
    try:
        return PAGE_NAME in os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return False


def announced_pid(descriptor: int) -> int:
    """Return the process ID that a program has written on its progress page (memory that poprun reads); 0 if there
    is none.
    """
    return int.from_bytes(os.pread(descriptor, _PID_BYTES, _PID_AT), sys.byteorder)


def is_alive(pid: int) -> bool:
    """Whether a process with the ID ``pid`` exists."""
    return os.path.exists(f"/proc/{pid}")


def announce(descriptor: int, signum: int) -> None:
    """Clear the progress page (memory that poprun reads), and write this process's ID on the page, and the signal
    at which this process writes its stacks.
    """
    os.pwrite(descriptor, bytes(os.sysconf("SC_PAGE_SIZE")), 0)
    os.pwrite(descriptor, signum.to_bytes(_SIGNAL_BYTES, sys.byteorder), _SIGNAL_AT)
    os.pwrite(descriptor, os.getpid().to_bytes(_PID_BYTES, sys.byteorder), _PID_AT)


def announce_lone_training(descriptor: int) -> None:
    """Report to poprun, in memory that poprun reads, that this process has trained without other processes."""
    os.pwrite(descriptor, b"\1", _TRAINED_ALONE_AT)


def announce_recorder(descriptor: int, recorder: int) -> None:
    """Write for poprun, in memory that poprun reads, the descriptor for asking torch's recorder of collectives."""
    os.pwrite(descriptor, recorder.to_bytes(RECORDER_BYTES, sys.byteorder), RECORDER_AT)


def announce_jax(descriptor: int) -> None:
    """Report to poprun, in memory that poprun reads, that JAX has read the environment variables of its job."""
    os.pwrite(descriptor, b"\1", _USES_JAX_AT)


def register(descriptor: int) -> int:
    """Make a free signal write this process's stacks to ``descriptor``; return the signal, 0 if none is free."""
    signum = _free_signal()
    if signum:
        faulthandler.register(signum, file=descriptor, all_threads=True, chain=False)
    return signum


def watch_crashes(descriptor: int) -> None:
    """Make Python write its stacks to memory that poprun reads, if a crash such as SIGSEGV ends the process."""
    if not faulthandler.is_enabled():
        os.lseek(descriptor, os.sysconf("SC_PAGE_SIZE"), os.SEEK_SET)
        faulthandler.enable(file=descriptor)


def catches(signum: int) -> bool:
    """Whether this process has a handler for the signal ``signum``; False for 0."""
    return bool(signum) and bool(_masks(b"SigCgt:") >> (signum - 1) & 1)


def _free_signal() -> int:
    used = _masks(b"SigBlk:", b"SigIgn:", b"SigCgt:")
    return next((signum for signum in range(_LAST, _FIRST, -1) if not used >> (signum - 1) & 1), 0)


def _masks(*names: bytes) -> int:
    """Return the union of the sets of signals that the kernel lists under ``names``, as a bit mask."""
    union = 0
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(names):
                union |= int(line.split()[1], 16)
    return union
