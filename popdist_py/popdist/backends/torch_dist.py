"""Instances connected by torch.distributed: gloo for headers and CPU tensors, NCCL for CUDA tensors.

Where the instances share a host, headers and CPU tensors go through its memory in place of gloo; only the CPU
tensors of a part of the job do not.

Headers go from each instance to each other one directly: a lost or late instance is known by its number, and a
subset of the instances needs no connections of its own.
"""

import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch import distributed as dist

from popdist.backends.mesh import Mesh, as_backend_error
from popdist.backends.serial import SerialBackend
from popdist.errors import BackendError
from popdist.headers import name_instances
from popdist.host_memory.collectives import HostCollectives
from popdist.host_memory.group import HostGroup
from popdist.host_memory.mailboxes import Mailboxes

if TYPE_CHECKING:
    from threading import Thread


class TorchExchange:
    """Headers on their way between the instances of a group.

    Args:
        mesh: The connections of the job.
        instances: Members of the group, this instance among them.
        header: What this instance sends.
    """

    def __init__(self, mesh: Mesh, instances: tuple[int, ...], header: list[int]) -> None:
        self._mesh = mesh
        self._instances = instances
        self._header = header
        self._received = {peer: torch.empty(len(header), dtype=torch.int64) for peer in _peers(mesh, instances)}
        self._sent = torch.tensor(header, dtype=torch.int64)
        self._works: dict[int, list[dist.Work]] = {}
        self._failures: dict[int, RuntimeError] = {}
        self._thread: Thread | None = None
        for peer, row in self._received.items():
            try:
                self._works[peer] = [mesh.control.recv([row], peer, 0), mesh.control.send([self._sent], peer, 0)]
            except RuntimeError as error:
                self._failures[peer] = error

    def wait(self, timeout_seconds: float | None = None) -> list[list[int]]:
        """Every member's header, in order; see `popdist.backends.base`."""
        if timeout_seconds is None and self._thread is None:
            self._receive()
        else:
            self._thread = self._thread or self._mesh.in_background(self._receive)
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                raise BackendError(
                    f"{name_instances(tuple(self._works))} did not come within {timeout_seconds:g} seconds"
                )
        if self._failures:
            raise BackendError(self._blame()) from next(iter(self._failures.values()))
        return [self._received[i].tolist() if i in self._received else self._header for i in self._instances]

    def _receive(self) -> None:
        """Wait for every member's header, or until the first one is lost or late: that ends it for all."""
        deadline = time.monotonic() + self._mesh.timeout_seconds
        while self._works and not self._failures:
            peer = next(iter(self._works))
            try:
                for work in self._works[peer]:
                    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except RuntimeError as error:
                self._failures[peer] = error
            del self._works[peer]

    def _blame(self) -> str:
        """Who did not answer and why; a timeout of gloo closes every connection, so it tells of one only."""
        peer, error = next(iter(self._failures.items()))
        if "timed out" in str(error).lower():
            return f"{name_instances([peer])} did not come within {self._mesh.timeout_seconds:g} seconds"
        lost = {*self._failures, *(other for other in self._works if self._mesh.is_lost(other))}
        return f"the connection to {name_instances(lost)} was closed: it ended or was lost"


class HostExchange:
    """Headers on their way between instances that share memory.

    Args:
        mesh: The connections of the job.
        mailboxes: Theirs in memory.
        instances: Members of the group, this instance among them.
        header: What this instance sends.
    """

    def __init__(self, mesh: Mesh, mailboxes: Mailboxes, instances: tuple[int, ...], header: list[int]) -> None:
        self._mesh = mesh
        self._mailboxes = mailboxes
        self._instances = instances
        self._received = {mesh.instance_index: header}
        peers = _peers(mesh, instances)
        self._numbers = dict(zip(peers, mailboxes.send(peers, header), strict=True))

    def wait(self, timeout_seconds: float | None = None) -> list[list[int]]:
        """Every member's header, in order; see `popdist.backends.base`."""
        limit = self._mesh.timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + limit
        late = [instance for instance in self._instances if instance not in self._received]
        for instance in tuple(late):
            seconds_left = max(deadline - time.monotonic(), 0.0)
            message = self._mailboxes.receive(instance, self._numbers[instance], seconds_left)
            if message is not None:
                self._received[instance] = message
                late.remove(instance)
        if late:
            raise BackendError(f"{name_instances(late)} did not come within {limit:g} seconds")
        return [self._received[instance] for instance in self._instances]


