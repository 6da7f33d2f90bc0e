"""Options for what a job is: how many of what, where."""

from typing import Final

from poprun.cli.kinds import (
    COUNTED,
    FILE,
    FLAG,
    FOLDER,
    HOSTS,
    NUMBER,
    NUMBER_OR_AUTO,
    SUBNET,
    SWITCH,
    one_of,
)
from poprun.cli.option import Group, Option, grouped
from poprun.cli.versions import VersionFormat
from poprun.plan.request import LaunchRequest

_DEFAULTS: Final = LaunchRequest()

GENERIC: Final = grouped(
    Group.GENERIC,
    Option(
        "version", "line.prints_version", FLAG, "Print the version and exit.", is_local=True, goes_with_plan=True
    ),
    Option(
        "version-format",
        "line.version_format",
        one_of(VersionFormat, "FORMAT"),
        "Print it as text, or with all that poprun depends on: full-text, full-json.",
        is_local=True,
        goes_with_plan=True,
    ),
    Option(
        "verbose",
        "line.verbosity",
        COUNTED,
        "Say what is done and why; -vv: more of it.",
        short="v",
        goes_with_plan=True,
    ),
)

CONFIGURATION: Final = grouped(
    Group.CONFIGURATION,
    Option("import-config", "line.config_file", FILE, "Read options from FILE; flags win over it.", is_local=True),
    Option(
        "export-config",
        "line.exported_file",
        FILE,
        "Write the options of this call to FILE as YAML.",
        is_local=True,
    ),
    Option("overwrite-config", "line.may_overwrite", SWITCH, "Let --export-config replace a file.", is_local=True),
    Option(
        "num-instances",
        "request.num_instances",
        NUMBER_OR_AUTO,
        "Processes in all; auto: one per free GPU. [default: 1 on each host]",
        short="n",
    ),
    Option(
        "num-replicas",
        "request.num_replicas",
        NUMBER,
        "Model replicas in all, dealt evenly to the instances. [default: one per instance]",
    ),
    Option(
        "ipus-per-replica",
        "request.ipus_per_replica",
        NUMBER,
        f"Virtual IPUs per replica: GPUs or shares of the cores. [default: {_DEFAULTS.ipus_per_replica}]",
    ),
    Option(
        "host",
        "request.hosts",
        HOSTS,
        "Where to run: a,b or host[0-2,4]. [default: this machine]",
        short="H",
    ),
    Option("hostfile", "line.host_file", FILE, "File with a host on each line, in place of --host."),
    Option(
        "host-subnet",
        "remote.subnet",
        SUBNET,
        "Network between the hosts. [default: the one that leads to them]",
    ),
    Option(
        "ssh-config",
        "remote.ssh_config",
        FILE,
        "What ssh to the hosts reads in place of ~/.ssh/config.",
    ),
    Option(
        "synchronise-python-venv",
        "remote.synchronises_venv",
        SWITCH,
        "Copy the virtual environment to hosts that lack it.",
    ),
    Option(
        "synchronise-poplar-sdk",
        "",
        SWITCH,
        "Accepted; there is no SDK to copy.",
        why_no_effect="there is no Poplar SDK here to copy",
    ),
    Option(
        "distribute-ssh-key",
        "",
        SWITCH,
        "Accepted; keys are left as they are.",
        why_no_effect="poprun leaves ssh keys as they are: set up ssh to the hosts yourself",
    ),
    Option(
        "executable-cache-path",
        "request.executable_cache_path",
        FOLDER,
        "Keep compiled programs there, those of torch.compile among them.",
    ),
    Option("deterministic", "request.is_deterministic", SWITCH, "Let torch use deterministic algorithms only."),
)
