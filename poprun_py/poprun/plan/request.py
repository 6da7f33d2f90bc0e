"""The request: everything that the user asks of a job, before facts about the machine are known, and checks.

Replicas divide over instances, instances divide over hosts, and every count is at least 1. An error says what was
asked, which rule is broken, and the nearest legal choices. The settings for output, ending, hosts and virtual IPUs
go unchanged from the request to the plan.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from popdist.ground.values import dataclass
from poprun.errors import PlanError
from poprun.plan.topology import ProcessPlacement
from poprun.text import IF_USED
from poprun.text.ranges import fold_numbers

if TYPE_CHECKING:
    from popsize.hardware import PlannedDevices

MAX_COUNT: Final = 2**20  # largest number of instances or replicas, because poprun makes lists of them
_NUM_CHOICES: Final = 3

TAG_FIELDS: Final = ("instance", "local_instance", "host", "replicas", "stage", "shard", "stream")
"""The fields that the template of an output line's tag may contain."""

POPRUN_TAG: Final = "[1,{instance}]<{stream}>:"  # PopRun's tag, for --tag-output
USUAL_TAG: Final = "[{instance}] "
_PIECE: Final = r"\{\{|\}\}|\{(?P<name>[a-z_]*)(?::(?P<width>[<>^]?[1-9][0-9]?))?\}|(?P<brace>[{}])"

DEFAULT_PORT: Final = 8090  # port at which a server of virtual IPUs listens
_MAX_PORT: Final = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSettings:
    """The settings for printing the programs' output and storing it in logs."""

    shown_instances: tuple[int, ...] | None = None  # the instances whose output is shown, ascending; None for all
    # whether lines start with a tag; None: only with several instances or with ``tag_format``
    is_tagged: bool | None = None
    tag_format: str | None = None  # the tag's template, see `check_tag_format`; None: the usual tag
    is_folded: bool = False  # whether a line that several instances print is shown once
    log_dir: str | None = None  # directory for each instance's log, absolute or below the working directory
    has_monitor: bool = False  # whether a live view of the instances is shown instead of their output


