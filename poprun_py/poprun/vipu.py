"""The `vipu` program: it lists, makes, resets and removes partitions of virtual IPUs, and serves other hosts.

Its commands are the commands of Graphcore's program of this name. It uses the pool of this machine or of a server.
"""

import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import click

from popdist.ground.contract import VERSION
from poprun.devices.pool.clusters import choose_cluster, pod_of
from poprun.devices.pool.folder import BUSY_SECONDS
from poprun.devices.pool.listing import (
    Row,
    allocation_rows,
    cluster_rows,
    ipu_rows,
    partition_row,
    partition_rows,
    render_json,
    render_rows,
)
from poprun.devices.pool.place import POOL_VARIABLE, pool_folder
from poprun.devices.pool.pool import Pool
from poprun.devices.pool.records import fold_names
from poprun.devices.pool.requests import MAX_IPUS
from poprun.devices.server.served_leases import ClientLeases
from poprun.devices.server.server_client import (
    TOKEN_VARIABLE,
    RemotePool,
    make_token,
    pool_at,
    read_token,
    token_file,
)
from poprun.devices.server.sole_server import sole_server
from poprun.errors import PartitionError, PlanError, ServerError
from poprun.hosts.probe.gpus import find_gpus
from poprun.hosts.probe.machine import usable_cores
from poprun.plan.inventory import Cluster
from poprun.plan.request import DEFAULT_PORT, VipuSettings
from poprun.text.screen import print_out, run_click, visible

AnyPool = Pool | RemotePool

_SETTINGS: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 80}
_TIMEOUT_SECONDS: Final = VipuSettings().server_timeout_seconds
_POD_VARIABLE: Final = "POPRUN_POD"
_IPUS_VARIABLE: Final = "POPRUN_IPUS_PER_HOST"


def main() -> None:
    """Run `vipu` with the arguments of this process and end the process."""
    sys.exit(run_click(vipu, "vipu"))


@click.group(context_settings=_SETTINGS)
@click.version_option(VERSION, message="vipu %(version)s")
@click.option(
    "--server-host",
    envvar="POPRUN_VIPU_SERVER_HOST",
    metavar="HOST",
    help="Ask the server there.  [default: this machine's pool]",
)
@click.option(
    "--server-port",
    envvar="POPRUN_VIPU_SERVER_PORT",
    type=click.IntRange(1, 65535),
    default=DEFAULT_PORT,
    metavar="PORT",
    help=f"Its port.  [default: {DEFAULT_PORT}]",
)
@click.option(
    "--timeout",
    envvar="POPRUN_VIPU_SERVER_TIMEOUT",
    type=click.FloatRange(0, min_open=True),
    default=_TIMEOUT_SECONDS,
    metavar="SECONDS",
    help=f"How long it may take to answer.  [default: {_TIMEOUT_SECONDS:g}]",
)
@click.pass_context
def vipu(ctx: click.Context, server_host: str | None, server_port: int, timeout: float) -> None:
    """Show the virtual IPUs of this machine, and reserve some of them together as partitions.

    A virtual IPU is a GPU, a share of the cores, or a place of the pod that POPRUN_POD names. They are handed out
    from one pool for all users of the machine; POPRUN_POOL names another one. vipu serve hands them out to other
    hosts, too.
    """
    here = partial(Pool, pool_folder(os.environ.get(POOL_VARIABLE)), BUSY_SECONDS, _cluster_here)
    ctx.obj = here if server_host is None else partial(pool_at, server_host, server_port, timeout)


class _Nouns(click.Group):
    """A group of commands whose nouns may be singular or plural: ``list partition`` or ``list partitions``."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command ``cmd_name``, a noun in singular or plural; None if there is no such command."""
        for name in (cmd_name, f"{cmd_name}s", cmd_name.removesuffix("s")):
            if (found := super().get_command(ctx, name)) is not None:
                return found
        return None


def _with_output(command: Callable[..., None]) -> Callable[..., None]:
    option: Callable[[Callable[..., None]], Callable[..., None]] = click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="How to print it.",
    )
    return option(command)


