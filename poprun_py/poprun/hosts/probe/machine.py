"""The facts of this machine, such as its cores, and of the allocation of Slurm in which poprun runs.

Cores: the kernel's Documentation/admin-guide/cputopology.rst; the affinity of a process and ``Mems_allowed_list``
are always inside the cpuset of its control group. Slurm: sbatch(1), "OUTPUT ENVIRONMENT VARIABLES"; for variables
inside a step see srun(1).
"""

import os
import re
import socket
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from popdist.errors import ContractError
from popdist.ground.contract import (
    HYDRA_SIZE,
    NUM_REPLICAS,
    NUM_THREADS,
    OMPI_SIZE,
    RUN_ID,
    WORLD_SIZE,
    read_node_counts,
)
from poprun.errors import PlanError
from poprun.hosts.probe.gpus import find_devices
from poprun.hosts.probe.mpi_runtimes import find_mpi
from poprun.launch.pressure import read_kernel_file
from poprun.launch.process.limits import cpu_quota
from poprun.plan.topology import Allocation, Cpu, MachineFacts
from poprun.text.ranges import parse_hosts, parse_numbers

_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1", "localhost.localdomain", "ip6-localhost")

_JOB: Final = "SLURM_JOB_ID"
_NODES: Final = "SLURM_JOB_NODELIST"
_NODE_HERE: Final = "SLURMD_NODENAME"
_TASKS: Final = "SLURM_NTASKS"
_TASKS_PER_NODE: Final = "SLURM_TASKS_PER_NODE"
_MOST_PER_NODE: Final = "SLURM_NTASKS_PER_NODE"
_CPUS_PER_NODE: Final = "SLURM_JOB_CPUS_PER_NODE"
_GPUS_PER_NODE: Final = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")
_STEP_TASKS: Final = "SLURM_STEP_NUM_TASKS"
_STEP_TASK: Final = "SLURM_PROCID"


def machine_facts(environment: Mapping[str, str], *, with_mpi: bool = True) -> MachineFacts:
    """Return the facts about this machine, such as cores and GPUs; search for MPI only if ``with_mpi`` is true."""
    hostname = socket.gethostname()
    path, own_folder = environment.get("PATH", os.defpath), os.path.dirname(sys.executable)
    mpi, unknown = find_mpi(path, own_folder) if with_mpi else (None, ())
    devices = find_devices(environment)
    return MachineFacts(
        hostname=hostname,
        host_aliases=own_names(hostname),
        cores=usable_cores(),
        cpus=read_cpus(os.sched_getaffinity(0)),
        memory_nodes=read_memory_nodes(),
        gpus=devices.gpus,
        maker=devices.maker,
        gpu_source=devices.source,
        gpu_problems=devices.problems,
        mpi=mpi,
        unknown_mpi=unknown,
        user_num_threads=environment.get(NUM_THREADS),
    )


def own_names(hostname: str) -> frozenset[str]:
    """Return the host names that always mean this machine, whatever DNS says: ``localhost`` and its own name."""
    return frozenset((*_LOOPBACK, hostname, hostname.partition(".")[0]))


def names_of_this_machine(hosts: Sequence[str]) -> frozenset[str]:
    """Return this machine's names; if the only name in ``hosts`` resolves to this machine, add that name."""
    names = own_names(socket.gethostname())
    if len(hosts) == 1 and hosts[0] not in names and _is_here(hosts[0]):
        return names | {hosts[0]}
    return names


def _is_here(host: str) -> bool:
    """Whether ``host`` resolves to an address of this machine, tested by binding a socket to the address."""
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
    """Return the Slurm allocation that ``environment`` describes; None outside of Slurm."""
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
        most_tasks_per_node=_last_number(environment.get(_MOST_PER_NODE, "")),
        cpus_per_node=cpus_per_node,
        num_gpus_per_node=next(filter(None, gpu_counts), 0),
        task=_task(environment),
    )


def starter_of_many(environment: Mapping[str, str]) -> str:
    """Return the launcher, such as torchrun, that has started several copies of poprun; empty if none has."""
    if NUM_REPLICAS in environment:
        return ""
    names = {"mpiexec": (HYDRA_SIZE, OMPI_SIZE), "torchrun": (WORLD_SIZE,) if RUN_ID in environment else ()}
    return next((it for it in names if any(_last_number(environment.get(one, "")) > 1 for one in names[it])), "")


