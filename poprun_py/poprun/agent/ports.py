"""The two ports of a job, held by instance 0's agent from before the first program starts.

torch's ``MASTER_PORT`` must be known to every instance before instance 0's program, which will listen there, runs.
A socket that is bound with SO_REUSEADDR and does not listen keeps the number: the kernel gives it to nobody else
who asks for any free port, and a listener that sets SO_REUSEADDR too (as torch's does) may still bind it.
popdist's own store gets a socket that listens already; instance 0's program inherits it.
"""

import socket

_LOOPBACK = "127.0.0.1"
_BACKLOG = 2048


def hold_master_port() -> socket.socket:
    """A bound socket that keeps a free port number without listening on it."""
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((_LOOPBACK, 0))
    return holder


def open_store_listener() -> socket.socket:
    """A listening loopback socket for popdist's store."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((_LOOPBACK, 0))
    listener.listen(_BACKLOG)
    return listener