def _verb(name: str, help_text: str) -> click.Group:
    """Add the verb ``name``, such as list, to `vipu` as a group of commands for nouns, and return the group."""
    group = _Nouns(name, help=help_text)
    vipu.add_command(group)
    return group


_LIST: Final = _verb("list", "Show all partitions, IPUs, allocations or clusters.")
_GET: Final = _verb("get", "Show one partition.")
_CREATE: Final = _verb("create", "Make a partition.")
_RESET: Final = _verb("reset", "Choose the IPUs of a partition anew.")
_REMOVE: Final = _verb("remove", "Remove a partition.")


def _add_listing(noun: str, help_text: str, rows: Callable[[AnyPool], list[Row]], columns: str) -> None:
    """Add to `vipu list` the command ``noun``, which prints the result of ``rows`` as a table or JSON."""

    def show(output: str) -> None:
        found = rows(_pool())
        print_out(render_json(found) if output == "json" else render_rows(found, columns.split()))

    _LIST.command(noun, help=help_text)(_with_output(show))


_add_listing(
    "partitions",
    "Show the partitions, and who uses them.",
    lambda pool: partition_rows(pool.state()),
    "partition size ilds state ipus used_by waiting",
)
_add_listing(
    "ipus",
    "Show the virtual IPUs, and who uses them.",
    lambda pool: ipu_rows(pool.cluster(), pool.state()),
    "ipu name machine ild partition used_by",
)
_add_listing(
    "allocations",
    "Show the parts of the cluster that partitions can be made in.",
    lambda pool: allocation_rows(pool.cluster(), pool.state()),
    "allocation cluster ipus free partitions",
)
_add_listing(
    "clusters",
    "Show the cluster of this machine.",
    lambda pool: cluster_rows(pool.cluster(), pool.state()),
    "cluster kind ipus free ilds ild_size hosts",
)


@_GET.command("partition")
@click.argument("name")
@_with_output
def get_partition(name: str, output: str) -> None:
    """Show everything about the partition NAME."""
    state = _pool().state()
    found = state.partition(name)
    if found is None:
        raise PartitionError(f"there is no partition {name}: vipu list partitions shows those there are")
    row = partition_row(found, state)
    if output == "json":
        print_out(render_json(row))
    else:
        for key, value in row.items():
            print_out(f"{key.replace('_', ' '):<12} {'-' if value == '' else visible(str(value))}\n")


@_CREATE.command("partition")
@click.argument("name")
@click.option("-s", "--size", type=int, required=True, help="How many IPUs: a power of two.")
@click.option("-a", "--allocation", help="The part of the cluster to take them from. [default: all of it]")
@click.option("-c", "--cluster", help="The cluster; there is one.")
def create_partition(name: str, size: int, allocation: str | None, cluster: str | None) -> None:
    """Make the partition NAME of free IPUs of one IPU-Link domain, or of several."""
    made = _pool().create_partition(name, size, allocation=allocation, cluster=cluster)
    print_out(f"create partition ({name}): success: {fold_names(made.ipus)}\n")


@_RESET.command("partition")
@click.argument("name")
def reset_partition(name: str) -> None:
    """Choose the IPUs of the partition NAME anew, for example after an IPU has gone."""
    made = _pool().reset_partition(name)
    print_out(f"reset partition ({name}): success: {fold_names(made.ipus)}\n")


@_REMOVE.command("partition")
@click.argument("name")
def remove_partition(name: str) -> None:
    """Remove the partition NAME, unless a job runs in it."""
    _pool().remove_partition(name)
    print_out(f"remove partition ({name}): success\n")


def _pool() -> AnyPool:
    pool: Callable[[], AnyPool] = click.get_current_context().obj
    return pool()


