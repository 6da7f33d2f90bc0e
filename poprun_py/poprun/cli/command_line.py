"""What the command line, the variables and a file of options ask for, as values of poprun's own."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from poprun.cli.click_command import read_words
from poprun.cli.options import LINE, OPTIONS, REQUEST, VARIABLE_PREFIX, OptionValue, default_of, values_by_section
from poprun.errors import UsageError
from poprun.plan.request import EndingSettings, LaunchRequest, OutputSettings, RemoteSettings, VipuSettings
from poprun.text.ranges import read_host_file
from poprun.text.screen import EmitKind, ReportFormat, TopologyFormat, VersionFormat

NOT_LOCAL: Final = {option.name: option for option in OPTIONS if not option.is_local}
"""What variables and files may hold, by name."""

_PLAN: Final = "plan"
_IMPORT: Final = "import-config"
_TOPOLOGY_FORMAT: Final = "topology-format"
_REPORT_FORMAT: Final = "format"
_DEBUG_VERBOSITY: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A command line that was read and checked.

    The fields below ``values`` are the section ``line`` of the table of options, whose rows say what they are.
    """

    program: tuple[str, ...] = ()  # with its arguments, as written; may be empty
    given: tuple[OptionValue, ...] = ()
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by section and name
    shows_help: bool = False
    shows_whole_help: bool = False
    prints_version: bool = False
    version_format: VersionFormat | None = None  # prints the version, too, where it is not None
    verbosity: int = 0
    config_file: str | None = None
    exported_file: str | None = None
    may_overwrite: bool = False
    host_file: str | None = None
    prints_topology: bool = False
    topology_format: TopologyFormat = TopologyFormat.TABLE
    is_dry_run: bool = False
    asks_doctor: bool = False
    report_format: ReportFormat = ReportFormat.TABLE
    emitted: EmitKind | None = None  # the kind of job to write for a cluster in place of starting one
    image: str | None = None
    plan_file: str | None = None  # "-" is standard input

    def request(self, program: tuple[str, ...], working_directory: str) -> LaunchRequest:
        """Make the request, for ``program`` as it was resolved in ``working_directory``.

        Where nobody has said how many instances there are, several hosts have one each.
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
    """Read ``words``, without the name of poprun; weaker than they are ``environ`` and a file of options."""
    texts, program = read_words(words)
    if texts.keys() & {"help", "help-all"}:  # whatever else is there, right or wrong
        return CommandLine(shows_help=True, shows_whole_help="help" not in texts)
    flags = [OptionValue(option=option, texts=texts[option.name]) for option in OPTIONS if option.name in texts]
    if _PLAN in texts:
        _refuse_beside_plan(flags)
        given = _layered((one for one in _from_variables(environ) if one.option.goes_with_plan), flags)
    else:
        file = _imported(texts[_IMPORT][-1]) if _IMPORT in texts else ()
        given = _layered(file, _from_variables(environ), flags)
    values = values_by_section(given)
    line = CommandLine(program=program, given=given, values=values, **values.pop(LINE, {}))
    if line.host_file is not None:
        _add_hosts(values.setdefault(REQUEST, {}), line.host_file)
    if values.get(REQUEST, {}).get("is_debugged"):
        line = replace(line, verbosity=max(line.verbosity, _DEBUG_VERBOSITY))
    _check_formats(line, texts)
    return line


def _from_variables(environ: Mapping[str, str]) -> Iterator[OptionValue]:
    """The options that variables of ``environ`` give; an empty variable gives nothing."""
    for option in NOT_LOCAL.values():
        if text := environ.get(option.variable):
            yield OptionValue(option=option, texts=(text,), place=option.variable)


def _imported(path: str) -> tuple[OptionValue, ...]:
    from poprun.cli.config_file import import_config  # noqa: PLC0415 - yaml is expensive, and most jobs have no file

    return import_config(path, NOT_LOCAL)


def _layered(*layers: Iterable[OptionValue]) -> tuple[OptionValue, ...]:
    """Join layers of options, each of which overrides those before it; the result is in the order of the table.

    Of two options for one field the stronger layer's counts, and within a layer the one further down in the table.
    """
    found = {
        one.option.field or one.option.name: one for layer in layers for one in sorted(layer, key=_place_in_table)
    }
    return tuple(sorted(found.values(), key=_place_in_table))


def _place_in_table(one: OptionValue) -> int:
    return OPTIONS.index(one.option)


def _add_hosts(request: dict[str, Any], host_file: str) -> None:
    if "hosts" in request:
        raise UsageError(f"--hostfile {host_file} and --host both name the hosts: leave one of them out")
    request["hosts"] = read_host_file(host_file)


def _refuse_beside_plan(given: Sequence[OptionValue]) -> None:
    others = [f"--{one.option.name}" for one in given if not one.option.goes_with_plan]
    if others:
        raise UsageError(f"--plan says it all: leave out {', '.join(others)}, or make a new plan with --dry-run")


def _check_formats(line: CommandLine, texts: Mapping[str, object]) -> None:
    """Refuse a format for something that will not be printed."""
    if _TOPOLOGY_FORMAT in texts and not (line.is_dry_run or line.prints_topology or line.prints_version):
        raise UsageError(
            f"--{_TOPOLOGY_FORMAT} says how the plan is printed, and it is not: add --dry-run to look only, "
            "or --print-topology to print it and start"
        )
    if _REPORT_FORMAT in texts and not line.asks_doctor:
        raise UsageError(
            f"--{_REPORT_FORMAT} says how --doctor prints: for that of a plan, use --{_TOPOLOGY_FORMAT}"
        )


def origins(given: Iterable[OptionValue], *, with_defaults: bool) -> tuple[tuple[str, str, str], ...]:
    """Name, value and origin of every option in ``given``, or of every option that there is."""
    by_name = {one.option.name: one for one in given}
    rows = []
    for option in OPTIONS:
        if one := by_name.get(option.name):
            rows.append((option.name, " ".join(one.texts), one.place or "command line"))
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
