"""The command line of the `vipu` program."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import click

from popdist.contract import VERSION
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
from poprun.devices.pool.records import fold_names
from poprun.devices.server.server_client import RemotePool
from poprun.devices.server.target_pool import LocalPool, target_pool
from poprun.errors import PartitionError, PoprunError
from poprun.plan.request import DEFAULT_PORT, VipuSettings
from poprun.text.screen import visible, write_any_letter
from poprun.vipu.serve_command import serve

_SETTINGS: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 80}
_INTERRUPTED: Final = 130
_TIMEOUT_SECONDS: Final = VipuSettings().server_timeout_seconds


def main() -> None:
    """Run `vipu` with the words of this process and end it."""
    write_any_letter()
    try:
        vipu.main(prog_name="vipu", standalone_mode=False)
    except PoprunError as error:
        _fail(str(error), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except click.Abort:
        sys.exit(_INTERRUPTED)


def _fail(message: str, exit_code: int) -> None:
    text = visible(message, keeps="\n")
    click.echo(f"vipu: error: {text}", err=True)
    sys.exit(exit_code)


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
    """Look at the virtual IPUs of this machine, and keep some together as partitions.

    A virtual IPU is a GPU, a share of the cores, or a place of the pod that POPRUN_POD names. They are handed out
    from one pool for all users of the machine; POPRUN_POOL names another one. vipu serve hands them out to other
    hosts, too.
    """
    ctx.obj = partial(target_pool, server_host, server_port, timeout)


vipu.add_command(serve)


class _Nouns(click.Group):
    """Commands by nouns that may stand in the plural: ``list partition``, ``list partitions``."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a noun."""
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


@vipu.group("list", cls=_Nouns)
def list_group() -> None:
    """Show all partitions, IPUs, allocations or clusters."""


@list_group.command("partitions")
@_with_output
def list_partitions(output: str) -> None:
    """Show the partitions, and who uses them."""
    columns = ("partition", "size", "ilds", "state", "ipus", "used_by", "waiting")
    _show(partition_rows(_pool().state()), output, columns)


@list_group.command("ipus")
@_with_output
def list_ipus(output: str) -> None:
    """Show the virtual IPUs, and who uses them."""
    pool = _pool()
    columns = ("ipu", "name", "machine", "ild", "partition", "used_by")
    _show(ipu_rows(pool.cluster(), pool.state()), output, columns)


@list_group.command("allocations")
@_with_output
def list_allocations(output: str) -> None:
    """Show the parts of the cluster that partitions can be made in."""
    pool = _pool()
    columns = ("allocation", "cluster", "ipus", "free", "partitions")
    _show(allocation_rows(pool.cluster(), pool.state()), output, columns)


@list_group.command("clusters")
@_with_output
def list_clusters(output: str) -> None:
    """Show the cluster of this machine."""
    pool = _pool()
    columns = ("cluster", "kind", "ipus", "free", "ilds", "ild_size", "hosts")
    _show(cluster_rows(pool.cluster(), pool.state()), output, columns)


@vipu.group(cls=_Nouns)
def get() -> None:
    """Show one partition."""


@get.command("partition")
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
        click.echo(render_json(row), nl=False)
    else:
        for key, value in row.items():
            click.echo(f"{key.replace('_', ' '):<12} {'-' if value == '' else visible(str(value))}")


@vipu.group(cls=_Nouns)
def create() -> None:
    """Make a partition."""


@create.command("partition")
@click.argument("name")
@click.option("-s", "--size", type=int, required=True, help="How many IPUs: a power of two.")
@click.option("-a", "--allocation", help="The part of the cluster to take them from. [default: all of it]")
@click.option("-c", "--cluster", help="The cluster; there is one.")
def create_partition(name: str, size: int, allocation: str | None, cluster: str | None) -> None:
    """Make the partition NAME of free IPUs of one IPU-Link domain, or of several."""
    made = _pool().create_partition(name, size, allocation=allocation, cluster=cluster)
    click.echo(f"create partition ({name}): success: {fold_names(made.ipus)}")


@vipu.group(cls=_Nouns)
def reset() -> None:
    """Choose the IPUs of a partition anew."""


@reset.command("partition")
@click.argument("name")
def reset_partition(name: str) -> None:
    """Choose the IPUs of the partition NAME anew, as when one of them has gone."""
    made = _pool().reset_partition(name)
    click.echo(f"reset partition ({name}): success: {fold_names(made.ipus)}")


@vipu.group(cls=_Nouns)
def remove() -> None:
    """Remove a partition."""


@remove.command("partition")
@click.argument("name")
def remove_partition(name: str) -> None:
    """Remove the partition NAME, unless a job runs in it."""
    _pool().remove_partition(name)
    click.echo(f"remove partition ({name}): success")


def _pool() -> LocalPool | RemotePool:
    pool: Callable[[], LocalPool | RemotePool] = click.get_current_context().obj
    return pool()


def _show(rows: Sequence[Row], output: str, columns: Sequence[str]) -> None:
    click.echo(render_json(rows) if output == "json" else render_rows(rows, columns), nl=False)
