"""The backend of a single instance, which is alone in its job or in its subgroup. Nothing is sent."""

from typing import TYPE_CHECKING, Self

from popdist.errors import Names

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch
    from torch import Tensor

    from popdist.exchange.host_memory.addition import Op


class SerialHeaderExchange:
    """An exchange of headers, messages between instances, that is complete at once, as there is one instance."""

    def __init__(self, header: bytes) -> None:
        self._header = header

    def wait(self, timeout_seconds: float | None = None) -> list[bytes]:
        """Return this instance's header (message), the only header, at once; ``timeout_seconds`` is ignored."""
        del timeout_seconds
        return [self._header]

    def peek(self) -> list[bytes]:
        """Return this instance's header (message), which is the only header."""
        return [self._header]


class SerialBackend:
    """The backend of a single instance, which is alone in its job or in its subgroup."""

    host_group = local_collectives = None
    """None, because there is no other instance to share memory with."""

    def __init__(self, instance_index: int, names: Names, *, device_kinds: frozenset[str]) -> None:
        self.instance_index = instance_index
        self.names = names
        self.instances = (instance_index,)
        self.device_kinds = device_kinds

    def channel(self, devices: "Collection[torch.device]") -> None:
        """Return None, because there is no other instance to send tensors to."""
        del devices

    def start_exchange(self, header: bytes) -> SerialHeaderExchange:
        """Return a complete exchange of headers (messages), because there is no other instance."""
        return SerialHeaderExchange(header)

    def all_reduce(self, tensor: "Tensor", op: "Op") -> None:
        """Do nothing, because the tensor of the only instance is the result."""

    def all_gather(self, tensor: "Tensor") -> "Tensor":
        """Return a copy of ``tensor`` with a first dimension of 1, the number of instances."""
        return tensor.clone().unsqueeze(0)

    def all_to_all(self, tensor: "Tensor") -> "Tensor":
        """Return a copy of ``tensor``, whose only row is for this instance."""
        return tensor.clone()

    def broadcast(self, tensor: "Tensor", root: int) -> None:
        """Do nothing, because this instance is the root."""

    def subgroup(self, instances: tuple[int, ...]) -> Self:
        """Return this backend, because there is no smaller set with this instance."""
        del instances
        return self

    def stop_threads(self) -> None:
        """Do nothing, because this backend has no thread."""

    def close(self) -> None:
        """Do nothing, because this backend has no connection."""
