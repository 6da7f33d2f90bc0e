"""Options for virtual IPUs: the partition that a job holds."""

from typing import Final

from poprun.cli.kinds import NAME, NUMBER, SECONDS, SWITCH, TEXT
from poprun.cli.option import Group, Option, grouped
from poprun.plan.vipu_settings import VipuSettings

_DEFAULTS: Final = VipuSettings()

VIPU: Final = grouped(
    Group.VIPU,
    Option("vipu-partition", "vipu.partition", NAME, "Partition to use, or to create."),
    Option(
        "vipu-partition-attempts",
        "vipu.partition_attempts",
        NUMBER,
        f"Times to try for a partition that is not ready. [default: {_DEFAULTS.partition_attempts}]",
    ),
    Option("vipu-allocation", "vipu.allocation", NAME, "Allocation to create the partition in."),
    Option("vipu-cluster", "vipu.cluster", NAME, "The same under its older name."),
    Option(
        "update-partition",
        "vipu.updates_partition",
        SWITCH,
        "Change the partition, or create it, where it is needed.",
    ),
    Option(
        "reset-partition",
        "vipu.resets_partition",
        SWITCH,
        "Reset the partition first. [default: only where it has to be]",
    ),
    Option(
        "remove-partition",
        "vipu.removes_partition",
        SWITCH,
        "Remove afterwards a partition that poprun created. [default: yes]",
    ),
    Option("num-ilds", "vipu.num_ilds", NUMBER, "IPU-Link domains of the job. [default: as the pod has them]"),
    Option(
        "ipus-per-host",
        "vipu.ipus_per_host",
        NUMBER,
        "Virtual IPUs that a host has. [default: its GPUs, else no limit]",
    ),
    Option("pod", "vipu.pod", NAME, "Pod to plan for: POD16, POD64, …, or a YAML file. [default: this machine]"),
    Option("pool", "vipu.pool", NAME, "File of the pool of virtual IPUs. [default: the machine's]"),
    Option("wait-for-devices", "vipu.waits_for_devices", SWITCH, "Queue until the virtual IPUs are free."),
    Option("share-devices", "vipu.shares_devices", SWITCH, "Use GPUs that other processes use, too."),
    Option("offline-mode", "vipu.is_offline", SWITCH, "Run without virtual IPUs: take none, show none."),
    Option(
        "vipu-server-host",
        "vipu.server_host",
        NAME,
        "Take the virtual IPUs from the server there: vipu serve. [default: this machine's pool]",
    ),
    Option(
        "vipu-server-port", "vipu.server_port", NUMBER, f"Port of that server. [default: {_DEFAULTS.server_port}]"
    ),
    Option(
        "vipu-server-timeout",
        "vipu.server_timeout_seconds",
        SECONDS,
        f"Time it, or the pool, has to answer. [default: {_DEFAULTS.server_timeout_seconds:g}]",
    ),
    Option(
        "sync-type",
        "",
        TEXT,
        "Accepted; virtual IPUs have no sync network.",
        why_no_effect="virtual IPUs have no sync network",
    ),
)
