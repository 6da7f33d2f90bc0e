"""A program that executes the command in its arguments, and gets SIGTERM when its parent process dies.

The program has its own file, for a bare interpreter. A fork of a Python process with the threads and the
accelerator of a notebook could hang.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() == int(parent):  # otherwise the parent has died already
        os.execv(command[0], command)  # noqa: S606 - starting programs is the purpose
