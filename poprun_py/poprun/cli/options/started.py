"""Options for how processes begin."""

from typing import Final

from poprun.cli.kinds import NUMBER, SECONDS, SWITCH, WORDS, WORDS_OF_INSTANCES, Kind, one_of
from poprun.cli.option import Group, Option, grouped
from poprun.plan.binding import ProcessPlacement
from poprun.plan.request import LauncherChoice, LaunchRequest

_DEFAULTS: Final = LaunchRequest()


def _numa_placement(text: str) -> ProcessPlacement:
    return ProcessPlacement.SPREADNUMA if SWITCH.read(text) else ProcessPlacement.DISABLED


_NUMA: Final = Kind(metavar="", read=_numa_placement, is_switch=True)

MPI: Final = grouped(
    Group.MPI,
    Option(
        "launcher",
        "request.launcher",
        one_of(LauncherChoice),
        f"Start with MPI, or without; auto: MPI, where there is one. [default: {_DEFAULTS.launcher}]",
    ),
    Option(
        "mpi-global-args",
        "request.mpi_global_args",
        WORDS,
        "Words for the MPI launcher, before its process count; may be repeated.",
    ),
    Option(
        "mpi-local-args",
        "request.mpi_local_args",
        WORDS,
        "Words for the MPI launcher, after its process count; may be repeated.",
    ),
    Option(
        "instance-mpi-local-args",
        "request.instance_mpi_local_args",
        WORDS_OF_INSTANCES,
        "The same for one instance: 0:'-x A=1'; may be repeated.",
    ),
    Option(
        "allow-run-as-root",
        "",
        SWITCH,
        "Accepted; root is allowed.",
        why_no_effect="root is always allowed",
    ),
    Option(
        "start-timeout",
        "ending.start_timeout_seconds",
        SECONDS,
        f"Time the instances have to come to life. [default: {_DEFAULTS.ending.start_timeout_seconds:g}]",
    ),
)

PLACEMENT: Final = grouped(
    Group.PLACEMENT,
    Option("numa-aware", "request.placement", _NUMA, "The older form: yes is spreadnuma, no is disabled."),
    Option(
        "process-placement",
        "request.placement",
        one_of(ProcessPlacement, "HOW"),
        f"Cores of the instances: {', '.join(ProcessPlacement)}. [default: {_DEFAULTS.placement}]",
    ),
    Option(
        "threads-per-replica",
        "request.threads_per_replica",
        NUMBER,
        "Value of OMP_NUM_THREADS. [default: the cores shared out to the replicas]",
    ),
)
