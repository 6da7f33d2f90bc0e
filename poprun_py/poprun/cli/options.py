"""The table of all options of poprun. To add one: a row here, and a field for it where its value is used."""

from dataclasses import replace
from typing import Final

from poprun.cli.option import (
    COUNTED,
    FILE,
    FLAG,
    FOLDER,
    HOSTS,
    INSTANCES,
    LINE,
    NAME,
    NUMBER,
    NUMBER_OR_AUTO,
    REQUEST,
    SECONDS,
    SECONDS_OR_OFF,
    SUBNET,
    SWITCH,
    TEXT,
    WORDS,
    WORDS_OF_INSTANCES,
    Kind,
    Option,
    one_of,
)
from poprun.plan.request import LauncherChoice, LaunchRequest
from poprun.plan.topology import ProcessPlacement
from poprun.text.formats import EmitKind, ReportFormat, TopologyFormat, VersionFormat


def default_of(option: Option) -> str | None:
    """The default of ``option`` as it would be written; None where no plan knows it."""
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
    """``options`` under a heading of the help page, which names the defaults that are numbers or names."""
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
        Option("ipus-per-replica", "request.ipus_per_replica", NUMBER,
               "GPUs, or shares of the cores, of a replica."),
        Option("host", "request.hosts", HOSTS,
               "Where to run: a,b or host[0-2,4]. [default: this machine]", short="H"),
        Option("hostfile", "line.host_file", FILE, "File with a host on each line, in place of --host."),
        Option("host-subnet", "remote.subnet", SUBNET,
               "Network between the hosts. [default: the one that leads to them]"),
        Option("ssh-config", "remote.ssh_config", FILE, "What ssh to the hosts reads in place of ~/.ssh/config."),
        Option("synchronise-python-venv", "remote.synchronises_venv", SWITCH,
               "Copy the virtual environment to hosts that lack it."),
        Option("synchronise-poplar-sdk", "", SWITCH,
               "Accepted; there is no SDK to copy.", why_no_effect="there is no Poplar SDK here to copy"),
        Option("distribute-ssh-key", "", SWITCH,
               "Accepted; keys are left as they are.",
               why_no_effect="poprun leaves ssh keys as they are: set up ssh to the hosts yourself"),
        Option("executable-cache-path", "request.executable_cache_path", FOLDER,
               "Keep compiled programs there, those of torch.compile among them."),
        Option("deterministic", "request.is_deterministic", SWITCH,
               "Let torch use deterministic algorithms only."),
    ),
    *_group(
        "V-IPU",
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
        Option("ipus-per-host", "vipu.ipus_per_host", NUMBER,
               "Virtual IPUs that a host has. [default: its GPUs, else no limit]"),
        Option("pod", "vipu.pod", NAME,
               "Pod to plan for: POD16, POD64, …, or a YAML file. [default: this machine]"),
        Option("pool", "vipu.pool", NAME, "Folder of the pool of virtual IPUs. [default: the machine's]"),
        Option("wait-for-devices", "vipu.waits_for_devices", SWITCH, "Queue until the virtual IPUs are free."),
        Option("share-devices", "vipu.shares_devices", SWITCH, "Use GPUs that other processes use, too."),
        Option("offline-mode", "vipu.is_offline", SWITCH, "Run without virtual IPUs: take none, show none."),
        Option("vipu-server-host", "vipu.server_host", NAME,
               "Take the virtual IPUs from the server there: vipu serve. [default: this machine's pool]"),
        Option("vipu-server-port", "vipu.server_port", NUMBER, "Port of that server."),
        Option("vipu-server-timeout", "vipu.server_timeout_seconds", SECONDS,
               "Time it, or the pool, has to answer."),
        Option("sync-type", "", TEXT,
               "Accepted; virtual IPUs have no sync network.", why_no_effect="virtual IPUs have no sync network"),
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
        Option("allow-run-as-root", "", SWITCH,
               "Accepted; root is allowed.", why_no_effect="root is always allowed"),
        Option("start-timeout", "ending.start_timeout_seconds", SECONDS,
               "Time the instances have to come to life."),
    ),
    *_group(
        "Placement",
        Option("numa-aware", "request.placement", _NUMA, "The older form: yes is spreadnuma, no is disabled."),
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
        Option("hang-report", "ending.hang_report_seconds", SECONDS_OR_OFF,
               "Tell who keeps the others waiting after so long without progress."),
        Option("hang-timeout", "ending.hang_timeout_seconds", SECONDS_OR_OFF,
               "End the job after so long without progress. [default: off]"),
        Option("report", "ending.report_file", FILE, "Write how the job went as JSON."),
    ),
    *_group(
        "Output",
        Option("only-output-from-instance", "output.shown_instances", INSTANCES,
               "Show the output of these instances only: 0 or 0,4-7."),
        Option("tag-output", "output.is_tagged", SWITCH,
               "Put the instance before each line. [default: with several instances]"),
        Option("tag-format", "output.tag_format", TEXT,
               "The tag, with {instance}, {host}, {stream} and the like."),
        Option("fold-output", "output.is_folded", SWITCH, "Show lines that several instances print alike once."),
        Option("log-dir", "output.log_dir", FOLDER, "Keep each instance's output in a file."),
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
)
# fmt: on
"""Every option, in the order of the help page."""

COMMON: Final = (
    *("num-instances", "num-replicas", "ipus-per-replica", "host", "max-restarts", "log-dir"),
    *("monitor", "dry-run", "doctor", "verbose"),
)
"""The options that most jobs use, as the short help page lists them: their help has one line of it."""

INTRO: Final = "Start PROGRAM as many instances (processes) that train a number of model replicas together."

EXAMPLES: Final = """\
Examples:
  poprun --num-instances 2 --num-replicas 4 python train.py --epochs 3
  poprun -H 'node[0-3]' -n 8 --num-replicas 16 --dry-run python train.py
"""
