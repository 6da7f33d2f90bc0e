"""The HTTP server of `vipu serve`: it checks requests, executes commands, and limits connections and times.

The server counts a request's headers, reads the body up to a limit, and checks the proof of the token, the JSON
and each field. A failed check is answered in one line. A connection lasts a bounded time. If connections are too
many, the server closes the oldest connection with an incomplete request, so slow clients cannot block others.
"""

import asyncio
import ipaddress
import json
import signal
import socket
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final

import anyio
import uvicorn
from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from poprun.devices.pool.holders import boot_id
from poprun.devices.pool.pool import Pool
from poprun.devices.pool.records import Partition
from poprun.devices.server.served_leases import POLL_SECONDS, ClientLeases
from poprun.devices.server.server_connection import PATH, VERSION, VERSION_HEADER, describe_error
from poprun.devices.server.server_messages import (
    LeaseKey,
    LeaseRequest,
    NewPartition,
    Nothing,
    PartitionName,
    ServedPool,
)
from poprun.devices.server.token_proofs import CHALLENGE, Challenges
from poprun.errors import PoprunError, ServerError
from poprun.text.fields import read_record, write_record

MAX_BODY_BYTES: Final = 64 * 1024
MAX_HEADERS: Final = 40

_NUM_THREADS: Final = 4


def commands_of(pool: Pool, leases: ClientLeases) -> Mapping[str, tuple[type[Any], Callable[[Any], object]]]:
    """Return for each command of the server the type of its message and the function that executes it."""

    def describe(_: Nothing) -> ServedPool:
        return ServedPool(
            boot_id=boot_id(), lease_seconds=leases.lease_seconds, cluster=pool.cluster(), state=pool.state()
        )

    def create(wanted: NewPartition) -> Partition:
        return pool.create_partition(
            wanted.name, wanted.size, allocation=wanted.allocation, cluster=wanted.cluster, user=wanted.user
        )

    return {
        "pool": (Nothing, describe),
        "create-partition": (NewPartition, create),
        "reset-partition": (PartitionName, lambda wanted: pool.reset_partition(wanted.name)),
        "remove-partition": (PartitionName, lambda wanted: pool.remove_partition(wanted.name)),
        "take-lease": (LeaseRequest, leases.request),
        "renew-lease": (LeaseKey, lambda wanted: leases.renew(wanted.key)),
        "end-lease": (LeaseKey, lambda wanted: leases.end(wanted.key)),
    }


def make_app(pool: Pool, leases: ClientLeases, token: str) -> Starlette:
    """Make the web application that serves leases to clients who know ``token``, and ends expired leases."""
    commands = commands_of(pool, leases)
    challenges = Challenges()
    threads: list[anyio.CapacityLimiter] = []

    def carry_out(command: str, values: object) -> dict[str, object]:
        if command not in commands:
            raise HTTPException(404, f"there is no command {command[:40]!r}")
        kind, act = commands[command]
        return write_record(act(read_record(kind, values, "request", noun="this message")) or Nothing())

    async def answer(request: Request) -> Response:
        command, now_seconds = request.path_params["command"], time.monotonic()
        if command == CHALLENGE:
            return JSONResponse(challenges.make(now_seconds))
        try:
            body = await _body(request)
            said = request.headers.get("authorization", ""), token, command, body.decode(errors="replace")
            _admit(challenges, said, now_seconds)
            return JSONResponse(await to_thread.run_sync(carry_out, command, _json(body), limiter=threads[0]))
        except HTTPException as error:
            return JSONResponse({"error": error.detail}, error.status_code)
        except PoprunError as error:
            kind, status = describe_error(error)
            return JSONResponse({"error": str(error), "kind": kind}, status)
        except Exception:  # noqa: BLE001 - the server must continue after any error
            traceback.print_exc(file=sys.stderr)
            return JSONResponse({"error": "the server has failed: its own output says why"}, 500)

    @asynccontextmanager
    async def life(_: Starlette) -> AsyncIterator[None]:
        threads.append(anyio.CapacityLimiter(_NUM_THREADS))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_end_expired, leases)
            yield
            tasks.cancel_scope.cancel()

    return Starlette(routes=[Route(f"{PATH}{{command}}", answer, methods=["POST"])], lifespan=life)


