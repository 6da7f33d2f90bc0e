"""The door to other hosts: a TCP socket on one address of this one.

Whoever knocks must prove to know the job's key before a word of it is read. The proof is taken byte by byte as it
comes, so that nobody who knocks and says nothing keeps poprun from its work.
"""

import selectors
import socket
import time
from typing import Final

from poprun.job.listeners import TALK_SECONDS, Admit, Refuse, accept
from poprun.messages.authentication import NONCE_BYTES, PROOF_BYTES, Handshake
from poprun.messages.control import ProtocolError
from poprun.messages.link import Link, notice_death, tcp_address

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
