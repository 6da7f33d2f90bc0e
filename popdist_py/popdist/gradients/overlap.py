"""Adding gradients over the instances while the backward pass that makes them still runs, bucket by bucket.

Where the sum goes over a network or between GPUs, its time is hidden behind the rest of the last backward pass of
a step. What an instance sends early is a copy, made as the end of the step would make it; its own gradients stay
as they are. At the end it compares the two, bit by bit, and says whether what it has sent is what it should have:
when all have, the sum is there, and else they add once more as if nothing had been sent. So whatever a program
does to its gradients before a micro batch is over, the sum is right.

A step goes early only if all instances have said, in its first header, that they would, and how: a number tells
the buckets and how many have been sent before. From then on each of them brings every bucket of the step, whatever
becomes of it, because the others wait for them.
"""

import hashlib
from collections.abc import Sequence

from torch import Tensor

from popdist.comm.channel import Channel
from popdist.gradients.buckets import Bucket, digest_of, make_buckets
from popdist.gradients.exchange import add_among, nodes_of
from popdist.gradients.flat_gradients import FlatGradients, GradientRows
from popdist.layout import ReplicaLayout


class Overlap:
    """What stays from step to step.

    Args:
        channel: Between all instances of the job.
        layout: Which replicas each of them owns.
        gradients: Of one model.
    """

    def __init__(self, channel: Channel, layout: ReplicaLayout, gradients: FlatGradients) -> None:
        self.channel = channel
        self.layout = layout
        self.gradients = gradients
        self.buckets = make_buckets(gradients.kinds)
        self._digest = digest_of(self.buckets)
        members = {index: parameter for kind in gradients.kinds for index, parameter, _ in kind.members}
        self.bucket_of = {id(members[index]): k for k, it in enumerate(self.buckets) for index in it.members}
        self.members = [[members[index] for index in it.members] for it in self.buckets]
        self.expected: set[int] = set()
        """Parameters that have got a gradient in a last micro batch, by their identity; none in the beginning."""
        self._nodes = [nodes_of(layout, instance) for instance in range(layout.num_instances)]
        self._has_given_up = False
        self._rows: tuple[GradientRows, GradientRows] | None = None

    @property
    def published(self) -> GradientRows:
        """What this instance has sent early."""
        return self._both()[0]

    @property
    def sums(self) -> GradientRows:
        """The sums over the job."""
        return self._both()[1]

    def num_expected(self) -> list[int]:
        """For each bucket, how many of its parameters will get a gradient; more where nothing is known."""
        return [sum(id(it) in self.expected for it in members) + (not self.expected) for members in self.members]

    def _both(self) -> tuple[GradientRows, GradientRows]:
        if self._rows is None:
            self._rows = (self.gradients.make_rows(), self.gradients.make_rows())
        return self._rows

    def offer(self) -> int:
        """What to say when a step begins: what would be sent early, or 0 where this instance will not."""
        if self._has_given_up or self.channel.is_taken or self.channel.is_broken or not self.buckets:
            return 0
        try:
            self._both()
        except (RuntimeError, MemoryError):
            self._has_given_up = True
            return 0
        issued = self.channel.num_issued.to_bytes(8, "little")
        number = hashlib.blake2b(self._digest + issued, digest_size=7).digest()
        return 1 + int.from_bytes(number, "little")

    def issue(self, bucket: Bucket, partials: Sequence[Tensor]) -> None:
        """Have a bucket added over the job."""
        nodes, num_replicas, channel = self._nodes, self.layout.num_replicas, self.channel
        into = self.sums.rows[bucket.kind][bucket.run]

        def add() -> None:
            add_among(channel, nodes, partials, num_replicas, into)

        channel.issue(add, [*partials, into])

    def learn(self, arrived: set[int], *, is_final: bool) -> None:
        """A step has ended.

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
