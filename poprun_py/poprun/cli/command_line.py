"""What the words of the command line ask for, as values of poprun's own."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from poprun.cli.command import PoprunCommand
from poprun.cli.option import LINE, REQUEST, Given, values_by_section
from poprun.cli.options import EXAMPLES, OPTIONS
from poprun.cli.origins import from_variables, from_words, layered, read_config_file
from poprun.cli.versions import VersionFormat
from poprun.doctor import ReportFormat
from poprun.emit import EmitKind
from poprun.errors import UsageError
from poprun.plan.request import LaunchRequest
from poprun.plan.settings import EndingSettings, OutputSettings, RemoteSettings, VipuSettings
from poprun.render import TopologyFormat
from poprun.text.host_names import read_host_file

_PLAN: Final = "plan"
_IMPORT: Final = "import-config"
_FORMAT: Final = "topology-format"
_EVERYTHING: Final = 2
_REPORT_FORMAT: Final = "format"
_INTRO: Final = "Start PROGRAM as many instances (processes) that train a number of model replicas together."


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """One poprun command line.

    The fields below ``program`` and ``given`` are the section ``line`` of the table of options.

    Attributes:
        program: The program and its arguments, as written; may be empty.
        given: The options that were given.
        values: The values of a :class:`LaunchRequest` that they set, by section and name there.
        config_file: The file of options that was read, or None.
        exported_file: The file that the options are to be written to, or None.
        may_overwrite: Whether that file may be there already.
        plan_file: The file of the plan to start, ``-`` for standard input, or None.
        is_dry_run: Whether to print the plan and start nothing.
        prints_topology: Whether to print the plan before it is started.
        prints_version: Whether to print the version and do nothing else.
        version_format: How to print it; not None prints it, too.
        host_file: A file of hosts, or None.
        topology_format: How to print it.
        asks_doctor: Whether to tell what poprun would use on this machine, and do nothing else.
        report_format: How to tell it.
        emitted: The kind of job to write for a cluster in place of starting one, or None.
        image: The container image of such a job, or None.
        verbosity: How often ``-v`` was given.
    """

    program: tuple[str, ...] = ()
    given: tuple[Given, ...] = ()
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    config_file: str | None = None
    exported_file: str | None = None
    may_overwrite: bool = False
    plan_file: str | None = None
    is_dry_run: bool = False
    prints_topology: bool = False
    prints_version: bool = False
    version_format: VersionFormat | None = None
    host_file: str | None = None
    topology_format: TopologyFormat = TopologyFormat.TABLE
    asks_doctor: bool = False
    report_format: ReportFormat = ReportFormat.TABLE
    emitted: EmitKind | None = None
    image: str | None = None
    verbosity: int = 0

    def request(self, program: tuple[str, ...], working_directory: str) -> LaunchRequest:
        """The request, for ``program`` as it was resolved in ``working_directory``.

        Where nobody has said how many instances, several hosts have one each.
        """
        asked = self.values.get("request", {})
        if len(asked.get("hosts", ())) > 1:
            asked = {"num_instances": len(asked["hosts"]), **asked}
        return LaunchRequest(
            program=program,
            working_directory=working_directory,
            output=OutputSettings(**self.values.get("output", {})),
            ending=EndingSettings(**self.values.get("ending", {})),
            remote=RemoteSettings(**self.values.get("remote", {})),
            vipu=VipuSettings(**self.values.get("vipu", {})),
            **asked,
        )


def read_command_line(words: Sequence[str], environ: Mapping[str, str] = os.environ) -> CommandLine:
    """What ``words``, without the name of poprun, ask for; under them lie the variables of ``environ`` and a file.

    Raises:
        PoprunError: If an option cannot be read, or two contradict each other.
        click.exceptions.Exit: After ``--help`` has printed its page.
    """
    texts, program = PoprunCommand(OPTIONS, intro=_INTRO, examples=EXAMPLES).texts(words)
    flags = tuple(from_words(texts))
    if _PLAN in texts:
        _refuse_beside_plan(flags)
        given = layered((one for one in from_variables(environ) if one.option.goes_with_plan), flags)
    else:
        file = read_config_file(texts[_IMPORT][-1]) if _IMPORT in texts else ()
        given = layered(file, from_variables(environ), flags)
    values = values_by_section(given)
    line = CommandLine(program=program, given=given, values=values, **values.pop(LINE, {}))
    if line.host_file is not None:
        _take_hosts(values.setdefault(REQUEST, {}), line.host_file)
    if _FORMAT in texts and not (line.is_dry_run or line.prints_topology or line.prints_version):
        raise UsageError(
            f"--{_FORMAT} says how the plan is printed, and it is not: add --dry-run to look only, "
            "or --print-topology to print it and start"
        )
    if values.get(REQUEST, {}).get("is_debugged"):
        line = replace(line, verbosity=max(line.verbosity, _EVERYTHING))
    if _REPORT_FORMAT in texts and not line.asks_doctor:
        raise UsageError(f"--{_REPORT_FORMAT} says how --doctor prints: for that of a plan, use --{_FORMAT}")
    return line


def _take_hosts(request: dict[str, Any], host_file: str) -> None:
    if "hosts" in request:
        raise UsageError(f"--hostfile {host_file} and --host both name the hosts: leave one of them out")
    request["hosts"] = read_host_file(host_file)


def _refuse_beside_plan(given: Sequence[Given]) -> None:
    others = [f"--{one.option.name}" for one in given if not one.option.goes_with_plan]
    if others:
        raise UsageError(f"--plan says it all: leave out {', '.join(others)}, or make a new plan with --dry-run")
