"""The machine that poprun runs on, as the planner needs it."""

import os
import socket
import sys
from collections.abc import Mapping, Sequence

from popdist.contract import NUM_THREADS
from poprun.plan.topology import MachineFacts
from poprun.probe.cpus import read_cpus, read_memory_nodes, usable_cores
from poprun.probe.gpus import find_gpus
from poprun.probe.mpi import find_mpi

_LOOPBACK = ("localhost", "127.0.0.1", "::1", "localhost.localdomain", "ip6-localhost")


def machine_facts(environment: Mapping[str, str], *, with_mpi: bool = True) -> MachineFacts:
    """Look at this machine; quick, and without the network.

    Args:
        environment: The environment that poprun was called in.
        with_mpi: Whether to look for MPI runtimes, which means starting each one found to ask what it is.
    """
    hostname = socket.gethostname()
    mpi = find_mpi(environment.get("PATH", os.defpath), os.path.dirname(sys.executable)) if with_mpi else None
    return MachineFacts(
        hostname=hostname,
        host_aliases=own_names(hostname),
        cores=usable_cores(),
        cpus=read_cpus(os.sched_getaffinity(0)),
        memory_nodes=read_memory_nodes(),
        gpus=find_gpus(environment),
        mpi=mpi.runtime if mpi else None,
        unknown_mpi=mpi.unknown if mpi else (),
        user_num_threads=environment.get(NUM_THREADS),
    )


def own_names(hostname: str) -> frozenset[str]:
    """The names that mean this machine without asking anyone."""
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
