"""The two ports of a job, held by instance 0's agent from before the first program starts.

torch's ``MASTER_PORT`` must be known to every instance before instance 0's program, which will listen there, runs.
A socket that is bound with SO_REUSEADDR and does not listen keeps the number: the kernel gives it to nobody else
who asks for any free port, and a listener that sets SO_REUSEADDR too (as torch's does) may still bind it.
popdist's own store gets a socket that listens already; instance 0's program inherits it.
"""

import socket

_BACKLOG = 2048


def hold_master_port(address: str) -> socket.socket:
    """A bound socket that keeps a free port number of ``address`` without listening on it."""
    holder = socket.socket(_family(address), socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return holder


def open_store_listener(address: str) -> socket.socket:
    """A listening socket at ``address`` for popdist's store."""
    listener = socket.socket(_family(address), socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(_BACKLOG)
    return listener


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
