"""Starts torch's worker server, which tells the recorder's last collectives while Python itself is stuck.

The start-up hook (``startup/sitecustomize.py``) calls it in whatever Python the program runs, so this is written
for Python 3.8. The server listens on a unix socket whose file is removed at once: only who may look into this
process reaches it, at ``/proc/PID/fd/N``, and nothing is left behind whatever dies.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # importing typing takes longer than all of this
if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import Any

SOCKET_VARIABLE = "TORCH_WORKER_SERVER_SOCKET"
"""Where torch reads the path of the socket; a program that sets it has a server of its own."""

LENGTH_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""How many calls torch's recorder keeps; where one is 0 there is no recorder to ask."""

OWN_LINE = b"WorkerServer.cpp"
"""What stands in the line that the server writes to standard error when it starts."""


def start() -> int:
    """Start the server; the descriptor through which others reach its socket, or 0 where there is none."""
    if SOCKET_VARIABLE in os.environ or any(os.environ.get(name) == "0" for name in LENGTH_VARIABLES):
        return 0
    from torch.distributed.elastic.control_plane import worker_main

    main: Any = worker_main
    server = main.__wrapped__()  # without what records errors, which would enable faulthandler
    import shutil
    import tempfile

    folder = tempfile.mkdtemp(prefix="poprun-")
    socket = os.path.join(folder, "s")
    try:
        os.environ[SOCKET_VARIABLE] = socket  # torch has no other way to be told
        _enter_quietly(server)
        return os.open(socket, os.O_PATH | os.O_CLOEXEC)
    finally:
        del os.environ[SOCKET_VARIABLE]
        shutil.rmtree(folder, ignore_errors=True)


def _enter_quietly(server: AbstractContextManager[None]) -> None:
    """Start the server's threads, for ever, with no signal of the program's and without its line."""
    import ctypes
    import signal

    # A server that is taken down in a forked child takes the parent's with it, and so the parent: it never is.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
    kept, caught = os.dup(2), os.memfd_create("stderr")
    crashes = {
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
    }  # which would then end it without a word
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - crashes)
    try:
        os.dup2(caught, 2)
        server.__enter__()
    finally:
        os.dup2(kept, 2)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        said = os.pread(caught, os.fstat(caught).st_size, 0)
        os.close(caught)
        os.close(kept)
        os.write(2, b"".join(line for line in said.splitlines(keepends=True) if OWN_LINE not in line))


HANDLERS = ("fr_trace_json", "dump_nccl_trace_json")
"""The server's names of torch's recorders: that of gloo, and that of NCCL, which only some builds have."""


def read_recorder(descriptor: int) -> bytes:
    """What this process's own recorders hold, each as JSON in a line of its own."""
    return b"\n".join(_ask(descriptor, handler).replace(b"\n", b" ") for handler in HANDLERS)


def _ask(descriptor: int, handler: str) -> bytes:
    import http.client
    import socket

    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    with connection.sock as link:
        link.settimeout(1.0)
        link.connect(f"/proc/self/fd/{descriptor}")
        connection.request("POST", f"/handler/{handler}")
        answer = connection.getresponse()
        return answer.read() if answer.status == http.client.OK else b""
