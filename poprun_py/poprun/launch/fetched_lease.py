"""The lease of a job on an agent's host, which the agent fetches from the process that keeps the lease.

The lease is an open file that is locked with flock(2). While one agent has the file open, the virtual IPUs belong
to the job, even if poprun has ended or cannot be reached. Standard library only: the agents run this module in a
bare interpreter.
"""

import errno
import os
import signal
import socket
from contextlib import suppress

from poprun.launch.messages.control import abstract_address, peer_process, peer_user, receive_descriptors

FETCH = b"?"  # the message with which an agent asks for the lease
GIVE_UP = b"!"
"""The message of an agent that has lost poprun: the keeper may end, because nobody needs the lease any more."""

TALK_SECONDS = 10.0  # time limit for each message
_MAX_DESCRIPTORS = 4


def fetch_lease(address: str) -> list[int]:
    """Fetch the job's lease (its right to use devices) from the process that keeps the lease on this host: return
    the descriptors of the locked files that are the lease. Raise OSError if none arrive.
    """
    with _connected(address) as connection:
        connection.sendall(FETCH)
        data, descriptors = receive_descriptors(connection, 1, _MAX_DESCRIPTORS)
    if not data:
        raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))
    return descriptors


def give_up_lease(address: str) -> None:
    """Give up the job's lease (right to use devices): order its holder to end. Ignore a failed connection."""
    with suppress(OSError), _connected(address) as connection:
        connection.sendall(GIVE_UP)


def wake_holder(address: str) -> None:
    """Wake the process that holds the job's lease (right to use devices) by SIGCONT, so that it can end."""
    with suppress(OSError), _connected(address):
        return


def _connected(address: str) -> socket.socket:
    """Return a connection to the holder of the job's lease (right to use devices); continue a stopped holder."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(TALK_SECONDS)
        connection.connect(abstract_address(address))
        if peer_user(connection) != os.getuid():
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        os.kill(peer_process(connection), signal.SIGCONT)
    except OSError:
        connection.close()
        raise
    return connection
