"""Gradients that go early: added over the instances, bucket by bucket, while the last backward pass still runs.

Where the sum goes over a network or between GPUs, its time is hidden behind the rest of the last backward pass of
a step. What an instance sends early is a copy, made as the end of the step would make it; its own gradients stay
as they are. At the end it compares the two, bit by bit, and says whether what it has sent is what it should have:
when all have, the sum is there, and else they add once more as if nothing had been sent. So whatever a program
does to its gradients before a micro batch is over, the sum is right.

A step goes early only if all instances have said, in its first header, that they would, and how: a number tells
the buckets and how many have been sent before. From then on each of them sends every bucket of the step, whatever
becomes of it, because the others wait for them. A bucket travels in pieces: one is added while the next is on its
way, and the first ones are divided while the last ones still travel.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Final

import torch
from torch import Tensor

from popdist.gradients.buckets import Bucket, digest_of, make_buckets, runs_of
from popdist.gradients.exchange import nodes_of, nodes_of_hosts
from popdist.gradients.rows import ALIGNMENT, FlatGradients, GradientRows, scale_rows, sum_of
from popdist.groups import Exchange, as_floats
from popdist.host_memory.host_collectives import HostCollectives
from popdist.layout import ReplicaLayout
from popdist.transport.bucket_sums import BucketAllReduce, HostSum, LocalRanks, PostedSum, QueuedSum
from popdist.transport.channel import Channel
from popdist.tree import Node, TreeSum

KEPT_BYTES: Final = 31 << 20
"""The largest block that counts, of at most 32 MiB, with room for what the C library adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPiece:
    """A part of a bucket, which travels by itself.

    Attributes:
        run: Where its numbers are in the row.
        total: Its sum over the job.
    """

    run: slice
    total: BucketAllReduce


def keep_freed_memory() -> None:
    """Have the C library keep what the backward pass of a step frees for the next one.

    glibc else gives the end of its heap back in each step, and the kernel clears it before it is used again, which
    takes a twentieth of a step of large layers. When a block of this size was freed it keeps twice as much
    (mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD). Where one of these is set, and in other libraries, nothing
    changes.
    """
    torch.empty(KEPT_BYTES, dtype=torch.uint8)


