"""The table of all options of poprun, and the kinds of values that options have. Pure.

The help pages, the command line, the ``POPRUN_*`` variables and the keys of a file of options are made from the
rows of the table. A value is parsed in the same way everywhere. A new option needs a row here and a field where
its value is used.
"""

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, Final

from popdist.ground.values import dataclass
from poprun.errors import PoprunError, UsageError
from poprun.plan.request import TRACED_STEPS, LauncherChoice, LaunchRequest
from poprun.plan.topology import ProcessPlacement
from poprun.text.ranges import parse_hosts, parse_numbers
from poprun.text.screen import EmitKind, ReportFormat, TopologyFormat, VersionFormat, visible

LINE: Final = "line"
"""The section of options that do not belong to a request, but say what to print or which file to read."""

REQUEST: Final = "request"  # the section of the direct fields of :class:`LaunchRequest`
VARIABLE_PREFIX: Final = "POPRUN_"

HELP_ALL: Final = "--help-all"

COMPLETION: Final = "_POPRUN_COMPLETE"
"""The variable in which a shell asks for completions; a user who wants the script writes ``bash_source`` there."""

BOOLEANS: Final = dict.fromkeys(("yes", "on", "1", "true"), True) | dict.fromkeys(
    ("no", "off", "0", "false"), False
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of option value, such as a number of seconds, and how to parse it."""

    metavar: str
    read: Callable[[str], Any]  # raises ValueError with the advice what to write instead
    read_all: Callable[[Sequence[str]], Any] | None = None  # parses all texts; None: the last text counts
    is_switch: bool = False  # without a value it is on; --no-… switches it off
    is_counted: bool = False  # it has no value; the number of times it is written counts
    choices: tuple[str, ...] = ()  # all possible values, if there are few

    def value(self, texts: Sequence[str]) -> Any:
        """Return the value of an option of this kind, parsed from all ``texts`` that the user gave to it."""
        return self.read_all(texts) if self.read_all else self.read(texts[-1])


def _number(convert: Callable[[str], float], cure: str, *, none: str = "") -> Callable[[str], float | None]:
    """Return a function that converts a text to a number, but a special word ``none``, such as auto, to None."""

    def read(text: str) -> float | None:
        try:
            return None if none and text == none else convert(text)
        except ValueError:
            raise ValueError(cure) from None

    return read


def _instances(text: str) -> tuple[int, ...]:
    numbers = parse_numbers(text)
    if not numbers:
        raise ValueError("name one instance or more, such as 0,4-7")
    return numbers


def _boolean(text: str) -> bool:
    if text.lower() not in BOOLEANS:
        raise ValueError("give yes or no")
    return BOOLEANS[text.lower()]


def _name(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError("give a name")
    return text


def _words(texts: Sequence[str]) -> tuple[str, ...]:
    """Split all texts into words as a shell does; return the words of all texts together."""
    try:
        return tuple(word for text in texts for word in _split(text))
    except ValueError as error:
        raise ValueError(str(error).lower()) from None


def _split(text: str) -> list[str]:
    """Split ``text`` into words as a shell does; a line that ends with a backslash continues on the next line."""
    words = shlex.split(text.replace("\\\n", " "))
    # users often put two pairs of quotes around the whole text
    is_quoted = len(words) == 1 and words[0].lstrip().startswith("-") and " " in words[0].strip()
    return shlex.split(words[0]) if is_quoted else words


def _words_of_instances(texts: Sequence[str]) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Return pairs of an instance's index and its options for MPI, parsed from texts such as ``0:"-x A=1"``."""
    pairs = []
    for text in texts:
        index, colon, words = text.partition(":")
        if not colon or not index.strip().isdecimal():
            raise ValueError(f"{text!r} names no instance: write 0:'-x NAME=value'")
        pairs.append((int(index), _words([words])))
    return tuple(pairs)


def _hosts(texts: Sequence[str]) -> tuple[str, ...]:
    return parse_hosts(",".join(texts))


def _subnet(text: str) -> str:
    from ipaddress import ip_network

    try:
        return str(ip_network(text, strict=False))
    except ValueError:
        raise ValueError("give a subnet, such as 10.1.0.0/16") from None


def _steps(text: str) -> range:
    first, _, stop = text.partition(":")
    if not (first.isdecimal() and stop.isdecimal()):
        raise ValueError("give the first step and the one before which to end, such as 20:25")
    return range(int(first), int(stop))


NUMBER: Final = Kind(metavar="N", read=_number(int, "give a whole number"))
NUMBER_OR_AUTO: Final = Kind(
    metavar="N|auto", read=_number(int, "give a whole number, or auto for one per free GPU", none="auto")
)
SECONDS: Final = Kind(metavar="SECONDS", read=_number(float, "give a number of seconds, such as 90"))
SECONDS_OR_OFF: Final = Kind(
    metavar="SECONDS|off", read=_number(float, "give a number of seconds, or off", none="off")
)
INSTANCES: Final = Kind(metavar="N", read=_instances)
SWITCH: Final = Kind(metavar="", read=_boolean, is_switch=True)
FLAG: Final = Kind(metavar="", read=bool, is_counted=True)
COUNTED: Final = Kind(metavar="", read=NUMBER.read, is_counted=True)
NAME: Final = Kind(metavar="NAME", read=_name)
STEPS: Final = Kind(metavar="FIRST:STOP", read=_steps)
TEXT: Final = Kind(metavar="TEXT", read=str)
FILE: Final = Kind(metavar="FILE", read=str)
FILES: Final = Kind(metavar="FILE", read=str, read_all=tuple)
SIZES: Final = Kind(metavar="SIZES|FILE", read=_name)
FOLDER: Final = Kind(metavar="DIR", read=str)
HOSTS: Final = Kind(metavar="HOSTS", read=str, read_all=_hosts)
SUBNET: Final = Kind(metavar="CIDR", read=_subnet)
WORDS: Final = Kind(metavar="ARGS", read=str, read_all=_words)
WORDS_OF_INSTANCES: Final = Kind(metavar="N:ARGS", read=str, read_all=_words_of_instances)


def one_of(choices: type[Enum], metavar: str = "") -> Kind:
    """Return the kind of option whose value is a member of ``choices``; help shows ``metavar`` or the members."""
    names = [choice.value for choice in choices]

    def read(text: str) -> Enum:
        if text not in names:
            raise ValueError(f"give one of {', '.join(names)}")
        return choices(text)

    return Kind(metavar=metavar or f"[{'|'.join(names)}]", read=read, choices=tuple(names))


@dataclass(frozen=True, slots=True)
class Option:
    """An option of poprun's command line: name, kind of value, help, and the field of a request that it sets."""

    name: str
    field: str  # the field that the option sets: request.…, a section of the request such as vipu.…, or line.…
    kind: Kind
    help: str  # contains the default, if the default is neither a number nor a name of the request
    short: str = ""
    is_local: bool = False  # only the command line can set it: no file of options and no variable
    goes_with_plan: bool = False
    why_no_effect: str = ""  # the reason, for an option that is accepted but sets no field
    group: str = ""

    @property
    def variable(self) -> str:
        """The environment variable that sets the option if the command line does not set it."""
        return VARIABLE_PREFIX + self.name.replace("-", "_").upper()


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionValue:
    """The texts that a user gave to one option: one text for each time that the option was written."""

    option: Option
    texts: tuple[str, ...]
    place: str = ""  # such as POPRUN_HOST or job.yaml:3; empty for the command line

    def value(self) -> Any:
        """Return the option's value, parsed from its texts. Raise an error that names a wrong text's source."""
        where = f"{self.place}: " if self.place else ""
        try:
            return self.option.kind.value(self.texts)
        except ValueError as error:
            text = visible(" ".join(self.texts)) or "''"
            raise UsageError(f"{where}--{self.option.name} {text}: {error}") from None
        except PoprunError as error:
            raise type(error)(f"{where}{error}") from None


def values_by_section(given: Iterable[OptionValue]) -> dict[str, dict[str, Any]]:
    """Return {section of a job's request: {field: option's value}}; of two values of one field, keep the later."""
    values: dict[str, dict[str, Any]] = {}
    for one in given:
        section, _, name = one.option.field.partition(".")
        value = one.value()
        if section:
            values.setdefault(section, {})[name] = value
    return values


def default_of(option: Option) -> str | None:
    """Return the default of ``option`` as a user would write it; None if it sets no field of a job's request."""
    section, _, name = option.field.partition(".")
    if section in ("", LINE):
        return None
    holder = _DEFAULTS if section == REQUEST else getattr(_DEFAULTS, section)
    value = getattr(holder, name)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else "none" if value in (None, ()) else str(value)


_DEFAULTS: Final = LaunchRequest()


def _group(heading: str, *options: Option) -> tuple[Option, ...]:
    """Return ``options`` with ``heading``, their group on the help page, and with defaults in their help texts."""
    return tuple(replace(option, group=heading, help=_with_default(option)) for option in options)


def _with_default(option: Option) -> str:
    default = None if option.kind.is_switch or "[default: " in option.help else default_of(option)
    return option.help if default in (None, "none") else f"{option.help} [default: {default}]"


def _numa_placement(text: str) -> ProcessPlacement:
    return ProcessPlacement.SPREADNUMA if SWITCH.read(text) else ProcessPlacement.DISABLED


_NUMA: Final = Kind(metavar="", read=_numa_placement, is_switch=True)

# fmt: off
OPTIONS: Final[tuple[Option, ...]] = (
    *_group(
        "Generic",
        Option("help", "line.shows_help", FLAG,
               "Show the options that most jobs use, and exit.", short="h", is_local=True, goes_with_plan=True),
        Option("help-all", "line.shows_whole_help", FLAG,
               "Show this page and exit.", is_local=True, goes_with_plan=True),
        Option("version", "line.prints_version", FLAG,
               "Print the version and exit.", is_local=True, goes_with_plan=True),
        Option("version-format", "line.version_format", one_of(VersionFormat, "FORMAT"),
               "Print it as text, or with all that poprun depends on: full-text, full-json.",
               is_local=True, goes_with_plan=True),
        Option("verbose", "line.verbosity", COUNTED,
               "Say what is done and why; -vv: more of it.", short="v", goes_with_plan=True),
    ),
    *_group(
        "Configuration",
        Option("import-config", "line.config_file", FILE,
               "Read options from FILE; flags win over it.", is_local=True),
        Option("export-config", "line.exported_file", FILE,
               "Write the options of this call to FILE as YAML.", is_local=True),
        Option("overwrite-config", "line.may_overwrite", SWITCH,
               "Let --export-config replace a file.", is_local=True),
        Option("num-instances", "request.num_instances", NUMBER_OR_AUTO,
               "Processes in all; auto: one per free GPU. [default: 1 on each host]", short="n"),
        Option("num-replicas", "request.num_replicas", NUMBER,
               "Model replicas in all, shared out evenly. [default: one per instance]"),
        Option("parallelism", "line.parallelism", SIZES,
               "Instances that share a replica: tensor=2,pipeline=2, or a file that poprun-size saved."),
        Option("instances-per-replica", "request.instances_per_replica", NUMBER,
               "Instances that share a replica, if the program makes its own mesh. [default: 1]"),
        Option("ipus-per-replica", "request.ipus_per_replica", NUMBER,
               "GPUs, or shares of the cores, of a replica. [default: one for each of its instances]"),
        Option("host", "request.hosts", HOSTS,
               "Where to run: a,b or host[0-2,4]. [default: this machine]", short="H"),
        Option("hostfile", "line.host_file", FILE, "File with a host on each line, in place of --host."),
        Option("host-subnet", "remote.subnet", SUBNET,
               "Network between the hosts. [default: the one that leads to them]"),
        Option("ssh-config", "remote.ssh_config", FILE, "What ssh to the hosts reads in place of ~/.ssh/config."),
        Option("synchronise-python-venv", "remote.synchronises_venv", SWITCH,
               "Copy the virtual environment to hosts that lack it."),
        Option("executable-cache-path", "request.executable_cache_path", FOLDER,
               "Keep compiled programs there, those of torch.compile among them."),
        Option("deterministic", "request.is_deterministic", SWITCH,
               "Let torch use deterministic algorithms only."),
    ),
    *_group(
        "Devices",
        Option("ipus-per-host", "vipu.ipus_per_host", NUMBER,
               "Virtual IPUs that a host has. [default: its GPUs, else no limit]"),
        Option("wait-for-devices", "vipu.waits_for_devices", SWITCH, "Queue until the virtual IPUs are free."),
        Option("share-devices", "vipu.shares_devices", SWITCH, "Use GPUs that others use; let instances share."),
    ),
    *_group(
        "MPI",
        Option("launcher", "request.launcher", one_of(LauncherChoice),
               "Start with MPI, or without; auto: MPI, where there is one."),
        Option("mpi-global-args", "request.mpi_global_args", WORDS,
               "Words for the MPI launcher, before its process count; may be repeated."),
        Option("mpi-local-args", "request.mpi_local_args", WORDS,
               "Words for the MPI launcher, after its process count; may be repeated."),
        Option("instance-mpi-local-args", "request.instance_mpi_local_args", WORDS_OF_INSTANCES,
               "The same for one instance: 0:'-x A=1'; may be repeated."),
        Option("start-timeout", "ending.start_timeout_seconds", SECONDS,
               "Time the instances have to come to life."),
    ),
    *_group(
        "Placement",
        Option("numa-aware", "request.placement", _NUMA,
               "The older --process-placement: yes is spreadnuma, no is disabled."),
        Option("process-placement", "request.placement", one_of(ProcessPlacement, "HOW"),
               f"Cores of the instances: {', '.join(ProcessPlacement)}."),
        Option("threads-per-replica", "request.threads_per_replica", NUMBER,
               "Value of OMP_NUM_THREADS. [default: the cores shared out to the replicas]"),
    ),
    *_group(
        "Ending",
        Option("stop-timeout", "ending.stop_timeout_seconds", SECONDS,
               "Time a program has to end before it is killed."),
        Option("timeout", "ending.timeout_seconds", SECONDS,
               "Time the whole job has; it then ends with 124. [default: none]"),
        Option("max-restarts", "ending.max_restarts", NUMBER, "Times a failed job is started again."),
        Option("restart-anyway", "ending.restarts_anyway", SWITCH,
               "Start it again also where that seems to be in vain. [default: no]"),
        Option("hang-report", "ending.hang_report_seconds", SECONDS_OR_OFF,
               "Tell who keeps the others waiting after so long without progress."),
        Option("hang-timeout", "ending.hang_timeout_seconds", SECONDS_OR_OFF,
               "End the job after so long without progress. [default: off]"),
        Option("report", "ending.report_files", FILES,
               "Write how the job goes: a page, NAME.html, or data, NAME.json; may be repeated."),
        Option("metrics-port", "ending.metrics_port", NUMBER,
               "Answer Prometheus at this port of 127.0.0.1; 0: at a free one. [default: none]"),
    ),
    *_group(
        "Output",
        Option("only-output-from-instance", "output.shown_instances", INSTANCES,
               "Show the output of these instances only: 0 or 0,4-7."),
        Option("tag-output", "output.is_tagged", SWITCH,
               "Put PopRun's tag before each line. [default: [0], with several instances]"),
        Option("tag-format", "output.tag_format", TEXT,
               "The tag, with {instance}, {host}, {stream} and the like."),
        Option("fold-output", "output.is_folded", SWITCH, "Show lines that several instances print alike once."),
        Option("log-dir", "output.log_dir", FOLDER, "Keep each instance's output in a file."),
        Option("trace", "trace.folder", FOLDER,
               "Record some steps of all instances, on one clock, for Perfetto; see poprun-report trace."),
        Option("trace-steps", "trace.steps", STEPS,
               f"Which steps, counted from 0. [default: {TRACED_STEPS.start}:{TRACED_STEPS.stop}]"),
        Option("trace-seconds", "trace.seconds", SECONDS,
               "Record so long in place of steps, from the first call of a torch module on."),
        Option("monitor", "output.has_monitor", SWITCH, "Show the instances live, not their output."),
        Option("print-topology", "line.prints_topology", SWITCH,
               "Print the plan, then start it.", goes_with_plan=True),
        Option("topology-format", "line.topology_format", one_of(TopologyFormat, "FORMAT"),
               "table, text (as PopRun prints it), json, yaml, or a picture: svg, html, mermaid. [default: table]",
               goes_with_plan=True),
    ),
    *_group(
        "Debug",
        Option("debug", "request.is_debugged", SWITCH,
               "Say all that -vv says, and have programs tell where they crash."),
        Option("watching", "request.is_watched", SWITCH,
               "Look into the programs: steps, calls, stacks of hangs. [default: yes]"),
        Option("dry-run", "line.is_dry_run", SWITCH,
               "Print the plan and start nothing.", is_local=True, goes_with_plan=True),
        Option("doctor", "line.asks_doctor", FLAG,
               "Tell what this machine has and what it lacks.", is_local=True),
        Option("format", "line.report_format", one_of(ReportFormat),
               "How --doctor tells it. [default: table]", is_local=True),
        Option("emit", "line.emitted", one_of(EmitKind, "KIND"),
               "Print the job for a cluster and start nothing: mpijob, jobset (Kubernetes) or sbatch.",
               is_local=True, goes_with_plan=True),
        Option("image", "line.image", NAME, "Container image of the job that --emit prints.", goes_with_plan=True),
        Option("plan", "line.plan_file", FILE,
               "Start the plan that a dry run printed as json or yaml; -: read it from stdin.",
               is_local=True, goes_with_plan=True),
    ),
    *_group(
        "V-IPU, for pods and partitions of virtual IPUs",
        Option("vipu-partition", "vipu.partition", NAME, "Partition to use, or to create."),
        Option("vipu-partition-attempts", "vipu.partition_attempts", NUMBER,
               "Times to try for a partition that is not ready."),
        Option("vipu-allocation", "vipu.allocation", NAME, "Allocation to create the partition in."),
        Option("vipu-cluster", "vipu.cluster", NAME, "The same under its older name."),
        Option("update-partition", "vipu.updates_partition", SWITCH,
               "Change the partition, or create it, where it is needed."),
        Option("reset-partition", "vipu.resets_partition", SWITCH,
               "Reset the partition first. [default: only where it has to be]"),
        Option("remove-partition", "vipu.removes_partition", SWITCH,
               "Remove afterwards a partition that poprun created. [default: yes]"),
        Option("num-ilds", "vipu.num_ilds", NUMBER, "IPU-Link domains of the job. [default: as the pod has them]"),
        Option("pod", "vipu.pod", NAME,
               "Pod to plan for: POD16, POD64, …, or a YAML file. [default: this machine]"),
        Option("pool", "vipu.pool", NAME, "Folder of the pool of virtual IPUs. [default: the machine's]"),
        Option("offline-mode", "vipu.is_offline", SWITCH, "Run without virtual IPUs: take none, show none."),
        Option("vipu-server-host", "vipu.server_host", NAME,
               "Take the virtual IPUs from the server there: vipu serve. [default: this machine's pool]"),
        Option("vipu-server-port", "vipu.server_port", NUMBER, "Port of that server."),
        Option("vipu-server-timeout", "vipu.server_timeout_seconds", SECONDS,
               "Time it, or the pool, has to answer."),
    ),
    *_group(
        "PopRun, accepted for its command lines",
        Option("synchronise-poplar-sdk", "", SWITCH,
               "Accepted; there is no SDK to copy.", why_no_effect="there is no Poplar SDK here to copy"),
        Option("distribute-ssh-key", "", SWITCH,
               "Accepted; keys are left as they are.",
               why_no_effect="poprun leaves ssh keys as they are: set up ssh to the hosts yourself"),
        Option("allow-run-as-root", "", SWITCH,
               "Accepted; root is allowed.", why_no_effect="root is always allowed"),
        Option("sync-type", "", TEXT,
               "Accepted; virtual IPUs have no sync network.", why_no_effect="virtual IPUs have no sync network"),
    ),
)
# fmt: on
"""All options of poprun, in the order of the help page."""

COMMON: Final = (
    *("num-instances", "num-replicas", "ipus-per-replica", "host", "max-restarts", "log-dir"),
    *("monitor", "dry-run", "doctor", "verbose"),
)
"""The names of the options on the short help page. The page shows only one line of help for each option."""

INTRO: Final = "Start PROGRAM as many instances (processes) that train a number of model replicas together."

EXAMPLES: Final = """\
Examples:
  poprun --num-instances 2 --num-replicas 4 python train.py --epochs 3
  poprun -H 'node[0-3]' -n 8 --num-replicas 16 --dry-run python train.py
"""
