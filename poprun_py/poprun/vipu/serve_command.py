"""The command `vipu serve`, which hands out the pool of this machine to other hosts."""

import os
import socket
import time
from collections.abc import Callable
from typing import Final

import click

from poprun.devices.pool.holders import sole_server
from poprun.devices.pool.requests import MAX_IPUS
from poprun.devices.server.served_leases import ClientLeases
from poprun.devices.server.server_client import TOKEN_VARIABLE, make_token, read_token, token_file
from poprun.devices.server.target_pool import LocalPool, served_pool
from poprun.errors import PlanError, ServerError
from poprun.plan.inventory import Cluster
from poprun.plan.request import DEFAULT_PORT
from poprun.text.screen import visible

_LOOK_SECONDS: Final = 5.0
"""How long the server takes what it has seen of its devices for true."""

_EXTRA: Final = "vipu serve needs two more packages: pip install 'poprun[serve]'"
_HOST: Final = "127.0.0.1"
_LEASE_SECONDS: Final = 30
_IN_CLEAR: Final = (
    "warning: the token and all else travel in clear text: serve a network that you trust, or 127.0.0.1, which "
    "clients reach through ssh -L"
)


@click.command()
@click.option(
    "--host",
    default=_HOST,
    metavar="HOST",
    help=f"Address to listen at; 0.0.0.0 is every one of this machine.  [default: {_HOST}]",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    metavar="PORT",
    help=f"Port to listen at; 0 is any.  [default: {DEFAULT_PORT}]",
)
@click.option(
    "--token-file",
    "token",
    metavar="FILE",
    help=f"The token that clients need; made when it is not there.  [default: {TOKEN_VARIABLE}, or vipu-token in "
    "~/.config/poprun]",
)
@click.option(
    "--lease-seconds",
    type=click.FloatRange(2, 3600),
    default=_LEASE_SECONDS,
    metavar="SECONDS",
    help=f"When to end the lease of a job of which nothing is heard.  [default: {_LEASE_SECONDS}]",
)
def serve(host: str, port: int, token: str | None, lease_seconds: float) -> None:
    """Hand out virtual IPUs to other hosts.

    They are those of this machine, or of the pod that POPRUN_POD names. Jobs take theirs with poprun
    --vipu-server-host, and vipu --server-host shows them. Both need the token.
    """
    try:
        from poprun.devices.server import answers, server  # noqa: PLC0415 - the extra is needed here only
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("anyio", "starlette", "uvicorn", "h11"):
            raise
        raise ServerError(f"{_EXTRA} ({error.name} is missing)") from None
    local = served_pool()
    local = LocalPool(local.pool, _remembered(local.cluster))
    cluster = local.cluster()
    if len(cluster.ipus) > MAX_IPUS:
        raise PlanError(f"{cluster.name} has {len(cluster.ipus):,} IPUs: a server hands out {MAX_IPUS:,} at most")
    local.state()
    file = os.path.abspath(token) if token else token_file(os.environ)
    is_new = make_token(file)
    secret = read_token(file)
    with sole_server(local.pool.path), server.listen(host, port) as listener:
        leases = ClientLeases(local, lease_seconds, _log)
        lines = [_where(listener, cluster, local), f"clients need the token in {file}"]
        lines[-1] += ", which was made now" if is_new else ""
        if (num_known := leases.know_again()) > 0:
            lines.append(
                f"leases of an earlier server: {num_known}; they end in {lease_seconds:g} s unless renewed"
            )
        if not server.is_loopback(listener):
            lines.append(_IN_CLEAR)
        server.serve(answers.make_app(local, leases, secret), listener, lambda: _log(*lines))
        _log("stopped; the leases of jobs stay, and a server that starts again knows them")


def _where(listener: socket.socket, cluster: Cluster, local: LocalPool) -> str:
    address, port = listener.getsockname()[:2]
    there = f"[{address}]" if ":" in address else address
    return f"serving {_size(cluster)} of pool {local.pool.path} at http://{there}:{port}"


def _size(cluster: Cluster) -> str:
    if cluster.is_open:
        return f"{cluster.name}, as many virtual IPUs as jobs take"
    return f"{cluster.name}, {len(cluster.ipus)} virtual IPUs"


def _log(*texts: str) -> None:
    for text in texts:
        click.echo(f"{time.strftime('%H:%M:%S')} vipu: {visible(text)}", err=True)


def _remembered(find: Callable[[], Cluster]) -> Callable[[], Cluster]:
    """``find``, asked every few seconds at most: it may start a program of the driver's."""
    found: list[tuple[float, Cluster]] = []

    def look() -> Cluster:
        now = time.monotonic()
        if not found or now - found[0][0] > _LOOK_SECONDS:
            found[:] = [(now, find())]
        return found[0][1]

    return look
