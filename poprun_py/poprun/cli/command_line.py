"""What the words of the command line ask for, as values of poprun's own."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click
from click.core import ParameterSource

from popdist.contract import VERSION
from poprun.cli.command import PoprunCommand
from poprun.cli.options import (
    EXAMPLES,
    ending_options,
    layout_options,
    output_options,
    plan_options,
    start_options,
)
from poprun.errors import UsageError
from poprun.hosts import parse_hosts
from poprun.render import TopologyFormat
from poprun.request import LauncherChoice, LaunchRequest
from poprun.settings import EndingSettings, OutputSettings

_OUTPUT_FIELDS: Final = {
    "only_output_from_instance": "shown_instances",
    "tag_output": "is_tagged",
    "tag_format": "tag_format",
    "fold_output": "is_folded",
    "log_dir": "log_dir",
    "monitor": "has_monitor",
}
_ENDING_FIELDS: Final = {
    "stop_timeout": "stop_timeout_seconds",
    "start_timeout": "start_timeout_seconds",
    "timeout": "timeout_seconds",
    "max_restarts": "max_restarts",
    "hang_report": "hang_report_seconds",
    "hang_timeout": "hang_timeout_seconds",
    "report": "report_file",
}
_WITH_PLAN: Final = {"plan", "dry_run", "print_topology", "topology_format", "verbose", "program"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """One poprun command line.

    Attributes:
        program: The program and its arguments, as written; may be empty.
        given: The other values of a :class:`LaunchRequest` that were given, by their names there.
        output: Those of its :class:`OutputSettings`.
        ending: Those of its :class:`EndingSettings`.
        plan_file: The file of the plan to start, ``-`` for standard input, or None.
        is_dry_run: Whether to print the plan and start nothing.
        prints_topology: Whether to print the plan before it is started.
        topology_format: How to print it.
        verbosity: How often ``-v`` was given.
    """

    program: tuple[str, ...]
    given: Mapping[str, Any]
    output: Mapping[str, Any]
    ending: Mapping[str, Any]
    plan_file: str | None
    is_dry_run: bool
    prints_topology: bool
    topology_format: TopologyFormat
    verbosity: int

    def request(self, program: tuple[str, ...], working_directory: str) -> LaunchRequest:
        """The request, for ``program`` as it was resolved in ``working_directory``."""
        return LaunchRequest(
            program=program,
            working_directory=working_directory,
            output=OutputSettings(**self.output),
            ending=EndingSettings(**self.ending),
            **self.given,
        )


def read_command_line(words: Sequence[str]) -> CommandLine:
    """What ``words``, without the name of poprun, ask for.

    Raises:
        UsageError: If an option cannot be read, or two contradict each other.
        click.ClickException: If an option's value has the wrong type.
        click.exceptions.Exit: After ``--help`` and ``--version`` have printed theirs.
    """
    with _command().make_context("poprun", list(words)) as ctx:
        given = {
            name: value
            for name, value in ctx.params.items()
            if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        }
        return _typed(given)


def _command() -> PoprunCommand:
    return PoprunCommand(
        name="poprun",
        params=[
            *layout_options(),
            *start_options(),
            *ending_options(),
            *output_options(),
            *plan_options(),
            _version_option(),
            click.Argument(
                ["program"], nargs=-1, required=False, type=click.UNPROCESSED, metavar="PROGRAM [ARGS]..."
            ),
        ],
        help="Start PROGRAM as many instances (processes) that train a number of model replicas together.",
        epilog=EXAMPLES,
        context_settings={
            "allow_interspersed_args": False,
            "help_option_names": ["-h", "--help"],
            "max_content_width": 80,
        },
    )


def _version_option() -> click.Option:
    def show(ctx: click.Context, param: click.Parameter, is_given: bool) -> None:  # noqa: FBT001 - click's callback
        del param
        if is_given:
            click.echo(f"poprun {VERSION}")
            ctx.exit()

    return click.Option(
        ["--version"], is_flag=True, is_eager=True, expose_value=False, callback=show, help="Print the version."
    )


def _typed(given: dict[str, Any]) -> CommandLine:
    if "plan" in given:
        _refuse_beside_plan(given)
    return CommandLine(
        program=given.pop("program", ()),
        plan_file=given.pop("plan", None),
        is_dry_run=given.pop("dry_run", False),
        prints_topology=given.pop("print_topology", False),
        topology_format=TopologyFormat(given.pop("topology_format", TopologyFormat.TABLE)),
        verbosity=given.pop("verbose", 0),
        output=_taken(given, _OUTPUT_FIELDS),
        ending=_taken(given, _ENDING_FIELDS),
        given=dict(_field(name, value) for name, value in given.items()),
    )


def _taken(given: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The values of the options ``names``, taken out of ``given``, by the names of the fields that they set."""
    return {field: given.pop(option) for option, field in names.items() if option in given}


def _field(name: str, value: Any) -> tuple[str, Any]:  # noqa: ANN401 - whatever click made of the option
    """The field of a request that option ``name`` sets, and its value there."""
    match name:
        case "host":
            return "hosts", parse_hosts(",".join(value))
        case "deterministic":
            return "is_deterministic", value
        case "launcher":
            return name, LauncherChoice(value)
        case "mpi_global_args" | "mpi_local_args":
            return name, _words(name, value)
        case _:
            return name, value


def _refuse_beside_plan(given: Mapping[str, Any]) -> None:
    others = [f"--{name.replace('_', '-')}" for name in given if name not in _WITH_PLAN]
    if others:
        raise UsageError(f"--plan says it all: leave out {', '.join(others)}, or make a new plan with --dry-run")


def _words(name: str, texts: Sequence[str]) -> tuple[str, ...]:
    """The words of each text, as a shell splits them."""
    try:
        return tuple(word for text in texts for word in shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--{name.replace('_', '-')} {' '.join(texts)!r}: {str(error).lower()}") from None