class Overlap:
    """The buckets of one model's gradients, and what their steps need again: rows, and which gradients come.

    Args:
        channel: Between all instances of the job.
        layout: Which replicas each of them owns.
        gradients: Of the model.
        local_collectives: Those of this host, for the program's thread; None where each is alone.
        narrow: The dtype of what is added over the replicas; None for that of the gradients' rows.

    Attributes:
        buckets: In the order in which they are sent.
        expected: Identities of the parameters that have ever got a gradient in a last micro batch.
    """

    def __init__(
        self,
        channel: Channel,
        layout: ReplicaLayout,
        gradients: FlatGradients,
        local_collectives: HostCollectives | None = None,
        narrow: torch.dtype | None = None,
    ) -> None:
        self.channel = channel
        self._local_collectives: LocalRanks | None = None
        self._nodes_of_hosts: list[list[Node]] | None = None
        if (
            channel.local_collectives is not None
            and local_collectives is not None
            and ALIGNMENT % local_collectives.size == 0
        ):
            self._local_collectives = LocalRanks(
                of_channel=channel.local_collectives, of_program=local_collectives
            )
            self._nodes_of_hosts = nodes_of_hosts(layout, local_collectives.size)
        self.gradients = gradients
        self.buckets = make_buckets(gradients.kinds)
        self.expected: set[int] = set()
        members = {index: parameter for kind in gradients.kinds for index, parameter, _ in kind.members}
        self.bucket_of = {
            id(members[index]): k for k, bucket in enumerate(self.buckets) for index in bucket.members
        }
        self.members = [[members[index] for index in bucket.members] for bucket in self.buckets]
        self.nodes = [nodes_of(layout, instance) for instance in range(layout.num_instances)]
        self._num_replicas = layout.num_replicas
        self._digest = digest_of(self.buckets)
        self._narrow = narrow
        self._has_given_up = False
        self._rows: tuple[GradientRows, GradientRows, GradientRows] | None = None
        self._pieces: list[list[BucketPiece]] = []

    @property
    def replica(self) -> GradientRows:
        """The gradient of this instance's last replica; :attr:`sent` itself if it is not rounded."""
        return self._all()[0]

    @property
    def sent(self) -> GradientRows:
        """What this instance has sent early."""
        return self._all()[1]

    @property
    def sums(self) -> GradientRows:
        """The sums over the job."""
        return self._all()[2]

    def _all(self) -> tuple[GradientRows, GradientRows, GradientRows]:
        if self._rows is None:
            keep_freed_memory()
            wide, make = self.gradients.make_rows(), self.gradients.make_narrow
            if self._narrow is None:
                self._rows = (wide, wide, self.gradients.make_rows())
            else:
                self._rows = (wide, make(self._narrow), make(self._narrow))
            self._pieces = [self._pieces_of(bucket, self._rows[2]) for bucket in self.buckets]
        return self._rows

    def _pieces_of(self, bucket: Bucket, sums: GradientRows) -> list[BucketPiece]:
        row = sums.rows[bucket.kind]
        return [BucketPiece(run=run, total=self._early_sum(row[run])) for run in runs_of(bucket)]

    def _early_sum(self, into: Tensor) -> BucketAllReduce:
        channel, num_replicas, op = self.channel, self._num_replicas, sum_of(into.dtype)
        if into.is_cuda:
            return QueuedSum(channel, self.nodes, num_replicas, into, op)
        if self._local_collectives is not None and self._nodes_of_hosts is not None:
            return HostSum(self._local_collectives, channel, self._nodes_of_hosts, num_replicas, into, op)
        return PostedSum(channel, range(len(self.nodes)), self.nodes, num_replicas, into)

    def num_expected(self) -> list[int]:
        """For each bucket, how many of its parameters will get a gradient; more where nothing is known."""
        return [
            sum(id(member) in self.expected for member in members) + (not self.expected)
            for members in self.members
        ]

    def begin_step(self, *, scales: bool) -> "OverlappedSum | None":
        """The sum of the step that begins; None where its gradients shall not go early.

        Args:
            scales: Whether weights are divided by the heaviest one of the job.
        """
        number = self.offer()
        return OverlappedSum(self, number, scales=scales) if number else None

    def offer(self) -> int:
        """A number for what this instance would send early in the step that begins; 0 for nothing."""
        if self._has_given_up or self.channel.is_in_use or self.channel.is_broken or not self.buckets:
            return 0
        try:
            self._all()
        except (RuntimeError, MemoryError):
            self._has_given_up = True
            return 0
        issued = self.channel.num_issued.to_bytes(8, "little")
        number = hashlib.blake2b(self._digest + issued, digest_size=7).digest()
        return 1 + int.from_bytes(number, "little")

    def expect(self) -> None:
        """All instances have agreed to send every bucket."""
        self.channel.wait_until_idle()
        for piece in self._all_pieces():
            piece.total.post_receives()

    def _all_pieces(self) -> Iterable[BucketPiece]:
        return (piece for pieces in self._pieces for piece in pieces)

    def send(self, number: int, own: Sequence[Tensor]) -> None:
        """Have a bucket added over the job, of which ``own`` are this instance's parts."""
        first = self.buckets[number].start
        for piece in self._pieces[number]:
            piece.total.send([row[piece.run.start - first : piece.run.stop - first] for row in own])
        if number == len(self.buckets) - 1:
            for piece in self._all_pieces():
                piece.total.start_waiting()

    def finish(self, over: float) -> GradientRows:
        """The sums over the job divided by ``over``, in wide rows, when all buckets were sent."""
        rows = self.sums if self._narrow is None else self.replica
        number = self.channel.num_issued - sum(map(len, self._pieces))
        for bucket, pieces in zip(self.buckets, self._pieces, strict=True):
            for piece in pieces:
                number += 1
                self.channel.wait(number)
                piece.total.finish()
                part = rows.rows[bucket.kind][piece.run]
                if rows is not self.sums:
                    part.copy_(self.sums.rows[bucket.kind][piece.run])
                scale_rows([part], over=over)
        return rows

    def learn(self, arrived: set[int], *, is_final: bool) -> None:
        """Remember what a step has shown.

        Args:
            arrived: Parameters that got a gradient in its last micro batch.
            is_final: Whether what was sent was right. Where it was not, and no parameter is new, the program
                changes gradients that were sent: it will do so again, and nothing is sent early any more.
        """
        self._has_given_up = not is_final and arrived <= self.expected
        self.expected |= arrived

    def leave_rows(self) -> None:
        """Let what is still on its way use the rows for itself."""
        self._rows = None


