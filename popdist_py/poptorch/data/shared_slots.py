"""Batches in memory that two processes share, and that comes again when the program has let go of a batch.

Fresh shared memory takes longer than the copy of a batch: the system clears each page first. So one process writes
into slots, the other makes tensors of them, and tells when the last tensor of a slot is gone. A program that keeps
its batches keeps their slots, and others are made.
"""

import io
import pickle
import weakref
from collections import deque
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

_ALIGNMENT: Final = 64


class _TensorPlace(NamedTuple):
    """Where a tensor lies in a slot.

    Attributes:
        offset: In bytes.
        dtype: Its dtype.
        shape: Its shape.
        stride: Its strides; None for a contiguous one.
    """

    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...] | None


class Written(NamedTuple):
    """What one process sends the other.

    Attributes:
        slot: Its number.
        memory: The slot, when it is new; else None.
        dropped: Slots that will not come again.
        places: Of the tensors in the slot.
        rest: The batch, pickled without them.
    """

    slot: int
    memory: Tensor | None
    dropped: tuple[int, ...]
    places: tuple[_TensorPlace, ...]
    rest: bytes


class SlotWriter:
    """Writes batches into free slots, or into new ones where none is large enough.

    Args:
        most_free: Slots that are kept free for batches to come.
    """

    def __init__(self, most_free: int) -> None:
        self._most_free = most_free
        self._slots: dict[int, Tensor] = {}
        self._free: list[int] = []
        self._dropped: list[int] = []
        self._num_made = 0

    def write(self, batch: Any) -> Written:  # noqa: ANN401 - whatever a dataset gives
        """Copy the tensors of ``batch`` into a slot."""
        stream = io.BytesIO()
        pickler = _Pickler(stream)
        pickler.dump(batch)
        offsets, num_bytes = [], 0
        for tensor in pickler.tensors:
            offsets.append(num_bytes)
            num_bytes += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        slot, is_new = self._take(num_bytes)
        memory = self._slots[slot]
        places = []
        for tensor, offset in zip(pickler.tensors, offsets, strict=True):
            stride = None if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
            places.append(_TensorPlace(offset, tensor.dtype, tensor.shape, stride))
            _tensor_in(memory, places[-1]).copy_(tensor)
        dropped, self._dropped = tuple(self._dropped), []
        return Written(slot, memory if is_new else None, dropped, tuple(places), stream.getvalue())

    def free(self, slot: int) -> None:
        """Have ``slot`` written again, or dropped where many are free."""
        self._free.append(slot)
        if len(self._free) > self._most_free:
            dropped = min(self._free, key=lambda one: self._slots[one].numel())
            self._free.remove(dropped)
            del self._slots[dropped]
            self._dropped.append(dropped)

    def _take(self, num_bytes: int) -> tuple[int, bool]:
        """A slot for so many bytes, and whether it is new."""
        fitting = [slot for slot in self._free if self._slots[slot].numel() >= num_bytes]
        if fitting:
            slot = min(fitting, key=lambda one: self._slots[one].numel())
            self._free.remove(slot)
            return slot, False
        slot = self._num_made
        self._num_made += 1
        self._slots[slot] = torch.empty(max(num_bytes, 1), dtype=torch.uint8).share_memory_()
        return slot, True


class SlotReader:
    """Makes batches of what a `SlotWriter` wrote."""

    def __init__(self) -> None:
        self._slots: dict[int, Tensor] = {}
        self._left: deque[int] = deque()

    def read(self, written: Written) -> Any:  # noqa: ANN401 - as above
        """The batch. Its tensors lie in the slot; the slot is left when the last of them is gone."""
        if written.memory is not None:
            self._slots[written.slot] = written.memory
        for slot in written.dropped:
            del self._slots[slot]
        held = self._slots[written.slot].numpy()[:]  # an object of its own, which the tensors keep
        weakref.finalize(held, self._left.append, written.slot).atexit = False
        return _Unpickler(io.BytesIO(written.rest), [_tensor_in(held, place) for place in written.places]).load()

    def left(self) -> list[int]:
        """Slots that were left since the last call."""
        return [self._left.popleft() for _ in range(len(self._left))]


def _tensor_in(memory: Any, place: _TensorPlace) -> Tensor:  # noqa: ANN401 - a tensor or an array of bytes
    """The tensor at ``place``, which keeps ``memory`` and has no more than its own bytes."""
    buffer = memory.numpy() if isinstance(memory, Tensor) else memory
    values = torch.frombuffer(buffer, dtype=place.dtype, count=place.shape.numel(), offset=place.offset)
    return values.view(place.shape) if place.stride is None else values.as_strided(place.shape, place.stride)


class _Pickler(ForkingPickler):
    """Leaves out tensors that can lie in a slot."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:  # noqa: ANN401 - of every kind
        if type(value) is not Tensor or not _can_be_copied(value):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._numbers[id(value)]


def _can_be_copied(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and not tensor.requires_grad
        and not tensor.is_quantized
    )


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]
