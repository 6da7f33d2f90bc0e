"""Where agents come in: a socket that listens, and the check of who knocks.

On one machine it is a unix socket without a file, and the kernel says whose process is at the other end; the door
to other hosts is in `remote_door`.
"""

import os
import selectors
import socket
from collections.abc import Callable
from typing import Final, Protocol

from poprun.errors import LaunchError
from poprun.messages.control import abstract_address, peer_user
from poprun.messages.link import Link

TALK_SECONDS: Final = 5.0
"""How long an agent may take to read a message."""

Admit = Callable[[Link], None]
Refuse = Callable[[str], None]


def accept(listener: socket.socket) -> socket.socket:
    """The next who knocks.

    Raises:
        LaunchError: If there is no descriptor for it.
    """
    try:
        return listener.accept()[0]
    except OSError as error:
        raise LaunchError(f"cannot hear an agent: {error.strerror}; raise the limit with `ulimit -n`") from None


class Door(Protocol):
    """A place where agents come in.

    Attributes:
        address: What the shims are told of it.
    """

    address: str

    def close(self) -> None:
        """Let nobody in any more."""


class LocalDoor:
    """For the processes of the same user on this machine."""

    def __init__(self, selector: selectors.BaseSelector, admit: Admit, refuse: Refuse) -> None:
        self.address = f"poprun-{os.getpid()}-{os.urandom(16).hex()}"
        self._selector = selector
        self._admit = admit
        self._refuse = refuse
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(abstract_address(self.address))
        self._listener.listen(socket.SOMAXCONN)
        selector.register(self._listener, selectors.EVENT_READ, self._open)

    def close(self) -> None:
        """Let nobody in any more."""
        self._selector.unregister(self._listener)
        self._listener.close()

    def _open(self) -> tuple[()]:
        connection = accept(self._listener)
        if peer_user(connection) == os.getuid():
            connection.settimeout(TALK_SECONDS)
            self._admit(Link(connection))
        else:
            connection.close()
            self._refuse("a process of another user knocked at the control socket")
        return ()
