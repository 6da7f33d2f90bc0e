"""Facts about a machine (cores, GPUs, MPI, Slurm), and bindings of instances to cores, as values. Pure."""

from bisect import bisect_left
from dataclasses import replace
from enum import StrEnum

from popdist.ground.values import dataclass
from poprun.makers.maker import DEFAULT_MAKER


class MpiKind(StrEnum):
    """The two families of MPI runtimes whose launchers poprun can use."""

    MPICH = "mpich"
    OPEN_MPI = "open_mpi"


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiRuntime:
    """An MPI runtime that is installed on this machine, with the path of its launcher."""

    kind: MpiKind  # the family, which decides the launcher's options
    path: str  # absolute path of its ``mpiexec`` or ``mpirun``
    version: str  # the version that the runtime prints, such as ``5.0.2``
    # path of MPICH's ``mpiexec.gforker``, which starts jobs of one machine without a port; None if not used
    forker: str | None = None

    @property
    def launcher(self) -> str:
        """The path of the MPI runtime's program, such as ``mpiexec``, with which poprun starts a job."""
        return self.forker or self.path

    @property
    def name(self) -> str:
        """The name and version of the MPI runtime for messages, such as ``MPICH 4.3.2``."""
        return f"{'MPICH' if self.kind is MpiKind.MPICH else 'Open MPI'} {self.version}"

    def __str__(self) -> str:
        return f"{self.name}, {self.launcher}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupant:
    """A process that uses memory of a GPU."""

    pid: int
    user: str = ""  # the owner of the process; empty if unknown

    def __str__(self) -> str:
        return f"process {self.pid}" + (f" of {self.user}" if self.user else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU of a machine, or a slice of a GPU that a program uses like a GPU."""

    name: str  # its name in the maker's mask: a number such as ``3``, or a UUID
    uuid: str = ""  # the driver's name, the same for all users; empty if unknown
    occupants: tuple[Occupant, ...] = ()  # processes that use its memory
    is_leased: bool = False  # whether another job has leased it
    node: int | None = None  # NUMA node of the device, or None if unknown
    model: str = ""  # the driver's name of its kind, such as ``H200``; empty if unknown
    memory_bytes: int = 0  # size of its memory; 0 if unknown

    @property
    def is_free(self) -> bool:
        """Whether no other job and no other process uses the GPU."""
        return not (self.occupants or self.is_leased)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """A hardware thread of a machine, with its physical core, cache, NUMA node and socket.

    Linux calls a hardware thread a CPU; poprun calls it a core.
    """

    number: int
    core: int  # number of the first hardware thread of its physical core, so equal for all threads of the core
    cache: int  # number of the first hardware thread that shares its last-level cache
    node: int  # its NUMA node
    socket: int  # its processor package


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The hosts, tasks and GPUs that Slurm has given to the Slurm job in which poprun runs."""

    job_id: str  # number of the Slurm job
    nodes: tuple[str, ...]  # names of the nodes in Slurm's order, at least one
    # Slurm's name of this machine; None if this machine is no node, such as the machine of salloc
    node_here: str | None = None
    most_tasks_per_node: int = 0  # --ntasks-per-node, a maximum if --ntasks is also given; 0 if not given
    tasks_per_node: tuple[int, ...] = ()  # tasks of each node; empty if the user did not ask for tasks
    cpus_per_node: tuple[int, ...] = ()  # CPUs of each node; empty if Slurm does not say
    num_gpus_per_node: int = 0  # GPUs of each node; 0 if the user did not ask for GPUs
    # rank and number of tasks if poprun is one of several tasks of a step; otherwise None
    task: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The facts about the machine on which poprun runs: cores, GPUs, MPI, names, Slurm's job."""

    hostname: str
    host_aliases: frozenset[str]  # all names and addresses of this machine, also ``localhost``
    cores: tuple[int, ...]  # numbers of the CPU cores that this process may use, ascending; never empty
    # caches and nodes of all cores in the affinity, more than ``cores`` under a quota; empty if unknown
    cpus: tuple[Cpu, ...] = ()
    memory_nodes: tuple[int, ...] = ()  # NUMA nodes whose memory the process may use, ascending
    gpus: tuple[Gpu, ...] = ()  # the devices that this process may use, in slot order
    maker: str = DEFAULT_MAKER  # name of the devices' maker in `poprun.makers`
    gpu_source: str = ""  # the tool or folder that lists the devices; empty if there is none
    gpu_problems: tuple[str, ...] = ()  # why devices cannot be used and what to do, a sentence for each
    mpi: MpiRuntime | None = None  # the MPI runtime found, or None
    unknown_mpi: tuple[str, ...] = ()  # paths of MPI launchers of unknown families
    user_num_threads: str | None = None  # the user's ``OMP_NUM_THREADS``, or None
    allocation: Allocation | None = None  # None outside Slurm

    @property
    def num_user_threads(self) -> int:
        """The number in the user's variable ``OMP_NUM_THREADS``; 0 if it is not set or no number."""
        text = self.user_num_threads or ""
        return int(text) if text.isdecimal() else 0

    def within(self, allocation: Allocation | None) -> "MachineFacts":
        """Return facts about a node of Slurm's job: this machine's if it is a node, else facts that Slurm gave."""
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
        """Return the facts as if this machine had only the cores ``cores``."""
        if cores == self.cores:
            return self
        return replace(self, cores=cores, cpus=tuple(cpu for cpu in self.cpus if cpu.number in cores))


class ProcessPlacement(StrEnum):
    """The ways to bind a host's instances to its cores; `poprun.plan.placement` explains each way."""

    SPREADNUMA = "spreadnuma"
    COMPACT = "compact"
    CORE = "core"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The cores and NUMA nodes to which some instances of a host are bound, the same on every host."""

    instances: tuple[int, ...]  # indices among the instances of the host, ascending
    cores: tuple[int, ...]  # cores on which the instances' threads may run, ascending; at least one
    # NUMA nodes for the instances' memory, ascending; empty: the kernel decides
    memory_nodes: tuple[int, ...]

    def holds(self, instance: int) -> bool:
        """Whether the instance with the index ``instance`` on its host is bound to the cores of this binding."""
        position = bisect_left(self.instances, instance)
        return self.instances[position : position + 1] == (instance,)

    def share_of(self, instance: int) -> tuple[int, ...]:
        """Return the cores of ``instance``: an equal part of the binding's cores, but at least one core."""
        position, count = bisect_left(self.instances, instance), len(self.instances)
        first = position * len(self.cores) // count
        return self.cores[first : max(first + 1, (position + 1) * len(self.cores) // count)]
