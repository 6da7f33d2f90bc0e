"""Overlap of gradient reduction with the backward pass: buckets are sent while the last backward pass still runs.

A bucket sent early is a copy. At the end each instance compares it with its gradients, bitwise: if one copy was
wrong, all instances add once more. A step sends early only if all instances have agreed; then each sends every
bucket, because the others wait for it. The first bucket is small, to begin early; later buckets are larger.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from threading import RLock
from typing import Final, TypeAlias

import torch
from torch import Tensor

from popdist.exchange.groups import Exchange
from popdist.exchange.host_memory.host_collectives import HostCollectives
from popdist.exchange.transport.channel import Channel
from popdist.exchange.transport.two_level import BucketAllReduce
from popdist.gradients.flat_buffers import (
    ALIGNMENT,
    FlatBuffer,
    FlatGradient,
    GradientLayout,
    nodes_of,
    nodes_of_hosts,
    num_real_elements,
    scale_flat,
)
from popdist.gradients.step_headers import BeginHeader
from popdist.ground.accelerators import accelerator
from popdist.ground.layout import ReplicaLayout
from popdist.ground.local_tensors import local_gradient
from popdist.ground.tree import Node, TreeSum

KEPT_BYTES: Final = 31 << 20
"""Size of the largest block that makes glibc keep freed memory: 32 MiB, less room for glibc's own data."""

BUCKET_SIZE: Final = 1 << 20
"""Number of elements in the first bucket of a flat buffer; a bucket that ends with a large gradient has more."""

NUM_DOUBLINGS: Final = 3
"""How many times the next bucket has at least twice as many elements as the bucket before."""

PIECE_SIZE: Final = 1 << 21
"""Number of elements sent in one message: 0.75 to 1.5 times this number, or a whole smaller bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients that are sent together: the elements ``start`` to ``stop`` of flat buffer number ``buffer``."""

    buffer: int
    start: int
    stop: int
    members: tuple[int, ...]  # the positions of the parameters in the model

    @property
    def run(self) -> slice:
        """The slice of the flat buffer that holds the gradients of this bucket."""
        return slice(self.start, self.stop)


def make_buckets(buffers: Sequence[FlatBuffer]) -> list[Bucket]:
    """Divide flat buffers into buckets, last parameters first: the backward pass makes their gradients first."""
    buckets = [bucket for number, buffer in enumerate(buffers) for bucket in _buckets_of(number, buffer)]
    return sorted(buckets, key=lambda bucket: min(bucket.members), reverse=True)


def _buckets_of(number: int, buffer: FlatBuffer) -> Iterable[Bucket]:
    stop, members, size = buffer.size, [], BUCKET_SIZE
    for index, parameter, start in reversed(buffer.members):
        if num_real_elements(parameter):
            members.append(index)
        if members and (stop - start >= size or start == 0):
            yield Bucket(buffer=number, start=start, stop=stop, members=tuple(members))
            stop, members, size = start, [], min(2 * size, BUCKET_SIZE << NUM_DOUBLINGS)


