"""The sending and receiving of plain CPU tensors between two ranks of a torch process group.

If all ranks of a group are on one host, messages go through memory (`popdist.exchange.host_memory.messages`),
otherwise over gloo. All messages of a group go the same way, so that a message of any rank can be received.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch import distributed as dist

from popdist.exchange.host_memory.host_collectives import HostCollectives, as_bytes
from popdist.exchange.host_memory.messages import Messages, Receipt, Sent
from popdist.exchange.process_group.group_calls import (
    Collectives,
    Tensors,
    Work,
    bare,
    check_dense,
    check_rank,
    check_single,
    check_written,
    flat_values,
    give_back,
    place_of,
)
from popdist.exchange.process_group.work_queue import NO_TIMEOUT, outside_inference
from popdist.ground import torch_private_groups


class MessageWork(dist.Work):
    """The ``Work`` of a message between ranks: a handle to wait until the message was sent or received."""

    def __init__(self, message: Sent | Receipt) -> None:
        super().__init__()
        self._message = message

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for the message. Raises RuntimeError after a ``timeout`` above 0; the message may still come."""
        seconds = timeout.total_seconds()
        if not outside_inference(self._message.wait, seconds if seconds > 0 else None):
            raise RuntimeError(f"timeout: the message did not come within {seconds:g} seconds")
        return True

    def is_completed(self) -> bool:
        """Whether the message was sent or received, or has failed."""
        return outside_inference(self._message.is_done)

    def is_success(self) -> bool:
        """Whether the message was sent or received without an error."""
        return self.is_completed() and self._message.error is None

    def exception(self) -> BaseException | None:
        """Return the error if the message has failed; None if the message is done or still on its way."""
        return self._message.error

    def source_rank(self) -> int:
        """Return the rank that has sent the received message; -1 for a message that this rank sends."""
        return self._message.source

    _source_rank = source_rank

    def boxed(self) -> Any:
        """Wait for the message; return a finished ``Work`` as a ScriptObject, as torch's operators return it."""
        self.wait()
        return torch_private_groups.done_work([]).boxed()


class MessageCalls:
    """The messages between ranks of a group; methods and arguments have the names that torch's backends use."""

    def __init__(
        self,
        host: Collectives,
        gloo: Any,
    ) -> None:
        self.num_calls = 0  # number of calls that used memory
        self._size = host.size
        self._gloo = gloo
        self._messages = Messages(host.group) if isinstance(host, HostCollectives) else None

    def send(self, tensors: Tensors, rank: int, tag: int) -> Work:
        """Send the single tensor in ``tensors`` to ``rank``; return the ``Work`` to wait for."""
        _check("send", tensors, tag)
        check_rank("send", rank, self._size)
        if self._messages is not None:
            self.num_calls += 1
            return MessageWork(outside_inference(_send, self._messages, *bare(tensors), rank, tag))
        return self._gloo.send([tensor.resolve_conj().resolve_neg() for tensor in tensors], rank, tag)

    def recv(self, tensors: Tensors, rank: int, tag: int) -> Work:
        """Receive a message from ``rank`` into the single tensor in ``tensors``; return the ``Work``."""
        check_rank("recv", rank, self._size)
        return self._receive(tensors, [rank], tag) or self._gloo.recv(list(tensors), rank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        """Receive a message from any rank into the single tensor in ``tensors``; return the ``Work``."""
        return self._receive(tensors, range(self._size), tag) or self._gloo.recv_anysource(list(tensors), tag)

    def _receive(self, tensors: Tensors, ranks: Sequence[int], tag: int) -> Work | None:
        """Receive a message through shared memory, and return the ``Work``; return None if gloo must receive."""
        _check("recv", tensors, tag)
        if self._messages is not None:
            check_written("recv", tensors)
            self.num_calls += 1
            return MessageWork(outside_inference(_receive, self._messages, *bare(tensors), ranks, tag))
        check_dense("recv", tensors)
        return None


def _check(call: str, tensors: Tensors, tag: int) -> None:
    """Raise RuntimeError unless ``tensors`` has exactly one tensor, and gloo accepts the number ``tag``."""
    check_single(call, tensors)
    if tag < 0:
        raise RuntimeError(f"popdist::{call}: Tag must be nonnegative, got {tag}")


def _send(messages: Messages, tensor: Tensor, rank: int, tag: int) -> Sent:
    """Send the elements of ``tensor`` to ``rank`` through shared memory; return the sent message."""
    return messages.send(as_bytes(flat_values(tensor)), rank, tag)


def _receive(messages: Messages, tensor: Tensor, ranks: Sequence[int], tag: int) -> Receipt:
    """Request a message from one of ``ranks`` into ``tensor`` through shared memory; return the request."""
    place = place_of(tensor)
    return messages.receive(as_bytes(place), ranks, tag, lambda: give_back([tensor], [place]))
