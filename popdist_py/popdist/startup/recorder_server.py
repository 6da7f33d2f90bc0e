"""The start of torch's worker server, which sends the last recorded collectives even if Python is blocked.

The start-up hook (``startup/sitecustomize.py``) uses this module in the Python of the program, so it is written
for Python 3.8. The server listens on a unix socket whose file is removed immediately. So only a process that may
inspect this process can connect, at ``/proc/PID/fd/N``, and no file remains.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # importing typing takes longer than importing this module
if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import Any

SOCKET_VARIABLE = "TORCH_WORKER_SERVER_SOCKET"
"""The environment variable in which torch reads the socket's path; if a program sets it, it has a server."""

LENGTH_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""The environment variables with the length of torch's record of collectives; 0 means no record."""

OWN_LINE = b"WorkerServer.cpp"
"""A text in the line that torch's worker server writes to standard error when it starts."""


def start() -> int:
    """Start torch's server of recorded collectives; return a descriptor of its socket, 0 if none is started."""
    if SOCKET_VARIABLE in os.environ or any(os.environ.get(name) == "0" for name in LENGTH_VARIABLES):
        return 0
    from torch.distributed.elastic.control_plane import worker_main

    main: Any = worker_main
    server = main.__wrapped__()  # without the wrapper that records errors, because it would enable faulthandler
    import shutil
    import tempfile

    folder = tempfile.mkdtemp(prefix="poprun-")
    socket = os.path.join(folder, "s")
    try:
        os.environ[SOCKET_VARIABLE] = socket  # torch reads the path only here
        _enter_quietly(server)
        return os.open(socket, os.O_PATH | os.O_CLOEXEC)
    finally:
        del os.environ[SOCKET_VARIABLE]
        shutil.rmtree(folder, ignore_errors=True)


def _enter_quietly(server: AbstractContextManager[None]) -> None:
    """Start the threads of ``server`` for ever, with signals blocked, and hide the line that the server prints."""
    import ctypes
    import signal

    # the server is never deleted: in a forked child this would end the server of the parent, and so the parent
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
    kept, caught = os.dup(2), os.memfd_create("stderr")
    crashes = {
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
    }  # if such a signal were blocked, the crash would print nothing
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - crashes)
    try:
        os.dup2(caught, 2)
        server.__enter__()
    finally:
        os.dup2(kept, 2)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        output = os.pread(caught, os.fstat(caught).st_size, 0)
        os.close(caught)
        os.close(kept)
        os.write(2, b"".join(line for line in output.splitlines(keepends=True) if OWN_LINE not in line))


HANDLERS = ("fr_trace_json", "dump_nccl_trace_json")
"""The worker server's names for torch's recorders of gloo and NCCL; only some builds of torch have NCCL."""


def read_recorder(descriptor: int) -> bytes:
    """Return the collectives that torch has recorded in this process: one line of JSON for each recorder."""
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
