"""The command line of poprun: parsing of arguments, environment variables and files of options.

getopt parses one argument at a time, so that poprun can also accept PopRun's forms: abbreviated names, ``--vv``,
and a boolean value after a switch. The first argument that is no option begins the program's command line. click,
which parses the command lines of the other programs, would take a tenth of poprun's start.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cache
from getopt import GetoptError, getopt
from typing import Any, Final

from popdist.ground.values import dataclass
from poprun.cli.options import (
    BOOLEANS,
    HELP_ALL,
    LINE,
    OPTIONS,
    REQUEST,
    VARIABLE_PREFIX,
    Option,
    OptionValue,
    default_of,
    values_by_section,
)
from poprun.errors import UsageError
from poprun.plan.request import (
    AskedMapping,
    EndingSettings,
    LaunchRequest,
    OutputSettings,
    RemoteSettings,
    TraceSettings,
    VipuSettings,
)
from poprun.text.ranges import read_host_file
from poprun.text.screen import EmitKind, ReportFormat, TopologyFormat, VersionFormat

NOT_LOCAL: Final = {option.name: option for option in OPTIONS if not option.is_local}
"""The options that environment variables and files of options may set, by name."""

_PLAN: Final = "plan"
_IMPORT: Final = "import-config"
_TOPOLOGY_FORMAT: Final = "topology-format"
_REPORT_FORMAT: Final = "format"
_DEBUG_VERBOSITY: Final = 2

_IN_ALL: Final = "--num-instances N says how many processes there are in all"
_FOREIGN_OPTIONS: Final = (
    ("-np --np --ntasks --nproc-per-node --num-processes", _IN_ALL),
    ("-ppn --ntasks-per-node --npernode", f"{_IN_ALL}, equally many on each host"),
    (
        "--nnodes -N --nodes --num-nodes --num-machines --node-rank --machine-rank",
        "--host a,b names the hosts, and poprun is called once",
    ),
    (
        "-x -genv -env",
        "programs here get all variables of poprun; --mpi-local-args '-x NAME=value' sets one on every host",
    ),
    (
        "--standalone --master-addr --master-port --main-process-port --rdzv-backend --rdzv-endpoint --rdzv-id",
        "leave it out: poprun chooses where instances connect",
    ),
    ("-m --module", "write poprun python -m MODULE"),
    ("--bind-to --map-by --cpu-bind", "--process-placement says on which cores instances run"),
    ("--mca -mca", "--mpi-global-args '--mca NAME VALUE' passes it to Open MPI's mpirun"),
    ("--gpus --num-gpus --multi-gpu --gpus-per-node --gres", "-n auto starts one instance for each free GPU"),
    (
        "-tp -pp -dp --tp --pp --dp --tensor-parallel-size --pipeline-parallel-size --data-parallel-size",
        "--parallelism tensor=2,pipeline=2 says how instances share a replica",
    ),
    ("--oversubscribe", "leave it out: poprun starts as many instances as are asked for"),
)
"""Options of other launchers, each with the advice how to do the same with poprun."""

_NEXT: Final = "\0"  # a mark for "the next word"; a program's argument cannot contain this character


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A command line of poprun after parsing and checking: the user's program and the values of all options."""

    program: tuple[str, ...] = ()  # the program and its arguments, as written; may be empty
    given: tuple[OptionValue, ...] = ()
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by section and name
    shows_help: bool = False
    shows_whole_help: bool = False
    prints_version: bool = False
    version_format: VersionFormat | None = None  # if this is not None, the version is printed too
    verbosity: int = 0
    config_file: str | None = None
    exported_file: str | None = None
    may_overwrite: bool = False
    host_file: str | None = None
    parallelism: str | None = None  # text with sizes, or the name of a file with a mapping
    prints_topology: bool = False
    topology_format: TopologyFormat = TopologyFormat.TABLE
    is_dry_run: bool = False
    asks_doctor: bool = False
    report_format: ReportFormat = ReportFormat.TABLE
    emitted: EmitKind | None = None  # the kind of job to print for a cluster; nothing starts then
    image: str | None = None
    plan_file: str | None = None  # "-" is standard input

    @property
    def starts_job(self) -> bool:
        """Whether poprun starts the job, and does not only print its plan or its job file for a cluster."""
        return not (self.is_dry_run or self.emitted)

    def request(self, program: tuple[str, ...], working_directory: str) -> LaunchRequest:
        """Return the job that the command line requests; ``program`` is the user's program by its full path."""
        request_fields = self.values.get("request", {})
        # if the user does not give the number of instances, each of several hosts has one instance
        if len(request_fields.get("hosts", ())) > 1:
            request_fields = {"num_instances": len(request_fields["hosts"]), **request_fields}
        return LaunchRequest(
            program=program,
            working_directory=working_directory,
            output=OutputSettings(**self.values.get("output", {})),
            ending=EndingSettings(**self.values.get("ending", {})),
            remote=RemoteSettings(**self.values.get("remote", {})),
            trace=TraceSettings(**self.values.get("trace", {})),
            vipu=VipuSettings(**self.values.get("vipu", {})),
            **request_fields,
        )


