"""A rank shim: ``python -I -S start_rank_shim.py``, which an MPI runtime starts for each instance on a machine.

The rank shim sends the host shim what the runtime gave it, and waits until its agent has ended. So the runtime can
wait for the rank shim and kill it. The rank shim imports next to nothing, not even `os`, so that it starts fast.
"""

import posix
import sys

TYPE_CHECKING = False  # not imported from typing, which loads slowly
if TYPE_CHECKING:
    import signal
    import socket
else:
    import _signal as signal  # the modules signal and socket would load enum and more
    import _socket as socket


def print_in_one_line(kind: type[BaseException], error: BaseException, _: object) -> None:
    """Print in one line the exception that ends this process; a traceback would not help a user of poprun."""
    sys.stderr.write(f"poprun: a shim has failed: {kind.__name__}: {error}\n")


sys.excepthook = print_in_one_line
signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would write a traceback
runtime = posix.getppid()
pmi_descriptor = posix.environ.get(b"PMI_FD", b"")
kept = [int(pmi_descriptor)] if pmi_descriptor.isdigit() else []
for name in posix.listdir("/proc/self/fd"):
    if int(name) > 2 and int(name) not in kept:
        try:
            posix.close(int(name))
        except OSError:  # the descriptor of listdir itself is already closed
            continue
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(b"\0" + posix.environ[b"POPRUN_HOST_SHIM"])
block = b"".join(descriptor.to_bytes(4, sys.byteorder) for descriptor in kept)
descriptors = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, block)] if kept else []
rank = posix.environ[posix.environ[b"POPRUN_RANK_VARIABLE"]]
connection.sendmsg([b"%s %d%s" % (rank, runtime, b" PMI_FD" if kept else b"")], descriptors)
is_well = bool(connection.recv(1))  # the agent sends a byte when it has ended well
posix._exit(0 if is_well else 1)  # noqa: SLF001 - the function is public as os._exit