class LastMicroBatch:
    """The last micro batch of a step on this instance, and its buckets added to what came before it.

    Args:
        overlap: Of the model's gradients.
        micro_batches: The sum of its replica's micro batches before it.
        replicas: The sum of this instance's replicas before its own.
        weight: What it counts.
    """

    def __init__(
        self,
        overlap: Overlap,
        micro_batches: TreeSum[GradientRows],
        replicas: TreeSum[GradientRows],
        weight: float,
    ) -> None:
        self._overlap = overlap
        self._micro_batches = micro_batches
        self._replicas = replicas
        self._weight = weight
        self._is_blocked = False
        devices = {kind.device for kind in overlap.gradients.kinds if kind.device.type == "cuda"}
        self._streams = {device: torch.cuda.current_stream(device) for device in devices}

    def check(self, parameter: Tensor) -> None:
        """See whether a gradient that has come may be read in this stream: if not, all wait for the end."""
        self._is_blocked |= not self._is_in_order(parameter.device) or (
            parameter.grad is not None and parameter.grad.layout != torch.strided
        )

    def can_read(self, number: int) -> bool:
        """Whether the gradients of a bucket may be read here and now."""
        kind = self._overlap.gradients.kinds[self._overlap.buckets[number].kind]
        return not self._is_blocked and self._is_in_order(kind.device)

    @torch.no_grad()
    def add(self, number: int, unit: float) -> list[Tensor]:
        """This instance's parts of a bucket's sum, with the bits that the end of the step will have.

        Args:
            number: Of the bucket, whose gradients are complete.
            unit: What weights are divided by.
        """
        bucket, wide, sent = self._overlap.buckets[number], self._overlap.replica, self._overlap.sent
        for parameter in self._overlap.members[number]:
            slot = wide.slots[id(parameter)]
            slot.zero_() if parameter.grad is None else slot.copy_(parameter.grad)
        row = wide.rows[bucket.kind][bucket.run]
        if self._weight != unit:
            row.mul_(self._weight / unit)

        def part(rows: GradientRows) -> Tensor:
            return rows.rows[bucket.kind][bucket.run]

        micro_batches = self._micro_batches.of_part(part, _add)
        micro_batches.push(row)
        replicas = self._replicas.of_part(part, _add)
        (replica,) = micro_batches.nodes.values()
        replicas.push(replica if sent is wide else part(sent).copy_(replica))
        return list(replicas.nodes.values())

    def _is_in_order(self, device: torch.device) -> bool:
        """Whether this thread computes on ``device`` in the stream in which the micro batch began, for itself."""
        if device not in self._streams:
            return True
        is_same = torch.cuda.current_stream(device) == self._streams[device]
        return is_same and not torch.cuda.is_current_stream_capturing()


def _add(left: Tensor, right: Tensor) -> Tensor:
    """The sum, written over ``right``, a copy of what this step sends: ``left`` is still needed."""
    return torch.add(left, right, out=right)


