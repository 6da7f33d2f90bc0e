"""Collectives between simulated accelerators, as asynchronous as those of NCCL.

A collective runs in a stream of the process group, after what the current stream has computed so far. Only
``wait()`` lets the current stream wait for the collective. gloo sends the bytes meanwhile.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from popdist.ground import torch_private_groups
from popdist.ground.accelerators import accelerator
from tests.accelerator import simulated


def make_direct() -> None:
    """Have popdist find these collectives, as it finds NCCL."""
    accelerator.collectives_of = lambda device_type: "custom"  # noqa: ARG005 - the name is the original's
    accelerator.connect = lambda _device_type, *place: SimulatedCollectives(*place)


class _Work:
    """A collective that has begun."""

    def __init__(self, stream: torch.Stream, held: list[Tensor]) -> None:
        self._device = stream.device
        self._event = stream.record_event()
        self._held = held  # until the current stream waits for the collective

    def wait(self) -> None:
        """Have the current stream wait."""
        simulated.current_stream(self._device).wait_event(self._event)
        self._held.clear()


class SimulatedCollectives:
    """What popdist calls of a process group of NCCL."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._gloo: Any = torch_private_groups.connect_gloo(store, rank, size, timeout, None)
        self._size = size
        self._streams: dict[torch.device, torch.Stream] = {}

    def _allgather_base(self, output: Tensor, mine: Tensor) -> _Work:
        def gather() -> None:
            rows = torch.empty(self._size, mine.numel(), dtype=mine.dtype)
            self._gloo.allgather([[*rows]], [mine.cpu()]).wait()
            output.copy_(rows.view_as(output).pin_memory(), non_blocking=True)

        return self._begin(gather, [output, mine])

    def alltoall_base(self, output: Tensor, mine: Tensor, _to: list[int], _from: list[int]) -> _Work:
        """Send the rows of ``mine`` to the members."""

        def exchange() -> None:
            received = torch.empty(output.shape, dtype=output.dtype)
            self._gloo.alltoall_base(received, mine.cpu(), [], []).wait()
            output.copy_(received.pin_memory(), non_blocking=True)

        return self._begin(exchange, [output, mine])

    def broadcast(self, tensor: Tensor, root: int) -> _Work:
        """Overwrite ``tensor`` with the root's."""

        def send() -> None:
            staged = tensor.cpu()
            self._gloo.broadcast(staged, root).wait()
            tensor.copy_(staged.pin_memory(), non_blocking=True)

        return self._begin(send, [tensor])

    def _begin(self, do: Callable[[], None], tensors: list[Tensor]) -> _Work:
        device = tensors[0].device
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(simulated.current_stream(device))
        with stream:
            do()
        return _Work(stream, tensors)

    def abort(self) -> None:
        """End all waits."""
        self._gloo.abort()
