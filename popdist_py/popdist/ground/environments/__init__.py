"""The job of a program that poprun did not start, read from the environment variables of other launchers.

torchrun, Open MPI's mpirun, MPICH's mpiexec (Hydra), Slurm's srun and an indexed Job of Kubernetes each give a
process its rank and the number of ranks. Such a process is one instance with one replica, or with as many replicas
as ``POPDIST_NUM_TOTAL_REPLICAS`` says. Pure: reads the environment, never writes to it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from popdist.errors import ContractError
from popdist.ground import contract as names
from popdist.ground.contract import Contract, read_count, read_master
from popdist.ground.environments.slurm import NODES, first_node, read_slurm
from popdist.ground.layout import ReplicaLayout

COMPLETION_INDEX: Final = "JOB_COMPLETION_INDEX"
"""The index of a pod: https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode"""

LOOPBACK_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Launcher(StrEnum):
    """The launcher that started a process; the value is the launcher's name in messages."""

    POPRUN = "poprun"
    TORCHRUN = "torchrun"
    OPEN_MPI = "Open MPI"
    HYDRA = "MPICH (Hydra)"
    SLURM = "Slurm (srun)"
    KUBERNETES = "Kubernetes (indexed Job)"
    NONE = "no launcher"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The job that the environment variables of a process describe, and the launcher of the job."""

    launcher: Launcher  # the launcher that has set the variables
    contract: Contract  # the job; one instance with one replica if there is no launcher
    first_node: str = ""  # under Slurm, the name of the node of instance 0; otherwise empty
    says_replicas: bool = False
    """Whether poprun, directly or in a job that it has emitted, has set the number of replicas."""

    def ipus_of_replica(self, count: int | None) -> int:
        """Return the number of virtual IPUs (cores or accelerators) of each replica: ``count``, or if None the
        job's number. Raise ContractError if poprun has given the replicas another number than ``count``.
        """
        of_job = self.contract.ipus_per_replica
        if count in (None, of_job) or not self.says_replicas:
            return of_job if count is None else count
        raise ContractError(
            f"ipus_per_replica={count}, and poprun gave each replica {of_job}: start the program with "
            f"--ipus-per-replica {count}, or leave ipus_per_replica out"
        )

    def layout_of_model(self, num_local_replicas: int | None) -> ReplicaLayout:
        """Return the assignment of replicas to instances: ``num_local_replicas`` to each, or if None the job's
        number. Raise ContractError if poprun has given another number, or if instances share a replica.
        """
        layout = self.contract.layout
        if num_local_replicas in (None, layout.num_local_replicas):
            return layout
        if self.contract.parallelism.is_shared:
            raise ContractError(
                f"num_local_replicas={num_local_replicas}, and in this job "
                f"{self.contract.parallelism.instances_per_replica} instances share each replica: leave "
                "num_local_replicas out, or start the program without --parallelism and --instances-per-replica"
            )
        if self.says_replicas:
            raise ContractError(
                f"num_local_replicas={num_local_replicas}, and poprun gave each of the {layout.num_instances} "
                f"instances {layout.num_local_replicas}: start the program with --num-replicas "
                f"{layout.num_instances * num_local_replicas}, or leave num_local_replicas out"
            )
        return ReplicaLayout(
            num_instances=layout.num_instances, num_replicas=layout.num_instances * num_local_replicas
        )


def detect(env: Mapping[str, str]) -> Environment:
    """Return the job that poprun or another launcher describes in ``env``; otherwise a job of this process alone.

    Raises ContractError if a job of several processes is not described completely, or two launchers describe
    different jobs.
    """
    if (contract := Contract.from_env(env)) is not None:
        return Environment(launcher=Launcher.POPRUN, contract=contract, says_replicas=True)
    joined = _detect_ranks(env)
    if joined.launcher is Launcher.NONE and names.NUM_REPLICAS in env:
        raise ContractError(
            f"{names.NUM_REPLICAS} tells of a job, and nothing tells which instance of it this is: start the "
            "program with poprun, mpiexec or srun, or unset every POPDIST_ variable to run it alone"
        )
    return replace(joined, contract=joined.contract.shaped(env), says_replicas=names.NUM_REPLICAS in env)


def _detect_ranks(env: Mapping[str, str]) -> Environment:
    """Return the job that another launcher's ranks describe, with one replica for each instance."""
    environments = [
        Environment(launcher=launcher, contract=job)
        for launcher, read in _READERS.items()
        if (job := read(env)) is not None
    ]
    jobs = {
        (environment.contract.instance_index, environment.contract.num_instances): environment
        for environment in environments
    }
    if len(jobs) > 1:
        launchers = "; ".join(
            f"{environment.launcher} tells of rank {rank} of {size}" for (rank, size), environment in jobs.items()
        )
        raise ContractError(f"{launchers}: start the program with one launcher, not with two inside each other")
    if environments:
        return environments[0]
    if (job := read_slurm(env)) is not None:  # last, because srun may have started torchrun or the MPI runtime
        return Environment(launcher=Launcher.SLURM, contract=job, first_node=first_node(env.get(NODES, "")))
    return Environment(launcher=Launcher.NONE, contract=Contract())


