"""Where the tasks of a Slurm step meet: Slurm gives them no common port, so they try the same few in turn.

Instance 0 serves the store at the first that is free, on the address of its node, and says there which step it is
of; the others ask at each until one answers with their own step's name.
"""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Final

from torch._C._distributed_c10d import TCPStore

from popdist.contract import Contract
from popdist.environments.slurm import meeting_ports
from popdist.errors import BackendError

_LOOPBACK: Final = "127.0.0.1"
_BACKLOG: Final = 1024
_STEP: Final = "popdist/step"
_ANSWER: Final = timedelta(seconds=5)
_PAUSE_SECONDS: Final = 0.05
_SCONTROL_SECONDS: Final = 10.0
_CURE: Final = "set MASTER_ADDR and MASTER_PORT before srun to an address of the first node that all can reach"


def meet(contract: Contract, node: str | None, timeout_seconds: float) -> TCPStore:
    """The store of a step of at least two tasks.

    Args:
        contract: The job.
        node: Name of the node of instance 0; None when all tasks are on this one.
        timeout_seconds: How long instance 0 is looked for.

    Raises:
        BackendError: If the first node has no address, none of its ports is free, or it does not answer in time.
    """
    host = _LOOPBACK if node is None else address_of(node)
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
        f"{', '.join(map(str, meeting_ports(contract.job_id)))}, within {timeout_seconds:g} seconds: {_CURE}"
    )


def _serve(contract: Contract, host: str, timeout_seconds: float) -> TCPStore:
    if contract.host_index != 0:
        raise BackendError(f"task 0 is not on the first node of the step, where the others look for it: {_CURE}")
    for port in meeting_ports(contract.job_id):
        with suppress(OSError):
            listener = socket.create_server((host, port), family=_family(host), backlog=_BACKLOG)
            store = _store(contract, host, port, listener.detach())
            store.set(_STEP, contract.job_id)
            store.set_timeout(timedelta(seconds=timeout_seconds))
            return store
    raise BackendError(f"none of the ports at which the tasks of step {contract.job_id} meet is free: {_CURE}")


def _answers(contract: Contract, host: str) -> Iterator[TCPStore]:
    for port in meeting_ports(contract.job_id):
        with suppress(OSError, RuntimeError):
            socket.create_connection((host, port), timeout=_ANSWER.total_seconds()).close()
            store = _store(contract, host, port)
            if store.get(_STEP) == contract.job_id.encode():
                yield store


def _store(contract: Contract, host: str, port: int, descriptor: int | None = None) -> TCPStore:
    return TCPStore(
        host,
        port,
        contract.num_instances,
        is_master=descriptor is not None,
        timeout=_ANSWER,
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def address_of(node: str) -> str:
    """An address of ``node``: as names are resolved here, else as Slurm itself knows it.

    Raises:
        BackendError: If neither has one.
    """
    for name in (node, *_told_by_slurm(node)):
        with suppress(OSError):
            return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    raise BackendError(f"the first node of the step, {node!r}, has no address that this node knows: {_CURE}")


def _told_by_slurm(node: str) -> Iterator[str]:
    with suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(
            ["scontrol", "show", "node", node],
            capture_output=True,
            text=True,
            timeout=_SCONTROL_SECONDS,
            check=False,
        )
        yield from (word.removeprefix("NodeAddr=") for word in told.stdout.split() if word.startswith("NodeAddr="))
