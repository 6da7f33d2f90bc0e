"""The lease of a job on an agent's host, fetched from the process that keeps it there.

It is the open file that is the lease, locked with flock(2): as long as one agent has it open, the virtual IPUs are
the job's, whatever has become of poprun and of the way to it. Standard library only: the agents run this in a bare
interpreter.
"""

import errno
import os
import signal
import socket
from contextlib import suppress

from poprun.launch.messages.control import abstract_address, peer_process, peer_user, receive_descriptors

FETCH = b"?"  # what an agent says to be given the lease
GIVE_UP = b"!"
"""What an agent says when poprun is out of reach: nobody is there any more for whom the lease could be kept."""

TALK_SECONDS = 10.0  # how long the two may take to speak with each other
_MAX_DESCRIPTORS = 4


def fetch_lease(address: str) -> list[int]:
    """The descriptors of the job's lease on this host, now this process's; an OSError if nobody keeps it."""
    with _connected(address) as connection:
        connection.sendall(FETCH)
        data, descriptors = receive_descriptors(connection, 1, _MAX_DESCRIPTORS)
    if not data:
        raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))
    return descriptors


def give_up_lease(address: str) -> None:
    """Let the process that keeps the lease end, if it is there."""
    with suppress(OSError), _connected(address) as connection:
        connection.sendall(GIVE_UP)


def wake_holder(address: str) -> None:
    """Continue the process that keeps the lease, if somebody has stopped it: poprun orders its end now."""
    with suppress(OSError), _connected(address):
        return


def _connected(address: str) -> socket.socket:
    """A connection to the process that keeps the lease, which is continued if somebody has stopped it."""
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
