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
from typing import Any, Final

import anyio
from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from poprun.devices.pool.holders import boot_id
from poprun.devices.pool.records import Partition
from poprun.devices.server.served_leases import LOOK_SECONDS, ClientLeases
from poprun.devices.server.server_connection import PATH, kind_of
from poprun.devices.server.server_messages import (
    NewPartition,
    Nothing,
    ServedPool,
    read_question,
)
from poprun.devices.server.target_pool import LocalPool
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
from poprun.text.fields import write_record

MAX_BODY_BYTES: Final = 64 * 1024
MAX_HEADERS: Final = 40

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


def commands_of(local: LocalPool, leases: ClientLeases) -> Mapping[str, Callable[[Any], object]]:
    """What the server does for each command, with the question of the client; None is an answer without fields."""

    def pool(_: Nothing) -> ServedPool:
        return ServedPool(
            boot_id=boot_id(),
            lease_seconds=leases.lease_seconds,
            cluster=local.cluster(),
            state=local.state(),
        )

    def create(wanted: NewPartition) -> Partition:
        return local.create_partition(
            wanted.name, wanted.size, allocation=wanted.allocation, cluster=wanted.cluster, user=wanted.user
        )

    return {
        "pool": pool,
        "create-partition": create,
        "reset-partition": lambda wanted: local.reset_partition(wanted.name),
        "remove-partition": lambda wanted: local.remove_partition(wanted.name),
        "take-lease": leases.take,
        "renew-lease": lambda wanted: leases.renew(wanted.key),
        "end-lease": lambda wanted: leases.end(wanted.key),
    }


def make_app(local: LocalPool, leases: ClientLeases, token: str) -> Starlette:
    """The application that answers the clients who know ``token``, and ends leases that are not renewed."""
    commands = commands_of(local, leases)
    threads: list[anyio.CapacityLimiter] = []

    def carry_out(command: str, values: object) -> dict[str, object]:
        if command not in commands:
            raise RefusalError(404, f"there is no command {command[:40]!r}")
        return write_record(commands[command](read_question(command, values)) or Nothing())

    async def answer(request: Request) -> Response:
        try:
            _admit(request, token)
            command = request.path_params["command"]
            values = _json(await _body(request))
            return JSONResponse(await to_thread.run_sync(carry_out, command, values, limiter=threads[0]))
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
            tasks.start_soon(_end_expired, leases)
            yield
            tasks.cancel_scope.cancel()

    return Starlette(routes=[Route(f"{PATH}{{command}}", answer, methods=["POST"])], lifespan=life)


async def _end_expired(leases: ClientLeases) -> None:
    """End leases that are not renewed any more, also after the pool could not be used for a while."""
    while True:
        with suppress(PoprunError):
            await to_thread.run_sync(leases.end_expired)
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
