"""The machine that poprun runs on, as the planner needs it: its names, its MPI, and all that is found."""

import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from popdist.contract import NUM_THREADS
from poprun.plan.topology import MachineFacts, MpiKind, MpiRuntime
from poprun.probe.cpus import read_cpus, read_memory_nodes, usable_cores
from poprun.probe.gpus import find_gpus
from poprun.process.start import answer_of

TIMEOUT_SECONDS: Final = 10.0

LAUNCHERS: Final = ("mpiexec", "mpirun")

_FORKER: Final = "mpiexec.gforker"

_VERSIONS: Final = (
    (MpiKind.MPICH, re.compile(r"HYDRA build details:\s+Version:\s*(\S+)")),
    (MpiKind.OPEN_MPI, re.compile(r"\((?:Open MPI|OpenRTE)\)\s+(\S+)")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiSearch:
    """What a search found: the first runtime of a known family, and the launchers before it that are of none."""

    runtime: MpiRuntime | None = None
    unknown: tuple[str, ...] = ()


def find_mpi(path: str, own_folder: str) -> MpiSearch:
    """Look for an MPI runtime on ``path``, then in ``own_folder``, where Python packages install theirs.

    Args:
        path: Folders with colons between them, as in ``PATH``.
        own_folder: The folder of the interpreter's own commands.
    """
    unknown: list[str] = []
    for launcher in _candidates([*path.split(os.pathsep), own_folder]):
        runtime = _identify(launcher)
        if runtime is not None:
            return MpiSearch(runtime=replace(runtime, forker=find_forker(runtime)), unknown=tuple(unknown))
        unknown.append(launcher)
    return MpiSearch(unknown=tuple(unknown))


def read_version(launcher: str, output: str) -> MpiRuntime | None:
    """The runtime that prints ``output`` about itself, or None when it is of no known family."""
    for kind, pattern in _VERSIONS:
        match = pattern.search(output)
        if match:
            return MpiRuntime(kind=kind, path=launcher, version=match[1])
    return None


def find_forker(runtime: MpiRuntime) -> str | None:
    """MPICH's launcher for one machine beside ``runtime``, or None."""
    forker = os.path.join(os.path.dirname(os.path.realpath(runtime.path)), _FORKER)
    is_there = runtime.kind is MpiKind.MPICH and os.path.isfile(forker) and os.access(forker, os.X_OK)
    return forker if is_there else None


def _candidates(folders: list[str]) -> Iterator[str]:
    """Every launcher in ``folders``, each file once under whichever of its names comes first."""
    seen = set()
    for folder in filter(None, folders):
        for name in LAUNCHERS:
            launcher = os.path.abspath(os.path.join(folder, name))
            file = os.path.realpath(launcher)
            if os.path.isfile(file) and os.access(file, os.X_OK) and file not in seen:
                seen.add(file)
                yield launcher


def _identify(launcher: str) -> MpiRuntime | None:
    output = answer_of((launcher, "--version"), TIMEOUT_SECONDS)
    return None if output is None else read_version(launcher, output)


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