def read_command_line(words: Sequence[str], environ: Mapping[str, str] = os.environ) -> CommandLine:
    """Return the parsed command line ``words``; missing options come from ``environ`` or a file of options."""
    texts, program = read_words(words)
    if texts.keys() & {"help", "help-all"}:  # the help page is shown even if other words are wrong
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
    if line.parallelism is not None:
        values.setdefault(REQUEST, {})["mapping"] = _read_mapping(line.parallelism)
    if values.get(REQUEST, {}).get("is_debugged"):
        line = replace(line, verbosity=max(line.verbosity, _DEBUG_VERBOSITY))
    _check_formats(line, texts)
    return line


def _from_variables(environ: Mapping[str, str]) -> Iterator[OptionValue]:
    """Yield a value for each option whose environment variable is set in ``environ`` and is not empty."""
    for option in NOT_LOCAL.values():
        if text := environ.get(option.variable):
            yield OptionValue(option=option, texts=(text,), place=option.variable)


def _imported(path: str) -> tuple[OptionValue, ...]:
    from poprun.cli.config_file import read_config
    from poprun.text.input_files import read_text

    return read_config(read_text(path, f"--{_IMPORT}"), path, NOT_LOCAL)


def _layered(*layers: Iterable[OptionValue]) -> tuple[OptionValue, ...]:
    """Join the option values of several sources; if several sources set an option, the last source counts."""
    by_field = {
        one.option.field or one.option.name: one for layer in layers for one in sorted(layer, key=_place_in_table)
    }
    return tuple(sorted(by_field.values(), key=_place_in_table))


def _place_in_table(one: OptionValue) -> int:
    return OPTIONS.index(one.option)


def _add_hosts(request: dict[str, Any], host_file: str) -> None:
    if "hosts" in request:
        raise UsageError(f"--hostfile {host_file} and --host both name the hosts: leave one of them out")
    request["hosts"] = read_host_file(host_file)


def _read_mapping(text: str) -> AskedMapping:
    """Return the parallel mapping in ``text``: sizes such as tensor=2, or the name of a file with a mapping."""
    from poprun.plan.parallelism import mapping_in_file, mapping_in_words
    from poprun.text.input_files import read_text

    if "=" in text and not text.endswith(".json"):
        return mapping_in_words(text)
    try:
        content = read_text(text, "--parallelism")
    except UsageError as error:
        raise UsageError(
            f"{error}: give sizes, such as tensor=2,pipeline=2, or a file that poprun-size --save wrote"
        ) from None
    return mapping_in_file(content, text, os.path.abspath(text))


def _refuse_beside_plan(given: Sequence[OptionValue]) -> None:
    others = [f"--{one.option.name}" for one in given if not one.option.goes_with_plan]
    if others:
        raise UsageError(f"--plan says it all: leave out {', '.join(others)}, or make a new plan with --dry-run")


def _check_formats(line: CommandLine, texts: Mapping[str, object]) -> None:
    """Raise UsageError if the user chose a format, such as JSON, for a text that poprun will not print."""
    if _TOPOLOGY_FORMAT in texts and not (line.is_dry_run or line.prints_topology or line.prints_version):
        raise UsageError(
            f"--{_TOPOLOGY_FORMAT} says how the plan is printed, and it is not: add --dry-run to look only, "
            "or --print-topology to print it and start"
        )
    if _REPORT_FORMAT in texts and not line.asks_doctor:
        raise UsageError(
            f"--{_REPORT_FORMAT} says how --doctor prints: for that of a plan, use --{_TOPOLOGY_FORMAT}"
        )


@cache
def _forms() -> Mapping[str, tuple[Option, bool]]:
    """Return {form of an option, such as ``--no-dry-run``: (option, whether the form negates the option)}."""
    forms = {f"--{option.name}": (option, False) for option in OPTIONS}
    forms |= {f"-{option.short}": (option, False) for option in OPTIONS if option.short}
    return forms | {f"--no-{option.name}": (option, True) for option in OPTIONS if option.kind.is_switch}


@cache
def _for_getopt() -> tuple[str, tuple[str, ...]]:
    """Return the short and the long options in getopt's notation: a mark follows each option that has a value."""
    marks = {form: "" if option.kind.is_counted else "=" for form, (option, _) in _forms().items()}
    short = [f"{form[1]}{':' if mark else ''}" for form, mark in marks.items() if not form.startswith("--")]
    return "".join(short), tuple(f"{form[2:]}{marks[form]}" for form in long_names())


@cache
def long_names() -> tuple[str, ...]:
    """Return the sorted names of all long options; each switch (yes-or-no option) has a second name ``--no-…``."""
    return tuple(sorted(name for name in _forms() if name.startswith("--")))


