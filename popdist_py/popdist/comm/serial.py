"""The backend of one instance: every exchange is with itself."""

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch
    from torch import Tensor


class SerialExchange:
    """An exchange that is complete as soon as it is started."""

    def __init__(self, header: list[int]) -> None:
        self._header = header

    def wait(self, timeout_seconds: float | None = None) -> list[list[int]]:
        """The one header; there is nothing to wait for, so ``timeout_seconds`` plays no part."""
        del timeout_seconds
        return [self._header]

    def peek(self) -> list[list[int]]:
        """The one header."""
        return [self._header]


class SerialBackend:
    """One instance alone: a job of one, or the only member of a subgroup.

    Args:
        instance_index: Job-wide number of this instance.
        device_types: Types of the devices whose tensors are accepted.
    """

    host_group = neighbours = None
    """There is nobody to share memory with."""

    def __init__(self, instance_index: int = 0, *, device_types: frozenset[str]) -> None:
        self.instance_index = instance_index
        self.instances = (instance_index,)
        self.device_types = device_types

    def share_memory(self) -> None:
        """There is nobody to share it with."""

    def channel(self, devices: "Collection[torch.device]") -> None:
        """There is nobody to send anything to."""
        del devices

    def start_exchange(self, header: list[int]) -> SerialExchange:
        """Complete at once."""
        return SerialExchange(header)

    def all_gather(self, tensor: "Tensor") -> "Tensor":
        """A copy with a first dimension of 1."""
        return tensor.clone().unsqueeze(0)

    def all_to_all(self, tensor: "Tensor") -> "Tensor":
        """A copy: the one row stays here."""
        return tensor.clone()

    def broadcast(self, tensor: "Tensor", root: int) -> None:
        """The tensor is the root's already."""

    def subgroup(self, instances: tuple[int, ...]) -> Self:
        """Itself: there is no smaller set with this instance in it."""
        del instances
        return self

    def settle(self) -> None:
        """There is no thread to end."""

    def close(self) -> None:
        """There is no connection to drop."""
