"""Connections from other hosts whose other end has not yet proved that it knows the job's key.

A proof is read without blocking, as its bytes arrive, so that a client that connects and sends nothing does not
delay poprun. Before a proof is complete and right, poprun reads nothing else from the connection.
"""

import selectors
import socket
import time
from collections.abc import Callable
from typing import Final

from poprun.launch.messages import ProtocolError
from poprun.launch.messages.control import Link
from poprun.launch.messages.proofs import NONCE_BYTES, PROOF_BYTES, Handshake

_PROOF_SECONDS: Final = 30.0
_MAX_CONNECTIONS: Final = 256
_NO_PROOF: Final = "who connected to the control socket did not prove to know the key of this job"


class KeyProofs:
    """The connections from other hosts whose clients have still to prove that they know the job's secret key."""

    def __init__(
        self,
        key: str,
        selector: selectors.BaseSelector,
        admit: Callable[[Link], None],
        refuse: Callable[[str], None],
    ) -> None:
        self._key = key
        self._selector = selector
        self._admit = admit
        self._refuse = refuse
        self._began_at_seconds: dict[socket.socket, float] = {}

    def close(self) -> None:
        """Close every connection whose client has not yet proved that it knows the job's key."""
        for connection in tuple(self._began_at_seconds):
            self._hang_up(connection)

    def begin(self, connection: socket.socket) -> None:
        """Ask a new client to prove that it knows the job's key; first close connections whose proof is late."""
        now = time.monotonic()
        for other, since in tuple(self._began_at_seconds.items()):
            if now - since > _PROOF_SECONDS or len(self._began_at_seconds) >= _MAX_CONNECTIONS:
                self._hang_up(other, _NO_PROOF)
        connection.setblocking(False)  # noqa: FBT003 - setblocking() accepts no keyword arguments
        handshake = Handshake(self._key, is_agent=False)
        self._began_at_seconds[connection] = now
        answer = bytearray()
        self._selector.register(
            connection, selectors.EVENT_READ, lambda: self._receive(connection, handshake, answer)
        )
        self._send(connection, handshake.nonce)

    def _receive(self, connection: socket.socket, handshake: Handshake, answer: bytearray) -> tuple[()]:
        """Receive the next bytes of a client's proof that it knows the job's key; check a complete proof."""
        try:
            data = connection.recv(NONCE_BYTES + PROOF_BYTES - len(answer))
        except BlockingIOError:
            return ()
        except OSError:
            data = b""
        answer += data
        if not data:
            self._hang_up(connection, _NO_PROOF)
        elif len(answer) == NONCE_BYTES + PROOF_BYTES:
            self._check(connection, handshake, bytes(answer))
        return ()

    def _check(self, connection: socket.socket, handshake: Handshake, answer: bytes) -> None:
        nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        try:
            seal = handshake.check(nonce, proof)
        except ProtocolError as error:
            self._hang_up(connection, str(error))
            return
        if self._send(connection, handshake.proof(nonce)):
            del self._began_at_seconds[connection]
            self._selector.unregister(connection)
            self._admit(Link(connection, seal))

    def _send(self, connection: socket.socket, data: bytes) -> bool:
        """Send a client ``data``, too short to block. Return False if the client has closed the connection."""
        try:
            connection.sendall(data)
        except OSError:
            self._hang_up(connection, _NO_PROOF)
            return False
        return True

    def _hang_up(self, connection: socket.socket, reason: str = "") -> None:
        del self._began_at_seconds[connection]
        self._selector.unregister(connection)
        connection.close()
        if reason:
            self._refuse(reason)
