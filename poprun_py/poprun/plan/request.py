"""What the user asked for, before anything is known about the machine.

The defaults of all options live here and in `poprun.plan.settings`.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from poprun.plan.settings import EndingSettings, OutputSettings, RemoteSettings, VipuSettings
from poprun.plan.topology import ProcessPlacement


class LauncherChoice(StrEnum):
    """How the processes are to be started: ``AUTO`` takes MPI where there is one, else Slurm in an allocation."""

    AUTO = "auto"
    MPI = "mpi"
    LOCAL = "local"
    SRUN = "srun"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """What a job is asked to be, as values.

    Attributes:
        program: The program's words, made executable by ``poprun.probe.program``; may be empty in a dry run.
        working_directory: Absolute path in which every instance starts.
        num_instances: Processes in the job; None asks for one per free GPU, else 1 (``auto``).
        num_replicas: Model replicas in the whole job; None means one per instance.
        ipus_per_replica: Virtual IPUs that one replica uses.
        hosts: Names to run on, in order; empty means this machine.
        launcher: How to start the processes.
        mpi_global_args: Extra words for the MPI launcher, before its process count.
        mpi_local_args: Extra words for the MPI launcher, after its process count.
        instance_mpi_local_args: Pairs of an instance and its own extra words.
        placement: Which cores the instances get.
        threads_per_replica: Threads for each replica's arithmetic; None shares out the cores.
        is_debugged: Whether programs are to say more of what goes wrong.
        is_deterministic: Whether torch is to use deterministic algorithms only.
        executable_cache_path: Directory for compiled programs, or None; a relative one starts at the job's working
            directory.
        vipu: What is asked of the pool of virtual IPUs.
        output: What is shown and kept of what the programs print.
        ending: When the job ends other than by itself, and what is told of it.
        remote: How the hosts are reached.
    """

    program: tuple[str, ...] = ()
    working_directory: str = "."
    num_instances: int | None = 1
    num_replicas: int | None = None
    ipus_per_replica: int = 1
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