def runs_of(bucket: Bucket) -> list[slice]:
    """Return the slices of a bucket that are sent one by one; all but the last are equally long."""
    size = bucket.stop - bucket.start
    num_pieces = max(1, (size + PIECE_SIZE // 2) // PIECE_SIZE)
    width = -(-size // (num_pieces * ALIGNMENT)) * ALIGNMENT
    starts = range(bucket.start, bucket.stop, width)
    return [slice(start, min(start + width, bucket.stop)) for start in starts]


BucketPiece: TypeAlias = tuple[slice, BucketAllReduce]
"""A part of a bucket that is sent by itself: its slice of the flat buffer, and its all-reduce."""


def keep_freed_memory() -> None:
    """Make the C library keep freed memory, so that the kernel need not clear memory for every backward pass."""
    # glibc keeps twice the size of a freed block (mallopt(3)); otherwise the kernel clears the memory each time
    torch.empty(KEPT_BYTES, dtype=torch.uint8, device="cpu")


class Overlap:
    """The buckets of a model's gradients that are sent while the backward pass still runs, and their memory."""

    replica: FlatGradient  # the gradient of this instance's last replica; ``sent`` itself if it is not rounded
    sent: FlatGradient  # the gradients that this instance has sent early
    sums: FlatGradient  # the sums over all instances

    def __init__(
        self,
        channel: Channel,
        layout: ReplicaLayout,
        gradients: GradientLayout,
        local_collectives: HostCollectives | None = None,
        narrow: torch.dtype | None = None,
    ) -> None:
        self.channel = channel
        self._local_collectives = local_collectives
        self._nodes_of_hosts: list[list[Node]] | None = None
        if local_collectives is not None and ALIGNMENT % local_collectives.size == 0:
            self._nodes_of_hosts = nodes_of_hosts(layout, local_collectives.size)
        self.gradients = gradients
        self.buckets = make_buckets(gradients.flat_buffers)
        self.expected: set[int] = set()  # parameters that have ever got a gradient in a last micro batch
        members = {index: parameter for buffer in gradients.flat_buffers for index, parameter, _ in buffer.members}
        self.bucket_of = {
            id(members[index]): k for k, bucket in enumerate(self.buckets) for index in bucket.members
        }
        self.members = [[members[index] for index in bucket.members] for bucket in self.buckets]
        self.nodes = [nodes_of(layout, instance) for instance in range(layout.num_instances)]
        self._num_replicas = layout.num_replicas
        self._digest = hashlib.blake2b(repr(self.buckets).encode(), digest_size=16).digest()
        self._narrow = narrow
        self._has_given_up = False
        self._has_memory = False
        self._pieces: list[list[BucketPiece]] = []

    def _allocate(self) -> None:
        """Allocate the memory for the buckets that all steps use, unless this was done before."""
        if self._has_memory:
            return
        keep_freed_memory()
        self.replica = self.sent = self.gradients.make_wide()
        if self._narrow is None:
            self.sums = self.gradients.make_wide()
        else:
            self.sent = self.gradients.make_narrow(self._narrow)
            self.sums = self.gradients.make_narrow(self._narrow)
        self._pieces = [
            [(run, self._early_sum(self.sums.tensors[bucket.buffer][run])) for run in runs_of(bucket)]
            for bucket in self.buckets
        ]
        self._has_memory = True

    def _early_sum(self, into: Tensor) -> BucketAllReduce:
        local, nodes = self._local_collectives, self._nodes_of_hosts
        if not into.is_cpu or local is None or nodes is None or self.channel.local_collectives is None:
            return BucketAllReduce(self.channel, self.nodes, self._num_replicas, into)
        return BucketAllReduce(self.channel, nodes, self._num_replicas, into, local)

    def num_expected(self) -> list[int]:
        """Return for each bucket how many gradients must come before the bucket is sent during the backward pass.
        In the first step the gradients are unknown, so no bucket is sent during the backward pass.
        """
        return [
            sum(id(member) in self.expected for member in members) + (not self.expected)
            for members in self.members
        ]

    def begin_step(self, *, scales: bool) -> "OverlappedSum | None":
        """Return the sum of the gradients that this step sends in the backward pass; None if it sends none."""
        number = self.number_of_step()
        return OverlappedSum(self, number, scales=scales) if number else None

    def number_of_step(self) -> int:
        """Return a digest of the buckets that this instance can send in the next backward pass; 0 if none."""
        if self._has_given_up or self.channel.is_in_use or self.channel.is_broken or not self.buckets:
            return 0
        try:
            self._allocate()
        except (RuntimeError, MemoryError):
            self._has_given_up = True
            return 0
        issued = self.channel.num_issued.to_bytes(8, "little")
        number = hashlib.blake2b(self._digest + issued, digest_size=7).digest()
        return 1 + int.from_bytes(number, "little")

    def post_receives(self) -> None:
        """Start to receive the messages of every bucket, after all instances agreed to send in this step."""
        self.channel.wait_until_idle()
        for _, total in chain.from_iterable(self._pieces):
            total.post_receives()

    def send(self, number: int, own: Sequence[Tensor]) -> None:
        """Send this instance's partial sums ``own`` of bucket ``number``, to be added over all instances."""
        first = self.buckets[number].start
        for run, total in self._pieces[number]:
            total.send([flat[run.start - first : run.stop - first] for flat in own])
        if number == len(self.buckets) - 1:
            for _, total in chain.from_iterable(self._pieces):
                total.start_waiting()

    def finish(self, over: float) -> FlatGradient:
        """Wait for all buckets; return the sums over the job, divided by ``over``, in float32 or float64."""
        total = self.sums if self._narrow is None else self.replica
        number = self.channel.num_issued - sum(map(len, self._pieces))
        for bucket, pieces in zip(self.buckets, self._pieces, strict=True):
            for run, early in pieces:
                number += 1
                self.channel.wait(number)
                early.finish()
                part = total.tensors[bucket.buffer][run]
                if total is not self.sums:
                    part.copy_(self.sums.tensors[bucket.buffer][run])
                scale_flat([part], over=over)
        return total

    def remember_used_parameters(self, arrived: set[int], *, is_final: bool) -> None:
        """Record which parameters got a gradient. Send nothing in later backward passes if the program has changed
        a gradient after the gradient was sent.
        """
        # without a new parameter the program itself has changed a sent gradient, and would do so again
        self._has_given_up = not is_final and arrived <= self.expected
        self.expected |= arrived

    def drop_memory(self) -> None:
        """Use new memory from now on, because messages of the old step may still write into the old memory."""
        self._has_memory = False


class LastMicroBatch:
    """The last micro batch of a step on this instance, whose gradients are added and sent bucket by bucket."""

    def __init__(
        self,
        overlap: Overlap,
        micro_batches: TreeSum[FlatGradient],
        replicas: TreeSum[FlatGradient],
        weight: float,
    ) -> None:
        self._overlap = overlap
        self._micro_batches = micro_batches
        self._replicas = replicas
        self._weight = weight
        self._is_blocked = False
        devices = {it.device for it in overlap.gradients.flat_buffers if it.device.type != "cpu"}
        self._streams = {device: torch.accelerator.current_stream(device) for device in devices}

    def check_stream(self, parameter: Tensor) -> None:
        """Stop sending in this backward pass if this thread's stream is not the stream of the micro batch, and so
        may not read the new gradient yet, or if the gradient is sparse.
        """
        self._is_blocked |= not self._is_in_order(parameter.device) or (
            parameter.grad is not None and parameter.grad.layout != torch.strided
        )

    def can_read(self, number: int) -> bool:
        """Whether the stream of this thread may now read the gradients of bucket ``number``, to send them."""
        buffer = self._overlap.gradients.flat_buffers[self._overlap.buckets[number].buffer]
        return not self._is_blocked and self._is_in_order(buffer.device)

    @torch.no_grad()
    def add(self, number: int, weight_scale: float) -> list[Tensor]:
        """Add this micro batch's gradients in bucket ``number`` to earlier sums; return the partial sums."""
        bucket, wide, sent = self._overlap.buckets[number], self._overlap.replica, self._overlap.sent
        for parameter in self._overlap.members[number]:
            slot = wide.slot_of[id(parameter)]
            gradient = local_gradient(parameter)
            slot.zero_() if gradient is None else slot.copy_(gradient)
        own = wide.tensors[bucket.buffer][bucket.run]
        if self._weight != weight_scale:
            own.mul_(self._weight / weight_scale)

        def part(gradient: FlatGradient) -> Tensor:
            return gradient.tensors[bucket.buffer][bucket.run]

        micro_batches = self._micro_batches.of_part(part, _add)
        micro_batches.push(own)
        replicas = self._replicas.of_part(part, _add)
        (replica,) = micro_batches.nodes.values()
        replicas.push(replica if sent is wide else part(sent).copy_(replica))
        return list(replicas.nodes.values())

    def _is_in_order(self, device: torch.device) -> bool:
        """Whether this thread uses the stream in which the micro batch began, and captures no CUDA graph in it."""
        if device not in self._streams:
            return True
        is_same = torch.accelerator.current_stream(device) == self._streams[device]
        return is_same and not accelerator.is_capturing(device)


def _add(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left + right`` in the memory of ``right``, because the step's final sum still needs ``left``."""
    return torch.add(left, right, out=right)


_BITS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype in which floats of this number of bytes are compared: NaN != NaN, but 0.0 == -0.0."""


class OverlappedSum:
    """The sum, over all instances, of one step's gradients that are sent already during the backward pass."""

    def __init__(self, overlap: Overlap, number: int, *, scales: bool) -> None:
        self.number = number  # a digest of the gradients that this instance would send
        self._overlap = overlap
        self._scales = scales  # whether weights are divided by the largest weight of the job
        self._lock = RLock()  # autograd has one thread for each device
        self._announced: Exchange | None = None
        self._weight_scale: float | None = None
        self._is_refused = self._is_closed = self._is_over = False
        self._arrived: set[int] = set()
        self._num_awaited = overlap.num_expected()
        self._num_sent = self._num_early = 0
        self._last: LastMicroBatch | None = None
        overlap.channel.is_in_use = True

    def set_header(self, announced: Exchange) -> None:
        """Keep ``announced``, the exchange of messages by which all instances begin the step: gradients are sent
        in the backward pass only if all these messages have come and agree.
        """
        self._announced = announced
        announced.peek()

    def begin_last(
        self, micro_batches: TreeSum[FlatGradient], replicas: TreeSum[FlatGradient], weight: float
    ) -> None:
        """Begin the last micro batch: from now on each bucket is sent when its gradients are complete."""
        if weight:
            self._last = LastMicroBatch(self._overlap, micro_batches, replicas, weight)

    def add_gradient(self, parameter: Tensor) -> None:
        """Send each bucket that the gradient of ``parameter`` completes, if all instances agree to send now."""
        if self._last is None:
            return
        with self._lock:
            self._last.check_stream(parameter)
            self._arrive(parameter)
            if not self._is_agreed():
                return
            while self._num_sent < len(self._num_awaited) and not self._num_awaited[self._num_sent]:
                if not self._last.can_read(self._num_sent):
                    return
                self._send(self._last.add(self._num_sent, self._weight_scale or 1.0))
                self._num_early += 1

    def close(self, own: Sequence[FlatGradient]) -> int:
        """Send the remaining buckets of the partial sums ``own``. Return a negative number, equal on all instances
        that sent the same; 0 if a gradient was changed after it was sent, or if instances did not agree to send.
        """
        with self._lock:
            if not self._is_agreed():
                return 0
            self._last = None
            self._send_rest(own)
            self._is_closed = True
            is_final = self._is_final(own[-1])
            self._overlap.remember_used_parameters(self._arrived, is_final=is_final)
            return -self.number if is_final else 0

    def wait(self, over: float, *, are_right: bool) -> FlatGradient | None:
        """Wait for the sent buckets; return their sums, divided by ``over``, or None if sent gradients changed."""
        was_sent, self._num_sent = self._num_sent > 0, 0
        if are_right:
            return self._overlap.finish(over)
        if was_sent:
            self._overlap.channel.wait()
        return None

    def end(self) -> None:
        """End this sum; if the step is abandoned, first send the buckets for which others wait. Never raises."""
        with self._lock:
            if self._is_over:
                return
            self._is_over, self._last = True, None
            if not self._is_closed and self._is_agreed():
                own = self._overlap.nodes[self._overlap.channel.instance_index]
                self._send_rest([self._overlap.sent] * len(own))
            elif self._announced is not None and self._weight_scale is None and not self._is_refused:
                self._overlap.channel.abort()  # the other instances may still agree
            if self._num_sent:
                self._overlap.drop_memory()
            self._overlap.channel.is_in_use = False

    def _arrive(self, parameter: Tensor) -> None:
        bucket = self._overlap.bucket_of.get(id(parameter))
        if bucket is not None and id(parameter) not in self._arrived:
            self._arrived.add(id(parameter))
            self._num_awaited[bucket] -= id(parameter) in self._overlap.expected

    def _is_agreed(self) -> bool:
        """Whether all instances agreed to send the same gradients during the backward pass. When the answer is
        True for the first time, start to receive the messages of the other instances.
        """
        if self._weight_scale is None and self._announced is not None and not self._is_refused:
            numbers = self._announced.peek()
            if numbers is not None:
                headers = [BeginHeader._make(words) for words in numbers]
                heaviest = [header.heaviest_weight for header in headers]
                self._is_refused = {header.early for header in headers} != {self.number} or not any(heaviest)
                if not self._is_refused:
                    self._weight_scale = max(heaviest) if self._scales else 1.0
                    self._protected(self._overlap.post_receives)
        return self._weight_scale is not None

    def _protected(self, send: Callable[[], None]) -> None:
        """Call ``send``; if it raises, end the network channel, because it is unknown which data were sent."""
        try:
            send()
        except BaseException:
            self._overlap.channel.abort()
            raise

    def _send(self, own: Sequence[Tensor]) -> None:
        """Send the partial sums ``own`` of the next bucket."""
        number = self._num_sent
        self._num_sent += 1
        self._protected(lambda: self._overlap.send(number, own))

    def _send_rest(self, own: Sequence[FlatGradient]) -> None:
        for bucket in self._overlap.buckets[self._num_sent :]:
            self._send([node.tensors[bucket.buffer][bucket.run] for node in own])

    def _is_final(self, last: FlatGradient) -> bool:
        """Whether gradients sent in the backward pass are bitwise equal to ``last``, those at the step's end."""
        starts = {bucket.buffer: bucket.start for bucket in self._overlap.buckets[: self._num_early]}
        sent = self._overlap.sent
        pairs = [(sent.tensors[it][start:], last.tensors[it][start:]) for it, start in starts.items()]
        return all(_have_same_bits(sent, own) for sent, own in pairs)


def _have_same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two flat tensors are bitwise equal; all NaNs count as equal, because conversions make several."""
    if torch.equal(left.view(torch.int64), right.view(torch.int64)):  # slots begin at cache lines, so sizes fit
        return True
    bits = _BITS[left.dtype.itemsize]
    left_bits, right_bits = left.view(bits), right.view(bits)
    return bool(((left_bits == right_bits) | (left.isnan() & right.isnan())).all())