def read_words(words: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Parse the options before the program; return {option's name: its values as texts}, and the program."""
    rest = deque(words)
    texts: dict[Option, list[str]] = {}
    while begins_with_option(rest):
        for option, text in take_options(rest):
            if text is None:
                raise UsageError(f"--{option.name} needs a value: write --{option.name}=VALUE")
            texts.setdefault(option, []).append(text)
    if rest and rest[0] == "--":
        rest.popleft()
    texts_by_name = {
        option.name: (str(len(option_texts)),) if option.kind.is_counted else tuple(option_texts)
        for option, option_texts in texts.items()
    }
    return texts_by_name, tuple(rest)


def begins_with_option(words: Sequence[str]) -> bool:
    """Whether the first word of ``words`` is an option; the program's name and ``--`` are no options."""
    return bool(words) and words[0].startswith("-") and words[0] not in ("-", "--")


def take_options(words: deque[str]) -> list[tuple[Option, str | None]]:
    """Remove the first word, which is an option, and its value from ``words``; return pairs of option and value.

    A word of short options contains several options. A value is None if it is missing.
    """
    written, equals, value = words.popleft().partition("=")
    if _foreign_advice(written):
        raise _unknown(written)
    name = "-vv" if written == "--vv" else _whole_name(written)
    try:
        pairs, _ = getopt([f"{name}{equals}{value}", _NEXT], *_for_getopt())
    except GetoptError as error:
        if name.startswith("--"):
            raise UsageError(f"{written} takes no value, and {value!r} was given: write {name}") from None
        raise _unknown(written if written.startswith(f"-{error.opt}") else f"-{error.opt}") from None
    return [(_forms()[form][0], _whole_text(form, text, words)) for form, text in pairs]


def _whole_text(form: str, text: str, words: deque[str]) -> str | None:
    """Return the value of an option: ``text`` from the option's own word, otherwise the next word of ``words``, or
    None if no word follows. A switch (yes-or-no option) takes the next word only if the word means yes or no.
    """
    option, is_negated = _forms()[form]
    if not form.startswith("--"):
        text = text.removeprefix("=")
    if not option.kind.is_switch:
        return text if text != _NEXT else words.popleft() if words else None
    if text == _NEXT:
        text = words.popleft() if words and words[0].lower() in BOOLEANS else "yes"
    if text.lower() not in BOOLEANS:
        raise UsageError(f"{form}={text} is neither yes nor no: write {form}=yes or {form}=no")
    return "yes" if BOOLEANS[text.lower()] != is_negated else "no"


def _whole_name(written: str) -> str:
    """Return the full name of the long option that ``written`` abbreviates; return a short option unchanged."""
    if not written.startswith("--"):
        if f"-{written}" in long_names():
            raise _unknown(written)
        return written
    candidates = [name for name in long_names() if name.startswith(written)]
    if written in candidates:
        return written
    if len(candidates) > 1:
        raise UsageError(f"{written} is the beginning of {' and of '.join(candidates)}: write one of them")
    if not candidates:
        raise _unknown(written)
    return candidates[0]


def _foreign_advice(written: str) -> str:
    """Return advice on how to replace ``written``, an option of another launcher; "" if it is no such option."""
    name = written.replace("_", "-").rstrip("0123456789")
    return next((advice for names, advice in _FOREIGN_OPTIONS if name in names.split()), "")


def _unknown(written: str) -> UsageError:
    if advice := _foreign_advice(written):
        return UsageError(f"there is no option {written}: {advice}")
    from difflib import get_close_matches

    nearest = get_close_matches(f"--{written.lstrip('-')}", long_names(), n=1, cutoff=0.7)
    cure = f"did you mean {nearest[0]}?" if nearest else f"poprun {HELP_ALL} lists the options"
    return UsageError(f"there is no option {written}: {cure}")


def origins(given: Iterable[OptionValue], *, with_defaults: bool) -> tuple[tuple[str, str, str], ...]:
    """Return name, value and source of each given option; with ``with_defaults``, also of all default values."""
    by_name = {one.option.name: one for one in given}
    rows = []
    for option in OPTIONS:
        if one := by_name.get(option.name):
            rows.append((option.name, " ".join(one.texts), one.place or "command line"))
        elif with_defaults and (default := default_of(option)) is not None:
            rows.append((option.name, default, "default"))
    return tuple(rows)


def misspelled_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each unknown ``POPRUN_*`` variable whose name resembles an option's variable."""
    known = {option.variable for option in OPTIONS}
    unknown = [name for name in environ if name.startswith(VARIABLE_PREFIX) and name not in known]
    if not unknown:
        return
    from difflib import get_close_matches

    for name in unknown:
        for nearest in get_close_matches(name, known, n=1, cutoff=0.9):
            yield f"{name} sets no option: did you mean {nearest}?"
