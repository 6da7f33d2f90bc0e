"""The files that an agent is given: the key of its job, and the lease on its virtual IPUs.

Standard library only: the agents run this in a bare interpreter.

What an agent is given is the open file that is the lease, locked with flock(2): as long as one agent has it open,
the virtual IPUs are the job's, whatever has become of poprun and of the way to it.
"""

import errno
import os
import socket
import stat
from contextlib import suppress
from typing import NamedTuple

from poprun.messages.control import abstract_address, peer_user

_MOST_BYTES = 1024

FETCH = b"?"
"""What an agent says to be given the lease."""

GIVE_UP = b"!"
"""What an agent says when poprun is out of reach: nobody is there any more for whom the lease could be kept."""

SECONDS = 10.0
MOST = 4
"""Descriptors that a lease has at most."""


class HeldKey(NamedTuple):
    """The key of a job, as an agent of it has it; both are empty where the kernel knows the agents.

    Attributes:
        text: The key.
        file: Where it was read.
    """

    text: str
    file: str


def read_key(file: str) -> HeldKey:
    """The key in ``file``; none without a file's name.

    Raises:
        OSError: If it cannot be read.
        PermissionError: If others than this user can read or write it.
    """
    if not file:
        return HeldKey("", "")
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
            raise PermissionError(f"{file} is not this user's alone")
        return HeldKey(os.read(descriptor, _MOST_BYTES).decode("ascii"), file)
    finally:
        os.close(descriptor)


def forget_key(key: HeldKey) -> None:
    """Remove the file once every shim of the job has read it, or will not; another agent may have done so."""
    with suppress(OSError):
        os.unlink(key.file)


def fetch_lease(address: str) -> list[int]:
    """The descriptors of the job's lease on this host, which are this process's now; none without an ``address``.

    Raises:
        OSError: If nobody of this user keeps it.
    """
    if not address:
        return []
    with _connected(address) as connection:
        connection.sendall(FETCH)
        data, descriptors, _, _ = socket.recv_fds(connection, 1, MOST)
    if not data:
        raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))
    return descriptors


def give_up_lease(address: str) -> None:
    """Let the process that keeps the lease end, if it is there."""
    if address:
        with suppress(OSError), _connected(address) as connection:
            connection.sendall(GIVE_UP)


def _connected(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(SECONDS)
        connection.connect(abstract_address(address))
        if peer_user(connection) != os.getuid():
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    except OSError:
        connection.close()
        raise
    return connection