_BITS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What numbers are compared as: a NaN is not equal to itself, and 0.0 is to -0.0."""


class OverlappedSum:
    """The sum of one step's gradients, which go early: made before the step is announced, and ended in every case.

    While it is there, no other step goes early.

    Args:
        overlap: Of the model's gradients.
        number: What the overlap offers; greater than 0.
        scales: Whether weights are divided by the heaviest one of the job.
    """

    def __init__(self, overlap: Overlap, number: int, *, scales: bool) -> None:
        self.number = number
        self._overlap = overlap
        self._scales = scales
        self._lock = RLock()
        """Gradients of several devices come in a thread each."""
        self._announced: Exchange | None = None
        self._unit: float | None = None
        self._is_refused = self._is_closed = self._is_over = False
        self._arrived: set[int] = set()
        self._num_awaited = overlap.num_expected()
        self._num_sent = self._num_early = 0
        self._last: LastMicroBatch | None = None
        overlap.channel.is_in_use = True

    def listen(self, announced: Exchange) -> None:
        """Take the headers with everybody's :attr:`number`, of which this instance's was just sent."""
        self._announced = announced
        announced.peek()

    def begin(self, micro_batches: TreeSum[GradientRows], replicas: TreeSum[GradientRows], weight: float) -> None:
        """The last micro batch begins: see :class:`LastMicroBatch`."""
        if weight:
            self._last = LastMicroBatch(self._overlap, micro_batches, replicas, weight)

    def take(self, parameter: Tensor) -> None:
        """A gradient has been accumulated: send the buckets that are complete, if all instances want them."""
        if self._last is None:
            return
        with self._lock:
            self._last.check(parameter)
            self._arrive(parameter)
            if not self._is_agreed():
                return
            while self._num_sent < len(self._num_awaited) and not self._num_awaited[self._num_sent]:
                if not self._last.can_read(self._num_sent):
                    return
                self._send(self._last.add(self._num_sent, self._unit or 1.0))
                self._num_early += 1

    def close(self, own: Sequence[GradientRows]) -> int:
        """The gradients are complete: send what is left of them.

        Args:
            own: This instance's parts of the sum over all replicas.

        Returns:
            What to say: that the sums are right as far as this instance knows, or 0.
        """
        with self._lock:
            if not self._is_agreed():
                return 0
            self._last = None
            self._send_rest(own)
            self._is_closed = True
            is_final = self._is_final(own[-1])
            self._overlap.learn(self._arrived, is_final=is_final)
            return -self.number if is_final else 0

    def wait(self, over: float, *, are_right: bool) -> GradientRows | None:
        """When all instances have come to the end of the step: wait for what is on its way.

        Args:
            over: What the sums are divided by.
            are_right: Whether all have said that the sums are.

        Returns:
            The sums over the job divided by ``over``, in wide rows, if they are right.
        """
        was_sent, self._num_sent = self._num_sent > 0, 0
        if are_right:
            return self._overlap.finish(over)
        if was_sent:
            self._overlap.channel.wait()
        return None

    def end(self) -> None:
        """Let another step go early; send what the others still expect where this one was left. Never raises."""
        with self._lock:
            if self._is_over:
                return
            self._is_over, self._last = True, None
            if not self._is_closed and self._is_agreed():
                own = self._overlap.nodes[self._overlap.channel.instance_index]
                self._send_rest([self._overlap.sent] * len(own))
            elif self._announced is not None and self._unit is None and not self._is_refused:
                self._overlap.channel.break_off()  # the others may still agree, without this one
            if self._num_sent:
                self._overlap.leave_rows()
            self._overlap.channel.is_in_use = False

    def _arrive(self, parameter: Tensor) -> None:
        bucket = self._overlap.bucket_of.get(id(parameter))
        if bucket is not None and id(parameter) not in self._arrived:
            self._arrived.add(id(parameter))
            self._num_awaited[bucket] -= id(parameter) in self._overlap.expected

    def _is_agreed(self) -> bool:
        """Whether all instances have said that they send what this one does."""
        if self._unit is None and self._announced is not None and not self._is_refused:
            numbers = self._announced.peek()
            if numbers is not None:
                heaviest = as_floats([words[0] for words in numbers])
                self._is_refused = {words[1] for words in numbers} != {self.number} or not any(heaviest)
                if not self._is_refused:
                    self._unit = max(heaviest) if self._scales else 1.0
                    self._protected(self._overlap.expect)
        return self._unit is not None

    def _protected(self, do: Callable[[], None]) -> None:
        """Call ``do``; if interrupted, messages may have gone or not, so no instance sends early any more."""
        try:
            do()
        except BaseException:
            self._overlap.channel.break_off()
            raise

    def _send(self, own: Sequence[Tensor]) -> None:
        """Send the next bucket."""
        number = self._num_sent
        self._num_sent += 1
        self._protected(lambda: self._overlap.send(number, own))

    def _send_rest(self, own: Sequence[GradientRows]) -> None:
        for bucket in self._overlap.buckets[self._num_sent :]:
            self._send([node.rows[bucket.kind][bucket.run] for node in own])

    def _is_final(self, last: GradientRows) -> bool:
        """Whether what was sent early has the bits of ``last``."""
        starts = {bucket.kind: bucket.start for bucket in self._overlap.buckets[: self._num_early]}
        pairs = [
            (self._overlap.sent.rows[kind][start:], last.rows[kind][start:]) for kind, start in starts.items()
        ]
        return all(_have_same_bits(sent, own) for sent, own in pairs)


def _have_same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two rows are the same; one NaN is as good as another, of which torch's conversions make several."""
    if torch.equal(left.view(torch.int64), right.view(torch.int64)):  # slots begin at lines of cache, so rows fit
        return True
    bits = _BITS[left.dtype.itemsize]
    left_bits, right_bits = left.view(bits), right.view(bits)
    return bool(((left_bits == right_bits) | (left.isnan() & right.isnan())).all())
