"""The store in which the instances of a job find each other: a key-value store that all instances can reach.

Under poprun, instance 0 serves the store on a socket from its agent. If a program such as ``conda run`` has closed
this socket, popdist's store has the address of torch's store. Under torchrun, and if torch's own variables are
set, the store is torch's ``env://`` store. Under ``mpiexec`` instance 0 broadcasts its address through MPI. Under
``srun`` instance 0 serves at one of a few ports of its node, and the other instances look there for the name of
their own step.
"""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch exports it all the same
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from popdist.errors import BackendError
from popdist.ground import torch_private_groups
from popdist.ground.contract import STORE, STORE_DESCRIPTOR, Contract, Endpoint
from popdist.ground.environments import Environment, Launcher
from popdist.ground.environments.slurm import store_ports
from popdist.ground.progress import progress_page

LOOPBACK: Final = "127.0.0.1"

BACKLOG: Final = 1024
"""Number of instances that may connect to the store at the same moment."""

_STEP: Final = "popdist/step"
_ANSWER: Final = timedelta(seconds=5)
_PAUSE_SECONDS: Final = 0.05
_SCONTROL_SECONDS: Final = 10.0
_CURE: Final = "set MASTER_ADDR and MASTER_PORT before srun to an address of the first node that all can reach"


def is_one_host(contract: Contract) -> bool:
    """Whether all instances of the job run on this host."""
    return contract.num_local_instances == contract.num_instances


def own_address(contract: Contract) -> str | None:
    """Return the address at which other instances reach this host; None if poprun has chosen no address."""
    if is_one_host(contract):
        return LOOPBACK
    if contract.store is None:
        return None
    family = _family(contract.store.host)  # the route to instance 0 decides, so that a job uses one network
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connect(2) sends nothing here, but chooses the route
        probe.connect((contract.store.host, contract.store.port))
        return str(probe.getsockname()[0])


def open_store(environment: Environment, timeout_seconds: float) -> Store:
    """Return the job's key-value store. Raises BackendError if the store cannot be served or reached."""
    contract, timeout = environment.contract, timedelta(seconds=timeout_seconds)
    address = contract.store
    try:
        # without its page, this process has lost all inherited descriptors, and so have the other instances
        if address is not None and contract.master is not None and not progress_page.is_watched:
            address = contract.master
            return _shared_store(contract, address, timeout)
        if address is not None:
            return _tcp_store(contract, address, _passed_descriptor(contract), timeout)
        if environment.launcher in (Launcher.OPEN_MPI, Launcher.HYDRA):
            return _join_through_mpi(environment, timeout)
        if environment.launcher is Launcher.SLURM and contract.master is None:
            node = None if is_one_host(contract) else environment.first_node
            return _open_slurm_store(contract, node, timeout_seconds)
        rank, size = contract.instance_index, contract.num_instances
        store: Store = next(rendezvous("env://", rank, size, timeout=timeout))[0]
    except (RuntimeError, ValueError, OSError) as error:
        where = address or contract.master or "an address received through MPI"
        raise BackendError(
            f"instance {contract.instance_index} of {contract.num_instances} could not reach the job's store at "
            f"{where} within {timeout_seconds:g} seconds: {error}"
        ) from error
    return store


def _shared_store(contract: Contract, master: Endpoint, timeout: timedelta) -> TCPStore:
    """Return popdist's store at the address of the program's ``env://`` store; both stores may share one server.

    torch serves all stores of one process at one port by one server. If this store is the first store, the server
    listens only at the address of the job's network.
    """
    is_master, descriptor = contract.instance_index == 0, None
    if is_master:
        with suppress(OSError):  # the program may already have its own store there
            listener = socket.create_server(
                (master.host, master.port), family=_family(master.host), backlog=BACKLOG
            )
            descriptor = listener.detach()
    return torch_private_groups.tcp_store(
        master.host,
        master.port,
        contract.num_instances,
        is_master=is_master,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=descriptor,
    )


def _tcp_store(contract: Contract, address: Endpoint, descriptor: int | None, timeout: timedelta) -> TCPStore:
    return torch_private_groups.tcp_store(
        address.host,
        address.port,
        contract.num_instances,
        is_master=descriptor is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )


def _passed_descriptor(contract: Contract) -> int | None:
    """Return the listening socket that instance 0 has inherited from its parent, poprun's agent; None on other
    instances. Raises BackendError if the socket was closed.
    """
    if contract.instance_index != 0:
        return None
    descriptor = contract.store_descriptor
    if descriptor is None or not _listens(descriptor):
        raise BackendError(
            f"instance 0 should serve {STORE}={contract.store}, but {STORE_DESCRIPTOR}={descriptor} is no "
            "listening socket here: start Python from poprun directly, or keep inherited descriptors open"
        )
    os.set_inheritable(descriptor, False)  # noqa: FBT003 - the standard library's signature
    return descriptor