async def _end_expired(leases: ClientLeases) -> None:
    """End expired leases once a second for ever; if the pool's folder cannot be used, try again later."""
    while True:
        with suppress(PoprunError):
            await to_thread.run_sync(leases.end_expired)
        await anyio.sleep(POLL_SECONDS)


def _admit(challenges: Challenges, said: tuple[str, str, str, str], now_seconds: float) -> None:
    """Raise HTTPException 401 unless ``said``, parts of a request, proves that the client knows the token."""
    if not challenges.is_answered_by(*said, now_seconds):
        raise HTTPException(401, "this is not its token: copy the file that vipu serve named when it started")


async def _body(request: Request) -> bytes:
    """Read and return a request's body. Raise HTTPException if it is too long or the headers are too many."""
    if len(request.headers) > MAX_HEADERS:
        raise HTTPException(431, f"more than {MAX_HEADERS} headers")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"a request has {MAX_BODY_BYTES} bytes at most")
    return body


def _json(body: bytes) -> object:
    try:
        values: object = json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the request is no JSON") from None
    return values


MAX_CONNECTIONS: Final = 256
CONNECTION_SECONDS: Final = 20.0  # how long a connection may last, including the execution of its command
_MAX_HEADER_BYTES: Final = 16 * 1024
_STOP_SECONDS: Final = 3
_BACKLOG: Final = 512  # connections that wait to be accepted
_ACCEPTED_AT_ONCE: Final = 32  # connections that are accepted before any connection is counted
_PAUSE_SECONDS: Final = 60.0  # time between two printed errors of the event loop


class BoundedProtocol(H11Protocol):
    """The HTTP protocol of one connection, which ends after 20 s, or if there are too many connections."""

    _unfinished: Final[dict["BoundedProtocol", None]] = {}
    """All connections whose request has not arrived completely, the oldest first."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Start the timer that closes the connection after ``CONNECTION_SECONDS``. If there are too many
        connections, close the oldest connection whose request has not arrived completely.
        """
        super().connection_made(transport)
        self._deadline = self.loop.call_later(CONNECTION_SECONDS, transport.abort)
        if len(self.connections) > MAX_CONNECTIONS:
            next(iter(self._unfinished), self).transport.abort()
        self._unfinished[self] = None

    def data_received(self, data: bytes) -> None:
        """Pass ``data`` to the HTTP parser, and record when the whole request has arrived."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.more_body:  # type: ignore[redundant-expr] # None at first
            self._unfinished.pop(self, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer that would have closed the connection."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._unfinished.pop(self, None)
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    """A uvicorn server that exits with 0 at SIGTERM or SIGINT; ``when_ready`` is called once both are handled."""

    def __init__(self, config: uvicorn.Config, when_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._when_ready = when_ready
        self._quiet_until_seconds = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)  # uvicorn sets one number for this and for _ACCEPTED_AT_ONCE

    def _tell_rarely(self, _: asyncio.AbstractEventLoop, about: dict[str, Any]) -> None:
        """Print an error of the event loop, at most one per minute, so that clients cannot fill the disk."""
        if time.monotonic() >= self._quiet_until_seconds:
            self._quiet_until_seconds = time.monotonic() + _PAUSE_SECONDS
            print(f"vipu: {about['message']}: {about.get('exception', '')}", file=sys.stderr)  # noqa: T201 - standard error is the server's log

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self.handle_exit, signum, None)
        loop.set_exception_handler(self._tell_rarely)
        self._when_ready()
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket at ``host`` and ``port`` (0: any free port). Raises ServerError if impossible."""
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
    """Return whether only processes of this machine can connect to the socket ``listener``."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def serve(app: Starlette, listener: socket.socket, when_ready: Callable[[], None]) -> None:
    """Serve ``app`` until SIGTERM or SIGINT; call ``when_ready`` once both signals are handled."""
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
        backlog=_ACCEPTED_AT_ONCE,
        timeout_keep_alive=1,
        timeout_graceful_shutdown=_STOP_SECONDS,
    )
    _Server(config, when_ready).run(sockets=[listener])