def _cluster_here() -> Cluster:
    """Return this machine's virtual IPUs: IPUs of the pod in POPRUN_POD, else its GPUs, else parts of its CPU."""
    pod = os.environ.get(_POD_VARIABLE)
    num_ipus = os.environ.get(_IPUS_VARIABLE)
    if num_ipus is not None and not num_ipus.isdecimal():
        raise PlanError(f"{_IPUS_VARIABLE} {num_ipus!r}: give a whole number")
    return choose_cluster(
        socket.gethostname(),
        find_gpus(os.environ),
        len(usable_cores()),
        ipus_per_host=None if num_ipus is None else int(num_ipus),
        pod=pod_of(pod) if pod else None,
    )


_SERVER_BUSY_SECONDS: Final = 10.0
_REMEMBER_SECONDS: Final = 5.0  # how long the server uses a list of its devices before it lists them again
_EXTRA: Final = "vipu serve needs two more packages: pip install 'poprun[serve]'"
_HOST: Final = "127.0.0.1"
_LEASE_SECONDS: Final = 30
_IN_CLEAR: Final = (
    "warning: all but the token travels in clear text: serve a network that you trust, or 127.0.0.1, which "
    "clients reach through ssh -L"
)


@vipu.command()
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

    The server has the virtual IPUs of this machine, or of the pod that POPRUN_POD names. Jobs get virtual IPUs
    with poprun --vipu-server-host, and vipu --server-host shows them. Both need the token.
    """
    try:
        from poprun.devices.server import server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("anyio", "starlette", "uvicorn", "h11"):
            raise
        raise ServerError(f"{_EXTRA} ({error.name} is missing)") from None
    pool = Pool(pool_folder(os.environ.get(POOL_VARIABLE)), _SERVER_BUSY_SECONDS, _remembered(_served_cluster))
    cluster = pool.cluster()
    if len(cluster.ipus) > MAX_IPUS:
        raise PlanError(f"{cluster.name} has {len(cluster.ipus):,} IPUs: a server hands out {MAX_IPUS:,} at most")
    pool.state()
    file = os.path.abspath(token) if token else token_file(os.environ)
    is_new = make_token(file)
    secret = read_token(file)
    with sole_server(pool.path), server.listen(host, port) as listener:
        leases = ClientLeases(pool, lease_seconds, _log)
        lines = [_where(listener, cluster, pool), f"clients need the token in {file}"]
        lines[-1] += ", which was made now" if is_new else ""
        if (num_known := leases.adopt()) > 0:
            lines.append(
                f"leases of an earlier server: {num_known}; they end in {lease_seconds:g} s unless renewed"
            )
        if not server.is_loopback(listener):
            lines.append(_IN_CLEAR)
        server.serve(server.make_app(pool, leases, secret), listener, lambda: _log(*lines))
        _log("stopped; the leases of jobs stay, and a server that starts again knows them")


def _where(listener: socket.socket, cluster: Cluster, pool: Pool) -> str:
    address, port = listener.getsockname()[:2]
    there = f"[{address}]" if ":" in address else address
    return f"serving {_size(cluster)} of pool {pool.path} at http://{there}:{port}"


def _size(cluster: Cluster) -> str:
    if cluster.is_open:
        return f"{cluster.name}, as many virtual IPUs as jobs take"
    return f"{cluster.name}, {len(cluster.ipus)} virtual IPUs"


def _log(*texts: str) -> None:
    for text in texts:
        click.echo(f"{time.strftime('%H:%M:%S')} vipu: {visible(text)}", err=True)


def _served_cluster() -> Cluster:
    """Return the virtual IPUs that this server hands out: of the pod that POPRUN_POD names, or of this machine."""
    pod = os.environ.get(_POD_VARIABLE)
    return pod_of(pod) if pod else _cluster_here()


def _remembered(find: Callable[[], Cluster]) -> Callable[[], Cluster]:
    """Return a function that calls the slow function ``find`` and caches its result for 5 s."""
    found: list[tuple[float, Cluster]] = []

    def find_again() -> Cluster:
        now = time.monotonic()
        if not found or now - found[0][0] > _REMEMBER_SECONDS:
            found[:] = [(now, find())]
        return found[0][1]

    return find_again


if __name__ == "__main__":
    main()
