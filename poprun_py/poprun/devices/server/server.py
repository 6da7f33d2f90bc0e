"""The HTTP server of `vipu serve`: its socket, the limits of its connections, and its end.

A connection lasts a bounded time, whatever its client does. When there are too many, the one goes that has been
longest about sending its request, so slow clients cannot keep others out.
"""

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from poprun.devices.server.server_connection import VERSION, VERSION_HEADER
from poprun.errors import ServerError

MAX_CONNECTIONS: Final = 256
CONNECTION_SECONDS: Final = 20.0
"""How long a connection may last, the work that is asked for included."""

_MAX_HEADER_BYTES: Final = 16 * 1024
_STOP_SECONDS: Final = 3
_BACKLOG: Final = 512


class BoundedProtocol(H11Protocol):
    """A connection that ends in time."""

    _unfinished: Final[dict["BoundedProtocol", None]] = {}
    """Connections whose request has not come as a whole, the oldest first."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Start the clock of the connection."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(CONNECTION_SECONDS, transport.abort)
        if len(self.connections) > MAX_CONNECTIONS:
            next(iter(self._unfinished), self).transport.abort()
        self._unfinished[self] = None

    def data_received(self, data: bytes) -> None:
        """Look whether the request has come as a whole."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.more_body:  # type: ignore[redundant-expr] # None at first
            self._unfinished.pop(self, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._unfinished.pop(self, None)
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    """A server that ends with 0 when it is asked to; ``when_ready`` is called when it can be asked."""

    def __init__(self, config: uvicorn.Config, when_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._when_ready = when_ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self.handle_exit, signum, None)
        self._when_ready()
        yield


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 is any that is free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ServerError(
            f"nothing can listen at {host}:{port} ({error.strerror}): choose an address of this machine with "
            "--host, or another port with --port"
        ) from None
    return listener


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine reaches a socket."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def serve(app: Starlette, listener: socket.socket, when_ready: Callable[[], None]) -> None:
    """Answer until SIGTERM or Ctrl-C; then what was asked is still answered, for a few seconds.

    ``when_ready`` is called once, when a signal would be heeded.
    """
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        headers=[(VERSION_HEADER, str(VERSION))],
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        timeout_keep_alive=1,
        timeout_graceful_shutdown=_STOP_SECONDS,
    )
    _Server(config, when_ready).run(sockets=[listener])