@dataclass(frozen=True, slots=True, kw_only=True)
class EndingSettings:
    """The time limits of a job, its number of restarts, and its reports."""

    stop_timeout_seconds: float = 5.0  # time between the request to stop and the kill of a program
    start_timeout_seconds: float = 60.0  # time in which all instances must start
    timeout_seconds: float | None = None  # time limit of the whole job; None: no limit
    max_restarts: int = 0
    # whether a job restarts even if the same failure seems certain
    restarts_anyway: bool = field(default=False, metadata=IF_USED)
    hang_report_seconds: float | None = 120.0  # time without progress until a report; None: no report
    hang_timeout_seconds: float | None = None  # time without progress until the job is ended; None: never
    report_files: tuple[str, ...] = ()  # absolute or below the working directory; pages (.html) and data (.json)
    # the port of 127.0.0.1 for Prometheus, 0 for a free port, or None for no metrics
    metrics_port: int | None = field(default=None, metadata=IF_USED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """The settings for connections to the hosts of a job."""

    subnet: str | None = None  # network of the job, such as ``10.0.0.0/16``; None: the network that ssh uses
    ssh_config: str | None = None  # file with the configuration of ssh; None: the user's usual file
    synchronises_venv: bool = False  # whether hosts without poprun's Python environment get a copy
    slurm_job: str | None = None  # number of the Slurm job with the hosts; None: poprun uses ssh


@dataclass(frozen=True, slots=True, kw_only=True)
class VipuSettings:
    """The settings for the virtual IPUs of a job, and for the pool (file of leases) or server that leases them."""

    partition: str | None = None  # name of the partition to use or create, or None
    partition_attempts: int = 1  # number of attempts if the partition is not ready
    allocation: str | None = None  # name of the allocation to create the partition in, or None
    cluster: str | None = None  # name of the allocation, by an older option, or None
    updates_partition: bool = False  # whether poprun may change or create the partition if it does not fit
    resets_partition: bool | None = None  # whether to reset the partition first; None: only if necessary
    removes_partition: bool = True  # whether to remove a partition that poprun created, at the end
    num_ilds: int | None = None  # number of IPU-Link domains; None: as the pod has them
    ipus_per_host: int | None = None  # virtual IPUs of a host; None: its GPUs, or no limit without GPUs
    waits_for_devices: bool = False  # whether to wait in a queue until the virtual IPUs are free
    shares_devices: bool = False  # whether the job may use GPUs that other processes use
    is_offline: bool = False  # whether the job runs without virtual IPUs
    server_host: str | None = None  # host of the pool's server; None: the machine's own pool
    server_port: int = DEFAULT_PORT
    server_timeout_seconds: float = 120.0  # time in which the pool or the server must answer
    pool: str | None = None  # folder of the pool; None: the machine's usual folder
    pod: str | None = None  # the pod to plan for: its name, or a YAML file that describes it


class LauncherChoice(StrEnum):
    """The launcher that the user chose; ``AUTO``: MPI if found, else srun in a Slurm job, else poprun itself."""

    AUTO = "auto"
    MPI = "mpi"
    LOCAL = "local"
    SRUN = "srun"


TRACED_STEPS: Final = range(5, 10)
"""The steps of the optimizer that a trace records if the user does not choose steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """The settings of a trace (profile) of a job: its folder, and which steps or seconds it records."""

    folder: str | None = None  # directory of the trace, absolute or below the working directory; None: no trace
    steps: range | None = None  # steps of the optimizer, from 0; None: ``TRACED_STEPS``, or ``seconds`` if given
    seconds: float | None = None  # time to record from the first call of a torch module, instead of steps


NO_TRACE: Final = TraceSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedMapping:
    """The user's mapping of replicas to instances, given by ``--parallelism`` as words or as a file's name."""

    text: str  # the words or the name of the file, as the user wrote it
    tensor: int = 1  # number of instances that share each layer
    pipeline: int = 1  # number of stages into which the layers are divided
    replicas: int | None = None  # model replicas in the whole job; None if not given
    path: str | None = None  # absolute path of the file, or None for words
    devices: "PlannedDevices | None" = None  # the devices for which the file was planned; None for words


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """Everything that the user asks of a job, as one frozen value.

    Attributes:
        program: The program's command line, made executable by ``poprun.hosts.probe.program``; may be empty.
        working_directory: Absolute path in which every instance starts.
        num_instances: Processes in the job; None asks for one per free GPU, or 1 without GPUs (``auto``).
        num_replicas: Model replicas in the whole job; None means as many as the instances have room for.
        ipus_per_replica: Virtual IPUs of one replica, at least 1; None means one for each instance of the replica.
        instances_per_replica: Instances that share one replica; None means as in ``mapping``, otherwise 1.
        mapping: How instances share a replica; None if the program has its own mesh, or if nothing is shared.
        hosts: Names of the hosts, in order; empty means this machine.
        launcher: How to start the processes.
        mpi_global_args: Extra words for the MPI launcher, before its process count.
        mpi_local_args: Extra words for the MPI launcher, after its process count.
        instance_mpi_local_args: Pairs of an instance and its own extra words.
        placement: Which cores the instances get.
        threads_per_replica: Threads of each replica for arithmetic; None divides the cores among the replicas.
        is_debugged: Whether programs print more about failures.
        is_deterministic: Whether torch uses only deterministic algorithms.
        executable_cache_path: Directory for compiled programs, absolute or below ``working_directory``, or None.
        vipu: Settings for the pool of virtual IPUs.
        output: Settings for showing and keeping the programs' output.
        ending: Time limits, restarts and reports of the job.
        remote: How poprun reaches the hosts.
        trace: Settings of a trace; ``NO_TRACE`` for no trace.
        is_watched: Whether poprun observes the programs: their steps, calls and stacks.
    """

    program: tuple[str, ...] = ()
    working_directory: str = "."
    num_instances: int | None = 1
    num_replicas: int | None = None
    ipus_per_replica: int | None = None
    instances_per_replica: int | None = None
    mapping: AskedMapping | None = None
    hosts: tuple[str, ...] = ()
    launcher: LauncherChoice = LauncherChoice.AUTO
    mpi_global_args: tuple[str, ...] = ()
    mpi_local_args: tuple[str, ...] = ()
    instance_mpi_local_args: tuple[tuple[int, tuple[str, ...]], ...] = ()
    placement: ProcessPlacement = ProcessPlacement.SPREADNUMA
    threads_per_replica: int | None = None
    is_debugged: bool = False
    is_deterministic: bool = False
    executable_cache_path: str | None = None
    vipu: VipuSettings = field(default_factory=VipuSettings)
    output: OutputSettings = field(default_factory=OutputSettings)
    ending: EndingSettings = field(default_factory=EndingSettings)
    remote: RemoteSettings = field(default_factory=RemoteSettings)
    trace: TraceSettings = NO_TRACE
    is_watched: bool = True


def check_output(output: OutputSettings, num_instances: int, *, has_mesh: bool = True) -> None:
    """Raise PlanError if an instance, a path or the tag of lines in ``output`` is wrong. A tag may have the fields
    stage and shard only if the stage and shard of each instance are known (``has_mesh``).
    """
    unknown = [index for index in output.shown_instances or () if not 0 <= index < num_instances]
    if unknown:
        raise PlanError(
            f"--only-output-from-instance {fold_numbers(unknown)}: there is no such instance; "
            f"--num-instances {num_instances} numbers them from 0 to {num_instances - 1}"
        )
    if output.tag_format is not None:
        check_tag_format(output.tag_format, has_mesh=has_mesh)
        if output.is_tagged is False:
            raise PlanError("--tag-format is of no use with --no-tag-output: leave one of them out")
    check_path("--log-dir", output.log_dir)


def check_ending(ending: EndingSettings) -> None:
    """Raise PlanError if a time limit, number of restarts or report file in ``ending`` is impossible."""
    _check_seconds("--stop-timeout", ending.stop_timeout_seconds, may_be_zero=True)
    for option, seconds in (
        ("--start-timeout", ending.start_timeout_seconds),
        ("--timeout", ending.timeout_seconds),
        ("--hang-report", ending.hang_report_seconds),
        ("--hang-timeout", ending.hang_timeout_seconds),
    ):
        if seconds is not None:
            _check_seconds(option, seconds, may_be_zero=False)
    check_count("--max-restarts", ending.max_restarts, minimum=0)
    for file in ending.report_files:
        check_path("--report", file)
        if not file.endswith((".html", ".json")):
            raise PlanError(f"--report {file} is not possible: its name has to end in .html, or in .json for data")
    if ending.metrics_port is not None and not 0 <= ending.metrics_port <= _MAX_PORT:
        raise PlanError(
            f"--metrics-port {ending.metrics_port} is not possible: give 1 to {_MAX_PORT}, or 0 for a free one"
        )


def check_remote(remote: RemoteSettings) -> None:
    """Raise PlanError if the path of ssh's configuration file is unusable, or the network is malformed."""
    check_path("--ssh-config", remote.ssh_config)
    if remote.ssh_config is not None and len(remote.ssh_config.split()) != 1:
        raise PlanError(
            f"--ssh-config {remote.ssh_config!r} has a blank in its path, which the MPI launchers cannot pass on"
        )
    if remote.subnet is not None:
        from ipaddress import ip_network

        try:
            ip_network(remote.subnet)
        except ValueError as error:
            raise PlanError(
                f"--host-subnet {remote.subnet} is no subnet: {error}; write it like 10.0.0.0/16 or fd00::/64"
            ) from None


def check_trace(trace: TraceSettings) -> None:
    """Raise PlanError if the steps or seconds to record in ``trace`` are impossible or contradictory."""
    check_path("--trace", trace.folder)
    if trace.folder is None and (trace.steps is not None or trace.seconds is not None):
        raise PlanError("--trace-steps and --trace-seconds say how much to record: give --trace DIR, too")
    if trace.steps is not None and trace.seconds is not None:
        raise PlanError("--trace-steps and --trace-seconds cannot go together: leave one out")
    if trace.steps is not None and not (trace.steps and trace.steps.start >= 0):
        raise PlanError(
            f"--trace-steps {trace.steps.start}:{trace.steps.stop} has no step: 20:25 are those from 20 to 24"
        )
    if trace.seconds is not None:
        _check_seconds("--trace-seconds", trace.seconds, may_be_zero=False)


def _check_seconds(option: str, seconds: float, *, may_be_zero: bool) -> None:
    if not math.isfinite(seconds) or seconds < 0 or not (seconds or may_be_zero):
        bound = "from 0 up" if may_be_zero else "greater than 0"
        raise PlanError(f"{option} {seconds:g} is not possible: it is a number of seconds {bound}")


def check_path(option: str, path: str | None) -> None:
    """Raise PlanError if ``path``, the value of ``option``, is not None and cannot be a path."""
    if path is not None and (not path or "\0" in path):
        raise PlanError(f"{option} {path!r} is not possible: it is a path")


def check_vipu(vipu: VipuSettings, num_instances: int) -> None:
    """Raise PlanError if the settings for virtual IPUs are impossible with ``num_instances`` instances."""
    check_count("--vipu-partition-attempts", vipu.partition_attempts)
    for option, count in (("--num-ilds", vipu.num_ilds), ("--ipus-per-host", vipu.ipus_per_host)):
        if count is not None:
            check_count(option, count)
    if vipu.num_ilds is not None and vipu.num_ilds > num_instances:
        raise PlanError(
            f"--num-ilds {vipu.num_ilds} is more than --num-instances {num_instances}: each IPU-Link domain needs "
            f"an instance; give --num-instances {vipu.num_ilds} or more, or --num-ilds {num_instances} or fewer"
        )
    if not 1 <= vipu.server_port <= _MAX_PORT:
        raise PlanError(f"--vipu-server-port {vipu.server_port} is not possible: it is 1 to {_MAX_PORT}")
    if vipu.server_host is not None and vipu.pod is not None:
        raise PlanError(
            f"--vipu-server-host {vipu.server_host} and --pod {vipu.pod} cannot go together: the server says "
            "which IPUs there are; leave one out"
        )
    _check_seconds("--vipu-server-timeout", vipu.server_timeout_seconds, may_be_zero=False)
    for option, name in (
        ("--vipu-partition", vipu.partition),
        ("--vipu-allocation", vipu.allocation),
        ("--vipu-cluster", vipu.cluster),
        ("--vipu-server-host", vipu.server_host),
        ("--pool", vipu.pool),
        ("--pod", vipu.pod),
    ):
        if name is not None and not (name and name.isprintable()):
            raise PlanError(f"{option} {name!r} is not possible: a name has characters that can be printed")


def check_tag_format(template: str, *, has_mesh: bool = True) -> None:
    """Raise PlanError if ``template``, for an output line's tag, has an unknown field or an unmatched brace."""
    known = [name for name in TAG_FIELDS if has_mesh or name not in ("stage", "shard")]
    fields = ", ".join(f"{{{name}}}" for name in known)
    for piece in re.finditer(_PIECE, template):
        if piece["brace"]:
            raise PlanError(
                f"--tag-format {template!r}: there is no field at {template[piece.start() :]!r}; there are "
                f"{fields}, each with a width if you like, such as {{instance:>3}}, and {{{{ }}}} for braces"
            )
        if piece["name"] is not None and piece["name"] not in known:
            why = " where --instances-per-replica stands for --parallelism" if piece["name"] in TAG_FIELDS else ""
            raise PlanError(f"--tag-format {template!r}: there is no {piece[0]}{why}; there are {fields}")


def check_count(option: str, count: int, *, minimum: int = 1) -> None:
    """Raise PlanError if ``count``, the value of ``option``, is not from ``minimum`` to ``MAX_COUNT``."""
    if count < minimum:
        raise PlanError(f"{option} {count} is not possible: it must be at least {minimum}")
    if count > MAX_COUNT:
        raise PlanError(f"{option} {count} is not possible: it can be at most {MAX_COUNT}")


def check_counts(
    *, num_instances: int, num_replicas: int | None, num_hosts: int, instances_per_replica: int = 1
) -> None:
    """Raise PlanError unless all hosts have equally many instances, and all instances equally many replicas (if
    instances share replicas, all replicas equally many instances).
    """
    check_count("--num-instances", num_instances)
    if num_replicas is not None:
        check_count("--num-replicas", num_replicas)
    if instances_per_replica > 1:
        _check_shared(num_instances, num_replicas, num_hosts, instances_per_replica)
    elif num_instances % num_hosts:
        raise PlanError(_instances_over_hosts(num_instances, num_replicas, num_hosts))
    elif num_replicas is not None and num_replicas % num_instances:
        raise PlanError(_replicas_over_instances(num_instances, num_replicas, num_hosts))


def check_ipus_per_replica(ipus_per_replica: int, instances_per_replica: int) -> None:
    """Raise PlanError if a replica's virtual IPUs do not divide over the replica's instances."""
    check_count("--ipus-per-replica", ipus_per_replica)
    if ipus_per_replica % instances_per_replica:
        nearest = _choices(_multiples_around(ipus_per_replica, instances_per_replica), "virtual IPU")
        raise PlanError(
            f"--ipus-per-replica {ipus_per_replica} does not divide over the {instances_per_replica} instances of "
            f"a replica; nearest: {nearest}, or leave it out for {instances_per_replica}"
        )


def legal_instances(num_replicas: int, num_hosts: int, instances_per_replica: int = 1) -> list[int]:
    """Return all possible numbers of instances, ascending, for ``num_replicas`` replicas on the job's hosts."""
    if instances_per_replica > 1:
        counts: Iterable[int] = (num_replicas * instances_per_replica,)
    else:
        counts = _divisors(num_replicas)
    return [count for count in counts if count % num_hosts == 0]


def _check_shared(num_instances: int, num_replicas: int | None, num_hosts: int, size: int) -> None:
    """Raise PlanError if the counts do not fit a job in which ``size`` instances share each replica."""
    step = math.lcm(size, num_hosts)
    if num_instances % step:
        hosts = f" and {num_hosts} hosts" if num_instances % num_hosts else ""
        sizes = _nearest((count for count in _divisors(num_instances) if count > 1), size)
        nearest = _choices(_multiples_around(num_instances, step), "instance")
        replicas = "" if hosts or not sizes else f"replicas of {_choices(sizes, 'instance')}"
        raise PlanError(
            f"--num-instances {num_instances} does not divide into replicas of {size} instances{hosts}; "
            f"nearest: {_either(nearest, replicas)}"
        )
    if num_replicas is not None and num_replicas * size != num_instances:
        wanted = num_replicas * size
        more = f", or give --num-instances {wanted}" if wanted % num_hosts == 0 and wanted <= MAX_COUNT else ""
        raise PlanError(
            f"--num-replicas {num_replicas} contradicts --num-instances {num_instances}, which are "
            f"{num_instances // size} replicas of {size} instances: leave out --num-replicas{more}"
        )


def _replicas_over_instances(num_instances: int, num_replicas: int, num_hosts: int) -> str:
    replicas = _multiples_around(num_replicas, num_instances)
    instances = _nearest(legal_instances(num_replicas, num_hosts), num_instances)
    nearest = _either(_choices(replicas, "replica"), _choices(instances, "instance"))
    if num_replicas < num_instances:
        return (
            f"--num-instances {num_instances} is more than --num-replicas {num_replicas}: "
            f"each instance needs a replica; nearest: {nearest}"
        )
    return (
        f"--num-replicas {num_replicas} does not divide over --num-instances {num_instances}; nearest: {nearest}"
    )


def _instances_over_hosts(num_instances: int, num_replicas: int | None, num_hosts: int) -> str:
    if num_replicas is None:
        instances = _multiples_around(num_instances, num_hosts)
    else:
        instances = _nearest(legal_instances(num_replicas, num_hosts), num_instances)
    hosts = _nearest((count for count in _divisors(num_instances) if count < num_hosts), num_hosts)
    nearest = _either(_choices(instances, "instance"), _choices(hosts, "host"))
    return (
        f"--num-instances {num_instances} does not divide over the {num_hosts} hosts of --host; nearest: {nearest}"
    )


def _divisors(number: int) -> Iterator[int]:
    """Yield all divisors of ``number``, ascending."""
    small = [count for count in range(1, int(number**0.5) + 1) if number % count == 0]
    yield from small
    yield from (number // count for count in reversed(small) if count * count != number)


def _multiples_around(number: int, step: int) -> list[int]:
    """Return the multiples of ``step`` next to ``number``, below and above, from 1 to ``MAX_COUNT``."""
    below = number // step * step
    return [count for count in (below, below + step) if 0 < count <= MAX_COUNT]


def _nearest(counts: Iterable[int], wanted: int) -> list[int]:
    """Return the three numbers in ``counts`` that are closest to ``wanted``, ascending."""
    return sorted(sorted(counts, key=lambda count: abs(count - wanted))[:_NUM_CHOICES])


def _choices(counts: list[int], noun: str) -> str:
    """Return ``counts`` with their noun as text, such as ``4 or 8 replicas``; "" if there are no counts."""
    if not counts:
        return ""
    *others, last = map(str, counts)
    words = f"{', '.join(others)} or {last}" if others else last
    return f"{words} {noun}" if counts == [1] else f"{words} {noun}s"


def _either(first: str, second: str) -> str:
    return ", or ".join(filter(None, (first, second)))
