"""The sockets on which poprun listens for its agents and monitors: on this machine, and on other hosts.

On one machine it is a unix socket without a file, and the kernel says whose process is at the other end; the door
to other hosts is in `remote_door`.

Whoever knocks must prove to know the job's key before a word of it is read. The proof is taken byte by byte as it
comes, so that nobody who knocks and says nothing keeps poprun from its work.
"""

import os
import selectors
import socket
import time
from collections.abc import Callable
from typing import Final, Protocol

from poprun.errors import LaunchError
from poprun.messages.control import (
    NONCE_BYTES,
    PROOF_BYTES,
    Handshake,
    Link,
    ProtocolError,
    abstract_address,
    notice_death,
    peer_user,
    tcp_address,
)

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


_KNOCK_SECONDS: Final = 30.0
_MAX_KNOCKING: Final = 256


class RemoteDoor:
    """For those who know the job's key, on any host that reaches ``host``, an address of this one."""

    def __init__(
        self, host: str, key: str, selector: selectors.BaseSelector, admit: Admit, refuse: Refuse
    ) -> None:
        self._key = key
        self._selector = selector
        self._admit = admit
        self._refuse = refuse
        self._knocking: dict[socket.socket, float] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
        self.address = tcp_address(host, self._listener.getsockname()[1])
        selector.register(self._listener, selectors.EVENT_READ, self._open)

    def close(self) -> None:
        """Let nobody in any more."""
        for connection in tuple(self._knocking):
            self._hang_up(connection)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _open(self) -> tuple[()]:
        connection = accept(self._listener)
        now = time.monotonic()
        for other, since in tuple(self._knocking.items()):
            if now - since > _KNOCK_SECONDS or len(self._knocking) >= _MAX_KNOCKING:
                self._hang_up(other, "who knocked at the control socket did not prove to know the key of this job")
        connection.setblocking(False)  # noqa: FBT003 - it takes no keywords
        handshake = Handshake(self._key, is_agent=False)
        self._knocking[connection] = now
        answer = bytearray()
        self._selector.register(
            connection, selectors.EVENT_READ, lambda: self._listen(connection, handshake, answer)
        )
        self._send(connection, handshake.nonce)
        return ()

    def _listen(self, connection: socket.socket, handshake: Handshake, answer: bytearray) -> tuple[()]:
        """Take the next bytes of a proof; open when it is whole and right."""
        try:
            data = connection.recv(NONCE_BYTES + PROOF_BYTES - len(answer))
        except BlockingIOError:
            return ()
        except OSError:
            data = b""
        answer += data
        if not data:
            self._hang_up(connection, "who knocked at the control socket went away")
        elif len(answer) == NONCE_BYTES + PROOF_BYTES:
            nonce, proof = bytes(answer[:NONCE_BYTES]), bytes(answer[NONCE_BYTES:])
            try:
                seal = handshake.check(nonce, proof)
            except ProtocolError as error:
                self._hang_up(connection, str(error))
                return ()
            if self._send(connection, handshake.proof(nonce)):
                del self._knocking[connection]
                self._selector.unregister(connection)
                connection.settimeout(TALK_SECONDS)
                notice_death(connection)
                self._admit(Link(connection, seal))
        return ()

    def _send(self, connection: socket.socket, data: bytes) -> bool:
        """Send a few bytes, which a new connection has room for; False when the other side has gone."""
        try:
            connection.sendall(data)
        except OSError:
            self._hang_up(connection, "who knocked at the control socket went away")
            return False
        return True

    def _hang_up(self, connection: socket.socket, reason: str = "") -> None:
        del self._knocking[connection]
        self._selector.unregister(connection)
        connection.close()
        if reason:
            self._refuse(reason)
