"""What the command line, the variables and a file of options ask for, as values of poprun's own."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from poprun.cli.option import COMPLETION, HELP, HELP_ALL, LINE, REQUEST, VARIABLE_PREFIX, Given, values_by_section
from poprun.cli.options import OPTIONS, default_of
from poprun.cli.spelling import normalise, texts_of, vocabulary_of
from poprun.errors import UsageError
from poprun.plan.request import LaunchRequest
from poprun.plan.settings import EndingSettings, OutputSettings, RemoteSettings, VipuSettings
from poprun.text.formats import EmitKind, ReportFormat, TopologyFormat, VersionFormat
from poprun.text.host_names import read_host_file
from poprun.text.input_files import read_text

NOT_LOCAL: Final = {option.name: option for option in OPTIONS if not option.is_local}
"""What variables and files may hold, by name."""

_PLAN: Final = "plan"
_IMPORT: Final = "import-config"
_TOPOLOGY_FORMAT: Final = "topology-format"
_REPORT_FORMAT: Final = "format"
_DEBUG_VERBOSITY: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A command line of poprun, read and checked.

    The fields below ``values`` are the section ``line`` of the table of options.

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
        version_format: How to print the version; not None prints it, too.
        host_file: A file of hosts, or None.
        topology_format: How to print the plan.
        asks_doctor: Whether to tell what poprun would use on this machine, and do nothing else.
        report_format: How to tell that.
        emitted: The kind of job to write for a cluster in place of starting one, or None.
        image: The container image of such a job, or None.
        verbosity: How often ``-v`` was given.
        help_option: The option whose help page was asked for, or None; nothing else is done then.
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
    help_option: str | None = None

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
    """
    vocabulary = vocabulary_of(OPTIONS)
    texts, program = texts_of(normalise(list(words), vocabulary), vocabulary.flags)
    for name in texts:
        if f"--{name}" in (HELP, HELP_ALL):
            return CommandLine(help_option=f"--{name}")
    flags = [Given(option=option, texts=texts[option.name]) for option in OPTIONS if option.name in texts]
    if _PLAN in texts:
        _refuse_beside_plan(flags)
        given = _layered((one for one in _from_variables(environ) if one.option.goes_with_plan), flags)
    else:
        file = _read_config_file(texts[_IMPORT][-1]) if _IMPORT in texts else ()
        given = _layered(file, _from_variables(environ), flags)
    values = values_by_section(given)
    line = CommandLine(program=program, given=given, values=values, **values.pop(LINE, {}))
    if line.host_file is not None:
        _take_hosts(values.setdefault(REQUEST, {}), line.host_file)
    if values.get(REQUEST, {}).get("is_debugged"):
        line = replace(line, verbosity=max(line.verbosity, _DEBUG_VERBOSITY))
    _check_formats(line, texts)
    return line


def _from_variables(environ: Mapping[str, str]) -> Iterator[Given]:
    """The options that variables of ``environ`` give; an empty variable gives nothing."""
    for option in NOT_LOCAL.values():
        if text := environ.get(option.variable):
            yield Given(option=option, texts=(text,), place=option.variable)


def _read_config_file(path: str) -> tuple[Given, ...]:
    """The options that the file at ``path`` gives; what is wrong with it is an error that names the line."""
    from poprun.cli.config_file import read_config  # noqa: PLC0415 - yaml is expensive, and most jobs have no file

    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--import-config {path}: {getattr(error, 'strerror', None) or error}") from None
    return read_config(text, path, NOT_LOCAL)


def _layered(*layers: Iterable[Given]) -> tuple[Given, ...]:
    """What holds when each of ``layers`` overrides those before it, in the order of the table.

    Of two options for one field the stronger layer's counts, and within a layer the one further down in the table.
    """
    found = {
        one.option.field or one.option.name: one for layer in layers for one in sorted(layer, key=_place_in_table)
    }
    return tuple(sorted(found.values(), key=_place_in_table))


def _place_in_table(one: Given) -> int:
    return OPTIONS.index(one.option)


def _take_hosts(request: dict[str, Any], host_file: str) -> None:
    if "hosts" in request:
        raise UsageError(f"--hostfile {host_file} and --host both name the hosts: leave one of them out")
    request["hosts"] = read_host_file(host_file)


def _refuse_beside_plan(given: Sequence[Given]) -> None:
    others = [f"--{one.option.name}" for one in given if not one.option.goes_with_plan]
    if others:
        raise UsageError(f"--plan says it all: leave out {', '.join(others)}, or make a new plan with --dry-run")


def _check_formats(line: CommandLine, texts: Mapping[str, object]) -> None:
    """Refuse the format of what is not printed."""
    if _TOPOLOGY_FORMAT in texts and not (line.is_dry_run or line.prints_topology or line.prints_version):
        raise UsageError(
            f"--{_TOPOLOGY_FORMAT} says how the plan is printed, and it is not: add --dry-run to look only, "
            "or --print-topology to print it and start"
        )
    if _REPORT_FORMAT in texts and not line.asks_doctor:
        raise UsageError(
            f"--{_REPORT_FORMAT} says how --doctor prints: for that of a plan, use --{_TOPOLOGY_FORMAT}"
        )


def origins(given: Iterable[Given], *, with_defaults: bool) -> tuple[tuple[str, str, str], ...]:
    """Name, value and origin of every option in ``given``, or of every option that there is."""
    by_name = {one.option.name: one for one in given}
    rows = []
    for option in OPTIONS:
        if one := by_name.get(option.name):
            rows.append((option.name, one.shown(), one.place or "command line"))
        elif with_defaults and (default := default_of(option)) is not None:
            rows.append((option.name, default, "default"))
    return tuple(rows)


def misspelled_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """A warning for each variable that is almost an option's."""
    known = {option.variable for option in OPTIONS}
    unknown = [name for name in environ if name.startswith(VARIABLE_PREFIX) and name not in known]
    if not unknown:
        return
    from difflib import get_close_matches  # noqa: PLC0415 - hardly anybody has such a variable

    for name in unknown:
        for nearest in get_close_matches(name, known, n=1, cutoff=0.9):
            yield f"{name} sets no option: did you mean {nearest}?"


def asked_completion(environ: Mapping[str, str] = os.environ) -> str | None:
    """What a shell asks poprun to complete, or None in every other call."""
    return environ.get(COMPLETION)
