"""Instances connected by torch.distributed: gloo for headers and CPU tensors, NCCL for CUDA tensors.

Where the instances share a host, headers and CPU tensors go through its memory in place of gloo.
"""

from collections.abc import Collection

import torch
from torch import Tensor
from torch import distributed as dist

from popdist.comm.backend import SerialBackend
from popdist.comm.channel import Channel, as_backend_error, swap
from popdist.comm.connections import Connections
from popdist.comm.header_exchanges import GlooHeaderExchange, MemoryHeaderExchange, MemoryOfSubsets
from popdist.host_memory.host_collectives import HostCollectives, as_bytes
from popdist.host_memory.host_group import HostGroup


class TorchBackend:
    """A backend of some or all instances of a job, over the connections of the job.

    Args:
        connections: The connections of the job.
        instances: Members, ascending, this instance among them. At least 2.
        device_types: Types of the devices whose tensors are accepted.
        parts: The memory that subsets share; None for the backend of the whole job.
    """

    def __init__(
        self,
        connections: Connections,
        instances: tuple[int, ...],
        device_types: frozenset[str],
        parts: MemoryOfSubsets | None = None,
    ) -> None:
        self.instances = instances
        self.instance_index = connections.instance_index
        self.device_types = device_types
        self._connections = connections
        self._parts = MemoryOfSubsets(connections) if parts is None else parts

    @property
    def _is_whole_job(self) -> bool:
        return len(self.instances) == self._connections.num_instances

    @property
    def host_group(self) -> HostGroup | None:
        """The group that shares this host's memory, for the whole job."""
        is_used = self._is_whole_job and "cpu" in self.device_types
        return self._connections.host.group if is_used and self._connections.host is not None else None

    @property
    def neighbours(self) -> HostCollectives | None:
        """Collectives in the memory of this host, for a whole job of several hosts."""
        return self._connections.neighbours if self._is_whole_job and "cpu" in self.device_types else None

    def share_memory(self) -> HostCollectives | None:
        """Collectives in the memory of the host; a part of the job begins to share it when it first asks."""
        if "cpu" not in self.device_types:
            return None
        return self._connections.host if self._is_whole_job else self._parts.of(self.instances)

    def channel(self, devices: Collection[torch.device]) -> Channel | None:
        """The channel for tensors on ``devices``, for the whole job."""
        is_possible = self._is_whole_job and self.device_types.issuperset(device.type for device in devices)
        return self._connections.channel(devices) if is_possible else None

    def start_exchange(self, header: list[int]) -> GlooHeaderExchange | MemoryHeaderExchange:
        """Send ``header`` to every other member."""
        if self._connections.short_messages is not None:
            return MemoryHeaderExchange(
                self._connections, self._connections.short_messages, self.instances, header
            )
        return GlooHeaderExchange(self._connections, self.instances, header)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every member's ``tensor``, stacked."""
        if tensor.is_cuda and not self._is_whole_job:
            return self.all_gather(tensor.cpu()).to(tensor.device)
        gathered = tensor.new_empty((len(self.instances), *tensor.shape))
        if not tensor.numel():
            return gathered
        mine, rows = as_bytes(tensor), [as_bytes(row) for row in gathered]
        with as_backend_error("the data of the other instances did not come"):
            host = None if tensor.is_cuda else self.share_memory()
            if host is not None:
                host.all_gather(rows, mine)
            elif tensor.is_cuda:
                self._connections.nccl.allgather(rows, mine).wait()
            else:
                swap(self._connections.gloo, self.instance_index, self.instances, [mine] * len(rows), rows)
        return gathered

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Row *j* of ``tensor`` goes to the *j*-th member; row *i* of the result came from the *i*-th."""
        if tensor.is_cuda and not self._is_whole_job:
            return self.all_to_all(tensor.cpu()).to(tensor.device)
        received = torch.empty_like(tensor)
        sent, rows = [as_bytes(row) for row in tensor], [as_bytes(row) for row in received]
        with as_backend_error("the data of the other instances did not come"):
            host = None if tensor.is_cuda else self.share_memory()
            if host is not None:
                host.all_to_all(rows, sent)
            elif tensor.is_cuda:
                self._connections.nccl.alltoall_base(as_bytes(received), as_bytes(tensor), [], []).wait()
            else:
                swap(self._connections.gloo, self.instance_index, self.instances, sent, rows)
        return received

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite ``tensor`` with the root's."""
        if tensor.is_cuda and not self._is_whole_job:
            staged = tensor.cpu()
            self.broadcast(staged, root)
            tensor.copy_(staged)
        elif tensor.numel():
            with as_backend_error(f"the data of instance {root} did not come"):
                host = None if tensor.is_cuda else self.share_memory()
                if host is not None:
                    host.broadcast(as_bytes(tensor), self.instances.index(root))
                else:
                    for work in self._start_broadcast(as_bytes(tensor), root):
                        work.wait()

    def _start_broadcast(self, data: Tensor, root: int) -> list[dist.Work]:
        if self._is_whole_job:
            return [(self._connections.nccl if data.is_cuda else self._connections.gloo).broadcast(data, root)]
        if self.instance_index == root:
            peers = self._connections.peers_among(self.instances)
            return [self._connections.gloo.send([data], peer, 0) for peer in peers]
        return [self._connections.gloo.recv([data], root, 0)]

    def subgroup(self, instances: tuple[int, ...]) -> "TorchBackend | SerialBackend":
        """The same connections, limited to ``instances``."""
        if len(instances) == 1:
            return SerialBackend(self.instance_index, device_types=self.device_types)
        return TorchBackend(self._connections, instances, self.device_types, self._parts)

    def settle(self) -> None:
        """End the threads of this process; the headers' connections stay open, so it is not seen to leave yet."""
        self._connections.settle()

    def close(self) -> None:
        """Drop the connections of the job."""
        self._parts.close()
        self._connections.close()
