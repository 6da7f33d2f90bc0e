"""The protocol of a backend, which connects the instances of a job, and the backend of a single instance.

A backend moves bytes and knows nothing of operations: adding, comparing and checking are done once, above the
backend, so that every backend has the same bits and the same errors. Instances that share memory add in that
memory, in the same order of `popdist.tree`.
"""

from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch
    from torch import Tensor

    from popdist.host_memory.host_collectives import HostCollectives
    from popdist.host_memory.host_group import HostGroup
    from popdist.transport.channel import Channel


class HeaderExchange(Protocol):
    """An exchange of headers that has been started."""

    def wait(self, timeout_seconds: float | None = None) -> list[bytes]:
        """Every instance's header, in the order of the backend's instances.

        Args:
            timeout_seconds: How long to wait at most; None waits as long as the backend was made to. After a
                timeout the exchange goes on and can be waited for again.

        Raises:
            BackendError: If an instance was lost, or its header did not come in time; the message names it.
        """

    def peek(self) -> list[bytes] | None:
        """Every instance's header, if all have come; None if not. Neither waits nor raises."""


class Backend(Protocol):
    """A set of instances that can reach each other. All tensors are dense and contiguous.

    What waits for other instances raises BackendError if one was lost or did not come in time.
    """

    @property
    def instances(self) -> tuple[int, ...]:
        """Job-wide numbers of the instances in this set, ascending."""

    @property
    def instance_index(self) -> int:
        """Job-wide number of this instance, one of :attr:`instances`."""

    @property
    def device_types(self) -> frozenset[str]:
        """Types of the devices whose tensors can be sent: ``cpu``, ``cuda``."""

    @property
    def host_group(self) -> "HostGroup | None":
        """The memory that the instances of the whole job share; None where they do not, and for a part of it."""

    @property
    def local_collectives(self) -> "HostCollectives | None":
        """In a job of several hosts, collectives in the memory of this host, among its instances.

        Every host has as many instances, in a row in the order of the job; else None on all instances.
        """

    def share_memory(self) -> "HostCollectives | None":
        """Collectives of CPU tensors in the memory that these instances share; None where they do not.

        All of them ask at the same time, where their headers have proved that all are there.
        """

    def channel(self, devices: "Collection[torch.device]") -> "Channel | None":
        """A channel for tensors on ``devices`` while the program sends others; None where there is none.

        All instances of the job are together in this call, with devices of the same types.
        """

    def start_exchange(self, header: bytes) -> HeaderExchange:
        """Send a header to every instance, which must each send one as long; does not wait for them."""

    def all_gather(self, tensor: "Tensor") -> "Tensor":
        """Every instance's ``tensor``, of the same shape, dtype and type of device, stacked."""

    def all_to_all(self, tensor: "Tensor") -> "Tensor":
        """Row *j* goes to the *j*-th instance of the set; row *i* of the result came from the *i*-th."""

    def broadcast(self, tensor: "Tensor", root: int) -> None:
        """Overwrite ``tensor`` with that of instance ``root``."""

    def subgroup(self, instances: tuple[int, ...]) -> "Backend":
        """The same connections, limited to ``instances``, of which this instance must be one."""

    def stop_threads(self) -> None:
        """Get ready for the end of the process without letting the others notice; nothing can be sent any more."""

    def close(self) -> None:
        """Drop the connections; the others see that this instance has left."""


class SerialHeaderExchange:
    """An exchange that is complete as soon as it is started."""

    def __init__(self, header: bytes) -> None:
        self._header = header

    def wait(self, timeout_seconds: float | None = None) -> list[bytes]:
        """The one header; there is nothing to wait for, so ``timeout_seconds`` plays no part."""
        del timeout_seconds
        return [self._header]

    def peek(self) -> list[bytes]:
        """The one header."""
        return [self._header]


class SerialBackend:
    """A backend of one instance alone: a job of one, or the only member of a subgroup.

    Args:
        instance_index: Job-wide number of this instance.
        device_types: Types of the devices whose tensors are accepted.
    """

    host_group = local_collectives = None
    """There is nobody to share memory with."""

    def __init__(self, instance_index: int = 0, *, device_types: frozenset[str]) -> None:
        self.instance_index = instance_index
        self.instances = (instance_index,)
        self.device_types = device_types

    def share_memory(self) -> None:
        """None: there is nobody to share memory with."""

    def channel(self, devices: "Collection[torch.device]") -> None:
        """None: there is nobody to send anything to."""
        del devices

    def start_exchange(self, header: bytes) -> SerialHeaderExchange:
        """An exchange that is complete at once."""
        return SerialHeaderExchange(header)

    def all_gather(self, tensor: "Tensor") -> "Tensor":
        """A copy of ``tensor`` with a first dimension of 1."""
        return tensor.clone().unsqueeze(0)

    def all_to_all(self, tensor: "Tensor") -> "Tensor":
        """A copy of ``tensor``: the one row stays here."""
        return tensor.clone()

    def broadcast(self, tensor: "Tensor", root: int) -> None:
        """Nothing to do: the tensor is the root's already."""

    def subgroup(self, instances: tuple[int, ...]) -> Self:
        """This backend: there is no smaller set with this instance in it."""
        del instances
        return self

    def stop_threads(self) -> None:
        """Nothing to do: there is no thread to end."""

    def close(self) -> None:
        """Nothing to do: there is no connection to drop."""


def host_group_of(backend: Backend) -> "HostGroup | None":
    """The instances that share this one's memory: all of the job, or those of its host; None where none do."""
    return backend.host_group or (
        backend.local_collectives.group if backend.local_collectives is not None else None
    )