def _listens(descriptor: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as passed:
            return bool(passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False


def _address_by_name() -> str:
    """Return the address of this host's name; return the name if its address is loopback, as on Debian."""
    name = socket.gethostname()
    try:  # only the pod itself knows its name, but all pods know its address
        address = socket.gethostbyname(name)
    except OSError:
        return name
    return name if address.startswith("127.") else address


def _join_through_mpi(environment: Environment, timeout: timedelta) -> Store:
    """Return the job's key-value store, whose address instance 0 broadcasts to all instances by MPI."""
    from mpi4py import MPI

    contract, world = environment.contract, MPI.COMM_WORLD
    if (world.size, world.rank) != (contract.num_instances, contract.instance_index):
        raise BackendError(
            f"{environment.launcher} started this process as rank {contract.instance_index} of "
            f"{contract.num_instances}, but mpi4py sees rank {world.rank} of {world.size}: it uses another MPI "
            f"({MPI.Get_library_version().splitlines()[0]}) than the mpiexec that was called. Use the mpiexec of "
            "that MPI, or start the program with poprun"
        )
    address, descriptor = bytearray(256), None
    if world.rank == 0:
        host = LOOPBACK if is_one_host(contract) else _address_by_name()
        listener = socket.create_server((LOOPBACK if is_one_host(contract) else "", 0), backlog=BACKLOG)
        address[:] = str(Endpoint(host=host, port=listener.getsockname()[1])).encode().ljust(256)
        descriptor = listener.detach()
    world.Bcast(address)
    return _tcp_store(contract, Endpoint.parse(address.decode().strip()), descriptor, timeout)


def _open_slurm_store(contract: Contract, node: str | None, timeout_seconds: float) -> TCPStore:
    """Return a Slurm step's key-value store; ``node`` is instance 0's node, None if all instances are here."""
    host = LOOPBACK if node is None else _address_of(node)
    if contract.instance_index == 0:
        return _serve(contract, host, timeout_seconds)
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        for store in _answers(contract, host):
            store.set_timeout(timedelta(seconds=timeout_seconds))
            return store
        time.sleep(_PAUSE_SECONDS)
    raise BackendError(
        f"instance {contract.instance_index} found no instance 0 of step {contract.job_id} at {host}, ports "
        f"{', '.join(map(str, store_ports(contract.job_id)))}, within {timeout_seconds:g} seconds: {_CURE}"
    )


def _serve(contract: Contract, host: str, timeout_seconds: float) -> TCPStore:
    if contract.host_index != 0:
        raise BackendError(f"task 0 is not on the first node of the step, where the others look for it: {_CURE}")
    for port in store_ports(contract.job_id):
        with suppress(OSError):
            listener = socket.create_server((host, port), family=_family(host), backlog=BACKLOG)
            store = _tcp_store(contract, Endpoint(host=host, port=port), listener.detach(), _ANSWER)
            store.set(_STEP, contract.job_id)
            store.set_timeout(timedelta(seconds=timeout_seconds))
            return store
    raise BackendError(f"none of the ports at which the tasks of step {contract.job_id} connect is free: {_CURE}")


def _answers(contract: Contract, host: str) -> Iterator[TCPStore]:
    for port in store_ports(contract.job_id):
        with suppress(OSError, RuntimeError):
            socket.create_connection((host, port), timeout=_ANSWER.total_seconds()).close()
            store = _tcp_store(contract, Endpoint(host=host, port=port), None, _ANSWER)
            if store.get(_STEP) == contract.job_id.encode():
                yield store


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _address_of(node: str) -> str:
    """Return an address of the Slurm node ``node``, from this host's resolver, otherwise from Slurm."""
    for name in (node, *_addresses_in_slurm(node)):
        with suppress(OSError):
            return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    raise BackendError(f"the first node of the step, {node!r}, has no address that this node knows: {_CURE}")


def _addresses_in_slurm(node: str) -> Iterator[str]:
    with suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(
            ["scontrol", "show", "node", node],
            capture_output=True,
            text=True,
            timeout=_SCONTROL_SECONDS,
            check=False,
        )
        yield from (
            word.removeprefix("NodeAddr=") for word in shown.stdout.split() if word.startswith("NodeAddr=")
        )
