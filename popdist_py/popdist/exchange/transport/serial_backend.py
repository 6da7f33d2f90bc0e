"""The backend of a job of one instance, and of an instance that is alone in a subset: nothing is sent."""

from typing import TYPE_CHECKING, Self

from popdist.errors import Names

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch
    from torch import Tensor

    from popdist.exchange.host_memory.addition import Op


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
    """A backend of one instance alone: a job of one, or the only member of a subgroup."""

    host_group = local_collectives = None
    """There is nobody to share memory with."""

    def __init__(self, instance_index: int, names: Names, *, device_kinds: frozenset[str]) -> None:
        self.instance_index = instance_index
        self.names = names
        self.instances = (instance_index,)
        self.device_kinds = device_kinds

    def channel(self, devices: "Collection[torch.device]") -> None:
        """None: there is nobody to send anything to."""
        del devices

    def start_exchange(self, header: bytes) -> SerialHeaderExchange:
        """An exchange that is complete at once."""
        return SerialHeaderExchange(header)

    def all_reduce(self, tensor: "Tensor", op: "Op") -> None:
        """Nothing to do: there is one tensor."""

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