def _last_number(text: str) -> int:
    """Return the count at the end of a Slurm value, such as ``4`` or ``gpu:a100:4``; 0 if there is no count."""
    match = re.search(r"([0-9]{1,6})$", text)
    return int(match[1]) if match else 0


def _task(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the index of poprun among the tasks of a Slurm step, and their number; None if poprun is alone."""
    rank, size = environment.get(_STEP_TASK, ""), environment.get(_STEP_TASKS, "")
    return (int(rank), int(size)) if rank.isdecimal() and size.isdecimal() and int(size) > 1 else None


SYSTEM: Final = "/sys/devices/system"
STATUS: Final = "/proc/self/status"

_ALLOWED: Final = "Mems_allowed_list:"
_SIBLINGS: Final = ("core_cpus_list", "thread_siblings_list")
_INSTRUCTIONS: Final = "Instruction"


def usable_cores() -> tuple[int, ...]:
    """Return the ascending numbers of the cores this process may use, at most as many as the CPU quota allows."""
    cores = sorted(os.sched_getaffinity(0))
    quota = cpu_quota()  # more threads than the quota allows would only wait for each other
    return tuple(cores if quota is None else cores[: max(1, int(quota))])


def read_cpus(allowed: Collection[int], system: str = SYSTEM) -> tuple[Cpu, ...]:
    """Return the online cores in ``allowed`` with cache and NUMA node; cores of unknown caches share one cache."""
    online = _numbers(os.path.join(system, "cpu", "online")) or allowed
    node_of = _node_of_cores(os.path.join(system, "node"))
    return tuple(
        _cpu(os.path.join(system, "cpu", f"cpu{number}"), number, node_of)
        for number in sorted(set(allowed).intersection(online))
    )


def read_memory_nodes(system: str = SYSTEM, status: str = STATUS) -> tuple[int, ...]:
    """Return the ascending NUMA nodes whose memory this process may use; all nodes with memory if unknown."""
    having = _numbers(os.path.join(system, "node", "has_memory"))
    with suppress(ValueError):
        lines = read_kernel_file(status).splitlines()
        allowed = next((line.removeprefix(_ALLOWED).strip() for line in lines if line.startswith(_ALLOWED)), "")
        return tuple(node for node in parse_numbers(allowed) if node in having) if lines else having
    return having


def _cpu(folder: str, number: int, node_of: Mapping[int, int]) -> Cpu:
    topology = os.path.join(folder, "topology")
    siblings = next(filter(None, (_numbers(os.path.join(topology, name)) for name in _SIBLINGS)), (number,))
    return Cpu(
        number=number,
        core=siblings[0],
        cache=max(_caches(os.path.join(folder, "cache")), default=(0, -1))[1],
        node=node_of.get(number, 0),
        socket=_number(os.path.join(topology, "physical_package_id")),
    )


def _caches(folder: str) -> Iterator[tuple[int, int]]:
    """Yield for each data cache of a core its level, and the number of the first core that shares the cache."""
    with suppress(OSError):
        for name in os.listdir(folder):
            cache = os.path.join(folder, name)
            sharers = _numbers(os.path.join(cache, "shared_cpu_list"))
            if sharers and read_kernel_file(os.path.join(cache, "type")).strip() != _INSTRUCTIONS:
                yield _number(os.path.join(cache, "level")), sharers[0]


def _node_of_cores(folder: str) -> dict[int, int]:
    return {
        core: node
        for node in _numbers(os.path.join(folder, "online"))
        for core in _numbers(os.path.join(folder, f"node{node}", "cpulist"))
    }


def _numbers(path: str) -> tuple[int, ...]:
    """Return the numbers in the file ``path``; () if the file is missing or contains something else."""
    with suppress(ValueError):
        return parse_numbers(read_kernel_file(path).strip())
    return ()


def _number(path: str) -> int:
    """Return the number in the file ``path``; 0 if the file is missing or contains something else, such as -1."""
    return next(iter(_numbers(path)), 0)