def _read_indexed_job(env: Mapping[str, str]) -> Contract | None:
    """Return the job of a Kubernetes indexed Job, where a pod's index is the rank; None if ``env`` has none."""
    return _read_torch({**env, names.RANK: env[COMPLETION_INDEX]}) if _is_indexed(env) else None


def _is_indexed(env: Mapping[str, str]) -> bool:
    index = env.get(COMPLETION_INDEX)
    is_rank = index is not None and env.get(names.RANK, index) == index
    return is_rank and names.WORLD_SIZE in env and names.RUN_ID not in env


def _read_torchrun(env: Mapping[str, str]) -> Contract | None:
    return None if _is_indexed(env) else _read_torch(env)


def _read_torch(env: Mapping[str, str]) -> Contract | None:
    """Return the job that ``RANK`` and ``WORLD_SIZE`` describe; None if either variable is unset."""
    if names.RANK not in env or names.WORLD_SIZE not in env:
        _refuse_half(env)
        return None
    rank, size = _read_rank(env, names.RANK, names.WORLD_SIZE)
    master = read_master(env)
    if master is None and size > 1:
        if any(name in env for name in (names.OMPI_RANK, names.HYDRA_RANK)):
            return None
        missing = [name for name in (names.MASTER_ADDR, names.MASTER_PORT) if name not in env]
        raise ContractError(
            f"{names.RANK}={rank} and {names.WORLD_SIZE}={size} tell of a job, but no {' and '.join(missing)} "
            "says where its instances connect: use poprun or torchrun, or unset them to run the program alone"
        )
    is_one_host = master is not None and master.host in LOOPBACK_HOSTS
    local_size = read_count(env, names.LOCAL_WORLD_SIZE, default=size if is_one_host else 1)
    local_rank = read_count(env, names.LOCAL_RANK, minimum=0, default=rank % local_size)
    return Contract(
        num_instances=size,
        instance_index=rank,
        num_local_instances=local_size,
        local_instance_index=local_rank,
        host_index=read_count(env, names.GROUP_RANK, minimum=0, default=rank // local_size),
        num_replicas=size,
        master=master,
    )


def _refuse_half(env: Mapping[str, str]) -> None:
    """Raise ContractError if only ``RANK`` or ``WORLD_SIZE`` is set: each process would act as the whole job."""
    # RANK and WORLD_SIZE are everyday words, so a text that is no number belongs to another program; rank 0
    # alone and size 1 alone may be a whole job
    for name, missing, harmless in ((names.RANK, names.WORLD_SIZE, 0), (names.WORLD_SIZE, names.RANK, 1)):
        text = env.get(name, "")
        is_told_by_mpi = any(variable in env for variable in (names.OMPI_RANK, names.HYDRA_RANK))
        if missing not in env and text.isdecimal() and int(text) > harmless and not is_told_by_mpi:
            raise ContractError(
                f"{name}={text} is set and {missing} is not: start the program with poprun or torchrun, or unset "
                f"{name} to run it alone"
            )


def _read_open_mpi(env: Mapping[str, str]) -> Contract | None:
    return _read_mpi(env, names.OMPI_RANK, names.OMPI_SIZE, names.OMPI_LOCAL_RANK, names.OMPI_LOCAL_SIZE)


def _read_hydra(env: Mapping[str, str]) -> Contract | None:
    return _read_mpi(env, names.HYDRA_RANK, names.HYDRA_SIZE, names.HYDRA_LOCAL_RANK, names.HYDRA_LOCAL_SIZE)


def _read_mpi(env: Mapping[str, str], rank_name: str, size_name: str, *local_names: str) -> Contract | None:
    """Return the job in MPI's variables; None without rank and size. Raise ContractError if only one is set."""
    present = [name for name in (rank_name, size_name) if name in env]
    if not present:
        return None
    if len(present) == 1:
        missing = size_name if present[0] == rank_name else rank_name
        raise ContractError(
            f"{present[0]} is set and {missing} is not: start the program with poprun or mpiexec, or unset "
            f"{present[0]} to run it alone"
        )
    rank, size = _read_rank(env, rank_name, size_name)
    local_rank_name, local_size_name = local_names
    local_size = read_count(env, local_size_name, default=1)
    return Contract(
        num_instances=size,
        instance_index=rank,
        num_local_instances=local_size,
        local_instance_index=read_count(env, local_rank_name, minimum=0, default=rank % local_size),
        host_index=rank // local_size,
        num_replicas=size,
    )


def _read_rank(env: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = read_count(env, rank_name, minimum=0), read_count(env, size_name)
    if rank >= size:
        raise ContractError(f"{rank_name}={rank} is not below {size_name}={size}")
    return rank, size


_READERS: Final[Mapping[Launcher, Callable[[Mapping[str, str]], Contract | None]]] = {
    Launcher.KUBERNETES: _read_indexed_job,
    Launcher.TORCHRUN: _read_torchrun,
    Launcher.OPEN_MPI: _read_open_mpi,
    Launcher.HYDRA: _read_hydra,
}
