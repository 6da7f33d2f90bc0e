"""Where poprun runs: the machine, and the allocation of Slurm.

Variables of Slurm: sbatch(1) and salloc(1), "OUTPUT ENVIRONMENT VARIABLES"; inside a step srun(1) tells more.
"""

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from popdist.contract import NUM_THREADS, read_node_counts
from popdist.errors import ContractError
from poprun.errors import PlanError
from poprun.plan.topology import Allocation, MachineFacts
from poprun.probe.hardware import find_gpus, read_cpus, read_memory_nodes, usable_cores
from poprun.probe.mpi_runtimes import cache_file_of, find_mpi
from poprun.text.host_names import parse_hosts

_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1", "localhost.localdomain", "ip6-localhost")

_JOB: Final = "SLURM_JOB_ID"
_NODES: Final = "SLURM_JOB_NODELIST"
_NODE_HERE: Final = "SLURMD_NODENAME"
_TASKS: Final = "SLURM_NTASKS"
_TASKS_PER_NODE: Final = "SLURM_TASKS_PER_NODE"
_CPUS_PER_NODE: Final = "SLURM_JOB_CPUS_PER_NODE"
_GPUS_PER_NODE: Final = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")
_STEP_TASKS: Final = "SLURM_STEP_NUM_TASKS"
_STEP_TASK: Final = "SLURM_PROCID"


def machine_facts(environment: Mapping[str, str], *, with_mpi: bool = True) -> MachineFacts:
    """The facts of this machine, found quickly and without the network.

    Args:
        environment: The environment that poprun was called in.
        with_mpi: Whether to look for MPI runtimes, each of which is asked once what it is.
    """
    hostname = socket.gethostname()
    path, own_folder = environment.get("PATH", os.defpath), os.path.dirname(sys.executable)
    mpi, unknown = find_mpi(path, own_folder, cache_file_of(environment)) if with_mpi else (None, ())
    return MachineFacts(
        hostname=hostname,
        host_aliases=own_names(hostname),
        cores=usable_cores(),
        cpus=read_cpus(os.sched_getaffinity(0)),
        memory_nodes=read_memory_nodes(),
        gpus=find_gpus(environment),
        mpi=mpi,
        unknown_mpi=unknown,
        user_num_threads=environment.get(NUM_THREADS),
    )


def own_names(hostname: str) -> frozenset[str]:
    """The names that mean this machine whatever the resolver says."""
    return frozenset((*_LOOPBACK, hostname, hostname.partition(".")[0]))


def names_of_this_machine(hosts: Sequence[str]) -> frozenset[str]:
    """The names that mean this machine, among them that of ``hosts`` if it is the only one and resolves to here.

    Asks the resolver, so it is called only just before a job starts. Two different hosts are never both here.
    """
    names = own_names(socket.gethostname())
    if len(hosts) == 1 and hosts[0] not in names and _is_here(hosts[0]):
        return names | {hosts[0]}
    return names


def _is_here(host: str) -> bool:
    """Whether ``host`` resolves to an address of this machine: only those can be bound."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in addresses)


def _can_bind(family: int, address: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def find_allocation(environment: Mapping[str, str]) -> Allocation | None:
    """The allocation that ``environment`` describes; None outside Slurm.

    Raises:
        PlanError: If a variable of Slurm's is not of the form that Slurm writes.
    """
    if not environment.get(_JOB) or not environment.get(_NODES):
        return None
    gpu_counts = (_last_number(environment.get(name, "")) for name in _GPUS_PER_NODE)
    try:
        tasks_per_node = read_node_counts(environment, _TASKS_PER_NODE) if _TASKS in environment else ()
        cpus_per_node = read_node_counts(environment, _CPUS_PER_NODE)
    except ContractError as error:
        raise PlanError(str(error)) from None
    return Allocation(
        job_id=environment[_JOB],
        nodes=parse_hosts(environment[_NODES]),
        node_here=environment.get(_NODE_HERE),
        tasks_per_node=tasks_per_node,
        cpus_per_node=cpus_per_node,
        num_gpus_per_node=next(filter(None, gpu_counts), 0),
        task=_task(environment),
    )


def _last_number(text: str) -> int:
    """The count in ``4``, ``a100:4`` or ``gpu:a100:4``; 0 without one."""
    match = re.search(r"([0-9]{1,6})$", text)
    return int(match[1]) if match else 0


def _task(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Index and count of the tasks of the step that poprun is a task of; None unless there are several."""
    rank, size = environment.get(_STEP_TASK, ""), environment.get(_STEP_TASKS, "")
    return (int(rank), int(size)) if rank.isdecimal() and size.isdecimal() and int(size) > 1 else None