class TorchBackend:
    """Some or all instances of a job, over the connections of its mesh.

    Args:
        mesh: The connections of the job.
        instances: Members, ascending, this instance among them. At least 2.
        device_types: Types of the devices whose tensors are accepted.
    """

    def __init__(self, mesh: Mesh, instances: tuple[int, ...], device_types: frozenset[str]) -> None:
        self.instances = instances
        self.instance_index = mesh.instance_index
        self.device_types = device_types
        self._mesh = mesh

    @property
    def _is_whole_job(self) -> bool:
        return len(self.instances) == self._mesh.num_instances

    @property
    def host(self) -> HostCollectives | None:
        """The memory of the host, for the whole job: a part of it goes other ways."""
        return self._mesh.host if self._is_whole_job and "cpu" in self.device_types else None

    @property
    def host_group(self) -> HostGroup | None:
        """As :attr:`host`."""
        return None if self.host is None else self.host.group

    @property
    def neighbours(self) -> HostCollectives | None:
        """The memory of this host, for a whole job of several hosts."""
        return self._mesh.neighbours if self._is_whole_job and "cpu" in self.device_types else None

    def start_exchange(self, header: list[int]) -> TorchExchange | HostExchange:
        """Send ``header`` to every other member."""
        if self._mesh.mailboxes is not None:
            return HostExchange(self._mesh, self._mesh.mailboxes, self.instances, header)
        return TorchExchange(self._mesh, self.instances, header)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every member's ``tensor``, stacked."""
        if tensor.is_cuda and not self._is_whole_job:
            return self.all_gather(tensor.cpu()).to(tensor.device)
        gathered = tensor.new_empty((len(self.instances), *tensor.shape))
        if not tensor.numel():
            return gathered
        mine, rows = _as_bytes(tensor), [_as_bytes(row) for row in gathered]
        with as_backend_error("the data of the other instances did not come"):
            if self.host is not None and not tensor.is_cuda:
                self.host.all_gather(rows, mine)
            elif tensor.is_cuda:
                self._mesh.nccl.allgather(rows, mine).wait()
            elif self._is_whole_job:
                self._mesh.gloo.allgather(rows, mine).wait()
            else:
                pairs = zip(self.instances, rows, strict=True)
                for work in [work for peer, row in pairs for work in self._swap(peer, mine, row)]:
                    work.wait()
        return gathered

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Row *j* of ``tensor`` goes to the *j*-th member; row *i* of the result came from the *i*-th."""
        if tensor.is_cuda and not self._is_whole_job:
            return self.all_to_all(tensor.cpu()).to(tensor.device)
        received = torch.empty_like(tensor)
        sent, rows = [_as_bytes(row) for row in tensor], [_as_bytes(row) for row in received]
        with as_backend_error("the data of the other instances did not come"):
            if self.host is not None and not tensor.is_cuda:
                self.host.all_to_all(rows, sent)
            elif self._is_whole_job:
                group = self._mesh.nccl if tensor.is_cuda else self._mesh.gloo
                group.alltoall_base(_as_bytes(received), _as_bytes(tensor), [], []).wait()
            else:
                pairs = zip(self.instances, sent, rows, strict=True)
                for work in [work for peer, mine, row in pairs for work in self._swap(peer, mine, row)]:
                    work.wait()
        return received

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite ``tensor`` with the root's."""
        if tensor.is_cuda and not self._is_whole_job:
            staged = tensor.cpu()
            self.broadcast(staged, root)
            tensor.copy_(staged)
        elif tensor.numel() and self.host is not None and not tensor.is_cuda:
            with as_backend_error(f"the data of instance {root} did not come"):
                self.host.broadcast(_as_bytes(tensor), self.instances.index(root))
        elif tensor.numel():
            with as_backend_error(f"the data of instance {root} did not come"):
                for work in self._start_broadcast(_as_bytes(tensor), root):
                    work.wait()

    def _swap(self, peer: int, mine: Tensor, row: Tensor) -> list[dist.Work]:
        """Start to send ``mine`` to ``peer`` and to receive ``row`` from it."""
        if peer == self.instance_index:
            row.copy_(mine)
            return []
        return [self._mesh.gloo.recv([row], peer, 0), self._mesh.gloo.send([mine], peer, 0)]

    def _start_broadcast(self, data: Tensor, root: int) -> list[dist.Work]:
        if self._is_whole_job:
            return [(self._mesh.nccl if data.is_cuda else self._mesh.gloo).broadcast(data, root)]
        if self.instance_index == root:
            return [self._mesh.gloo.send([data], peer, 0) for peer in _peers(self._mesh, self.instances)]
        return [self._mesh.gloo.recv([data], root, 0)]

    def subgroup(self, instances: tuple[int, ...]) -> "TorchBackend | SerialBackend":
        """The same connections, limited to ``instances``."""
        if len(instances) == 1:
            return SerialBackend(self.instance_index, device_types=self.device_types)
        return TorchBackend(self._mesh, instances, self.device_types)

    def settle(self) -> None:
        """End the threads of this process; the headers' connections stay open, so nobody sees it leave yet."""
        self._mesh.settle()

    def close(self) -> None:
        """Drop the connections of the job."""
        self._mesh.close()


def _peers(mesh: Mesh, instances: tuple[int, ...]) -> list[int]:
    return [instance for instance in instances if instance != mesh.instance_index]


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as a flat tensor of bytes: every dtype travels the same way."""
    return tensor.reshape(-1).view(torch.uint8)
