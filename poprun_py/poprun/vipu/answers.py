"""The server's answers: who may ask, what, and how much of it at a time. An ASGI application.

A request is looked at in this order: its headers are counted, its token is compared, its body is read up to a
limit, its JSON is read, and each of its fields is checked. What fails is answered in one line, with no traceback.
"""

import hmac
import json
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Final

import anyio
from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from poprun.errors import (
    IpusTakenError,
    LeaseEndedError,
    PartitionError,
    PlanError,
    PoolError,
    PoprunError,
    ServerError,
    ServerLostError,
)
from poprun.lease.server_connection import PATH, kind_of
from poprun.pool.holders import boot_id
from poprun.pool.server_messages import (
    ServedPool,
    key_of_lease,
    number_of,
    optional_text_of,
    pool_to_dict,
    read_request,
    reader,
    text_of,
)
from poprun.vipu.served_leases import LOOK_SECONDS, LeaseDesk
from poprun.vipu.target_pool import LocalPool

MAX_BODY_BYTES: Final = 64 * 1024
MAX_HEADERS: Final = 40

_SOURCE: Final = "request"
_NUM_THREADS: Final = 4
_STATUS: Final[Mapping[type[PoprunError], int]] = {
    PlanError: 400,
    PartitionError: 409,
    IpusTakenError: 409,
    PoolError: 503,
    ServerLostError: 503,
    LeaseEndedError: 410,
}


class RefusalError(Exception):
    """A request that is not carried out, with the status of its answer."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Commands:
    """What clients may ask for; each method is one command, and takes what JSON was sent.

    Args:
        local: The pool.
        desk: The leases of the clients.
    """

    def __init__(self, local: LocalPool, desk: LeaseDesk) -> None:
        self._local = local
        self._desk = desk

    def named(self, name: str) -> Callable[[object], object]:
        """The command of that name.

        Raises:
            RefusalError: If there is none.
        """
        known: dict[str, Callable[[object], object]] = {
            "pool": self._pool,
            "create-partition": self._create,
            "reset-partition": self._reset,
            "remove-partition": self._remove,
            "take-lease": self._take,
            "renew-lease": self._renew,
            "end-lease": self._end,
        }
        if name not in known:
            raise RefusalError(404, f"there is no command {name[:40]!r}")
        return known[name]

    def _pool(self, values: object) -> object:
        reader(values, _SOURCE).expect_keys(())
        served = ServedPool(
            boot_id=boot_id(),
            lease_seconds=self._desk.lease_seconds,
            cluster=self._local.cluster(),
            state=self._local.state(),
        )
        return pool_to_dict(served)

    def _create(self, values: object) -> object:
        read = reader(values, _SOURCE)
        read.expect_keys(("name", "size", "allocation", "cluster", "user"))
        made = self._local.create_partition(
            text_of(read, "name"),
            number_of(read, "size"),
            allocation=optional_text_of(read, "allocation"),
            cluster=optional_text_of(read, "cluster"),
            user=text_of(read, "user"),
        )
        return asdict(made)

    def _reset(self, values: object) -> object:
        return asdict(self._local.reset_partition(_name(values)))

    def _remove(self, values: object) -> object:
        self._local.remove_partition(_name(values))
        return {}

    def _take(self, values: object) -> object:
        return asdict(self._desk.take(read_request(values, _SOURCE)))

    def _renew(self, values: object) -> object:
        self._desk.renew(_key(values))
        return {}

    def _end(self, values: object) -> object:
        self._desk.end(_key(values))
        return {}


def make_app(local: LocalPool, desk: LeaseDesk, token: str) -> Starlette:
    """The application that answers the clients who know ``token``, and ends leases that are not renewed."""
    commands = Commands(local, desk)
    threads: list[anyio.CapacityLimiter] = []

    async def answer(request: Request) -> Response:
        try:
            _admit(request, token)
            command = commands.named(request.path_params["command"])
            values = _json(await _body(request))
            return JSONResponse(await to_thread.run_sync(command, values, limiter=threads[0]))
        except RefusalError as error:
            return JSONResponse({"error": str(error)}, error.status)
        except PoprunError as error:
            kind = "" if isinstance(error, ServerError) else kind_of(error)
            return JSONResponse({"error": str(error), "kind": kind}, _STATUS.get(type(error), 400))
        except Exception:  # noqa: BLE001 - the client learns nothing of it, and the server goes on
            traceback.print_exc(file=sys.stderr)
            return JSONResponse({"error": "the server has failed: its own output says why"}, 500)

    @asynccontextmanager
    async def life(_: Starlette) -> AsyncIterator[None]:
        threads.append(anyio.CapacityLimiter(_NUM_THREADS))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_look_after, desk)
            yield
            tasks.cancel_scope.cancel()

    return Starlette(routes=[Route(f"{PATH}{{command}}", answer, methods=["POST"])], lifespan=life)


async def _look_after(desk: LeaseDesk) -> None:
    """End leases that are not renewed any more, also after the pool could not be used for a while."""
    while True:
        with suppress(PoprunError):
            await to_thread.run_sync(desk.end_expired)
        await anyio.sleep(LOOK_SECONDS)


def _admit(request: Request, token: str) -> None:
    """Let those in who know the token; the time that takes says nothing about it."""
    if len(request.headers) > MAX_HEADERS:
        raise RefusalError(431, f"more than {MAX_HEADERS} headers")
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), token.encode()):
        raise RefusalError(401, "this is not its token: copy the file that vipu serve named when it started")


async def _body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise RefusalError(413, f"a request has {MAX_BODY_BYTES} bytes at most")
    return body


def _json(body: bytes) -> object:
    try:
        values: object = json.loads(body)
    except (ValueError, RecursionError):
        raise RefusalError(400, "the request is no JSON") from None
    return values


def _name(values: object) -> str:
    read = reader(values, _SOURCE)
    read.expect_keys(("name",))
    return text_of(read, "name")


def _key(values: object) -> str:
    read = reader(values, _SOURCE)
    read.expect_keys(("key",))
    return key_of_lease(read)
