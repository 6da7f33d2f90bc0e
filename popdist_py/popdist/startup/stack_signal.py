"""The signal at which a Python program writes the stacks of its threads behind its page of progress.

`popdist` registers it, or the start-up hook (``startup/sitecustomize.py``), which loads this file by its path into
whatever Python the program runs: so it is written for Python 3.8 and imports next to nothing. The handler is
faulthandler's, in C, and answers although the program is stuck in C itself.
"""

from __future__ import annotations

import faulthandler
import os
import sys

PAGE_NAME = "poprun-progress"
"""Name of the page's file: a descriptor that was used again for something else leads elsewhere."""

_PID_AT, _PID_BYTES = 8, 8
_SIGNAL_AT, _SIGNAL_BYTES = 16, 4
"""Where the page names its process and the signal, as `popdist.ground.progress` has it."""

_TRAINED_ALONE_AT = 23
"""Where it says that the process has trained without others."""

RECORDER_AT, RECORDER_BYTES = 264, 4
"""Where it names the descriptor through which the recorder of torch's collectives can be asked."""

_USES_JAX_AT = 268
"""Where it says that JAX was told of the job."""

_FIRST, _LAST = 40, 63
"""Real-time signals (signal(7)) that no C library keeps for itself."""


def is_page(descriptor: int) -> bool:
    """Whether ``descriptor`` leads to a page of progress."""
    try:
        return PAGE_NAME in os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return False


def announced_pid(descriptor: int) -> int:
    """The process that the page names; 0 when nobody has written yet."""
    return int.from_bytes(os.pread(descriptor, _PID_BYTES, _PID_AT), sys.byteorder)


def is_alive(pid: int) -> bool:
    """Whether there is a process ``pid``."""
    return os.path.exists(f"/proc/{pid}")


def announce(descriptor: int, signum: int) -> None:
    """Clear the page, and write this process and its stack signal on it."""
    os.pwrite(descriptor, bytes(os.sysconf("SC_PAGE_SIZE")), 0)
    os.pwrite(descriptor, signum.to_bytes(_SIGNAL_BYTES, sys.byteorder), _SIGNAL_AT)
    os.pwrite(descriptor, os.getpid().to_bytes(_PID_BYTES, sys.byteorder), _PID_AT)


def announce_lone_training(descriptor: int) -> None:
    """Say on the page that this process has trained without others."""
    os.pwrite(descriptor, b"\1", _TRAINED_ALONE_AT)


def announce_recorder(descriptor: int, recorder: int) -> None:
    """Say on the page through which descriptor of this process torch's recorder can be asked."""
    os.pwrite(descriptor, recorder.to_bytes(RECORDER_BYTES, sys.byteorder), RECORDER_AT)


def announce_jax(descriptor: int) -> None:
    """Say on the page that JAX was told of the job, to connect this process to others."""
    os.pwrite(descriptor, b"\1", _USES_JAX_AT)


def register(descriptor: int) -> int:
    """Register an unused real-time signal at which this process writes its stacks to ``descriptor``; or 0."""
    signum = _free_signal()
    if signum:
        faulthandler.register(signum, file=descriptor, all_threads=True, chain=False)
    return signum


def watch_crashes(descriptor: int) -> None:
    """Have Python write its stacks behind the page when a signal such as SIGSEGV ends it, if nobody else does."""
    if not faulthandler.is_enabled():
        os.lseek(descriptor, os.sysconf("SC_PAGE_SIZE"), os.SEEK_SET)
        faulthandler.enable(file=descriptor)


def catches(signum: int) -> bool:
    """Whether this process has a handler for ``signum``; there is none for 0."""
    return bool(signum) and bool(_masks(b"SigCgt:") >> (signum - 1) & 1)


def _free_signal() -> int:
    used = _masks(b"SigBlk:", b"SigIgn:", b"SigCgt:")
    return next((signum for signum in range(_LAST, _FIRST, -1) if not used >> (signum - 1) & 1), 0)


def _masks(*names: bytes) -> int:
    """The union of some of this process's sets of signals (proc_pid_status(5))."""
    found = 0
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(names):
                found |= int(line.split()[1], 16)
    return found
