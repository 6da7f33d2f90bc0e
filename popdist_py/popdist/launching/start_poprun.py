"""Becomes the command in its arguments, which the kernel ends with SIGTERM when the process dies that started it.

A file of its own, for a bare interpreter: to fork in Python what a notebook has loaded, its threads and its
accelerator, could hang.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() == int(parent):  # else it has died before
        os.execv(command[0], command)  # noqa: S606 - starting programs is the purpose
