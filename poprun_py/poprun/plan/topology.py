"""The facts about a machine, which `poprun.hosts.probe` finds, and the cores that instances are bound to. Pure."""

from bisect import bisect_left
from dataclasses import dataclass, replace
from enum import StrEnum

from poprun.makers.maker import DEFAULT_MAKER


class MpiKind(StrEnum):
    """The two families of MPI runtime whose launchers poprun speaks to."""

    MPICH = "mpich"
    OPEN_MPI = "open_mpi"


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiRuntime:
    """An MPI runtime that is installed, with its launcher."""

    kind: MpiKind  # whose command line it takes
    path: str  # absolute path of its ``mpiexec`` or ``mpirun``
    version: str  # as the runtime prints it, such as ``5.0.2``
    # path of MPICH's ``mpiexec.gforker``, which starts jobs of one machine without a port, if used
    forker: str | None = None

    @property
    def launcher(self) -> str:
        """Path of the launcher that is called."""
        return self.forker or self.path

    @property
    def name(self) -> str:
        """What people call it, such as ``MPICH 4.3.2``."""
        return f"{'MPICH' if self.kind is MpiKind.MPICH else 'Open MPI'} {self.version}"

    def __str__(self) -> str:
        return f"{self.name}, {self.launcher}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupant:
    """A process that holds memory on a device."""

    pid: int
    user: str = ""  # whose it is; empty when the system does not say

    def __str__(self) -> str:
        return f"process {self.pid}" + (f" of {self.user}" if self.user else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A device of a machine, or a slice of one that programs use like a device."""

    name: str  # what its maker's mask calls it: a number such as ``3``, or a UUID
    uuid: str = ""  # what the driver calls it, for all users; empty when it is not known
    occupants: tuple[Occupant, ...] = ()  # processes that hold memory on it
    is_leased: bool = False  # whether a job of the pool holds it
    node: int | None = None  # NUMA node that it is attached to, or None where the machine does not say
    model: str = ""  # what the driver calls its kind, such as ``H200``; empty when it is not known
    memory_bytes: int = 0  # size of its memory; 0 when it is not known

    @property
    def is_free(self) -> bool:
        """Whether neither another job nor another process uses it."""
        return not (self.occupants or self.is_leased)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """A hardware thread of a machine, which Linux calls a CPU and poprun a core, and where it sits."""

    number: int
    core: int  # number of the first hardware thread of its physical core: equal for those that share one
    cache: int  # number of the first hardware thread that shares its last-level cache
    node: int  # its NUMA node
    socket: int  # its processor package


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What Slurm has given to the job that poprun was called in."""

    job_id: str  # Slurm's number of the job
    nodes: tuple[str, ...]  # in Slurm's order, at least one
    # what Slurm calls this machine; None on a machine that is no node, as where salloc was called
    node_here: str | None = None
    most_tasks_per_node: int = 0  # --ntasks-per-node, which is a bound where --ntasks is given, too; 0 without one
    tasks_per_node: tuple[int, ...] = ()  # tasks of each node; empty when nobody asked for tasks
    cpus_per_node: tuple[int, ...] = ()  # processors of each node; empty when Slurm does not tell
    num_gpus_per_node: int = 0  # GPUs of each node; 0 when nobody asked for any
    # rank and size of the step of which poprun itself is one of several tasks; None when it is not
    task: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What poprun found on the machine it runs on."""

    hostname: str
    host_aliases: frozenset[str]  # every name and address that means this machine, ``localhost`` among them
    cores: tuple[int, ...]  # numbers of the CPU cores that this process may use, ascending; never empty
    # where each core sits that the affinity allows, more than ``cores`` under a quota; empty if unknown
    cpus: tuple[Cpu, ...] = ()
    memory_nodes: tuple[int, ...] = ()  # NUMA nodes whose memory the process may use, ascending
    gpus: tuple[Gpu, ...] = ()  # the devices that it may use, in slot order
    maker: str = DEFAULT_MAKER  # who has made them, as `poprun.makers` calls it
    gpu_source: str = ""  # what has told of them, such as the name of a tool; empty where nobody has looked
    gpu_problems: tuple[str, ...] = ()  # why devices cannot be used, a sentence each that says what to do
    mpi: MpiRuntime | None = None  # the one found
    unknown_mpi: tuple[str, ...] = ()  # paths of MPI launchers that are of neither family
    user_num_threads: str | None = None  # ``OMP_NUM_THREADS`` as the user set it, or None
    allocation: Allocation | None = None  # None outside Slurm

    @property
    def num_user_threads(self) -> int:
        """The number that the user set ``OMP_NUM_THREADS`` to; 0 when it is not set, or no number."""
        text = self.user_num_threads or ""
        return int(text) if text.isdecimal() else 0

    def within(self, allocation: Allocation | None) -> "MachineFacts":
        """The facts of a node of ``allocation``: this machine's, or those that each node is taken to have."""
        if allocation is None or allocation.node_here is not None or self.hostname in allocation.nodes:
            return replace(self, allocation=allocation)
        return replace(
            self,
            cores=tuple(range(min(allocation.cpus_per_node, default=len(self.cores)))),
            cpus=(),
            memory_nodes=(),
            gpus=tuple(Gpu(name=str(index)) for index in range(allocation.num_gpus_per_node)),
            gpu_source="Slurm",
            gpu_problems=(),
            allocation=allocation,
        )

    def with_cores(self, cores: tuple[int, ...]) -> "MachineFacts":
        """The facts of the part of the machine that has ``cores``."""
        if cores == self.cores:
            return self
        return replace(self, cores=cores, cpus=tuple(cpu for cpu in self.cpus if cpu.number in cores))


class ProcessPlacement(StrEnum):
    """How the instances of a host are placed on its cores; `poprun.plan.placement` says what each one does."""

    SPREADNUMA = "spreadnuma"
    COMPACT = "compact"
    CORE = "core"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What some instances of a host are bound to, on every host of the job alike."""

    instances: tuple[int, ...]  # their indices among the instances of the host, ascending
    cores: tuple[int, ...]  # cores on which their threads may run, ascending; at least one
    # NUMA nodes from which they take memory, ascending; empty leaves that to the kernel
    memory_nodes: tuple[int, ...]

    def holds(self, instance: int) -> bool:
        """Whether ``instance`` is one of ``instances``."""
        position = bisect_left(self.instances, instance)
        return self.instances[position : position + 1] == (instance,)

    def share_of(self, instance: int) -> tuple[int, ...]:
        """The cores of one of ``instances`` when they share the binding's cores out; at least one."""
        position, count = bisect_left(self.instances, instance), len(self.instances)
        first = position * len(self.cores) // count
        return self.cores[first : max(first + 1, (position + 1) * len(self.cores) // count)]
