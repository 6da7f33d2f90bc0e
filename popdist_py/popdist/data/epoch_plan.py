"""Which samples of an epoch each replica sees in each step: index arithmetic on positions, nothing else.

An epoch is the positions 0 to n - 1 of its (shuffled) order. A step takes the next block of them, and
`popdist.dealing` deals it to the replicas. So what replica r sees in step s follows from the job's replicas and
never from the instances they are dealt to, and each position belongs to one replica of one step.

A position is also all there is to remember of an unfinished epoch: what comes before it was seen, whatever the
number of replicas that saw it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from popdist.dealing import parts


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """The steps of an epoch over ``length`` samples.

    Every step is full but the last ones: without ``drop_last`` the remainder is a smaller step. A remainder with
    fewer samples than replicas takes some from the step before, so that every replica has at least one sample in
    every step. (Where full steps hold only one sample a replica, there is none to take: the remainder joins the
    step before, and some of its replicas see two.)

    Attributes:
        length: Samples in the dataset. At least 0.
        num_replicas: Replicas in the job. At least 1.
        samples_per_replica: Samples of one replica in a full step: micro batch size times accumulation.
        drop_last: Leave out a remainder smaller than a full step.
    """

    length: int
    num_replicas: int
    samples_per_replica: int
    drop_last: bool = False

    @property
    def samples_per_step(self) -> int:
        """Samples of a full step, over all replicas."""
        return self.num_replicas * self.samples_per_replica

    def num_steps(self, position: int = 0) -> int:
        """Steps from ``position`` to the end of the epoch."""
        full, rest = divmod(max(self.length - position, 0), self.samples_per_step)
        has_own_step = rest and not self.drop_last and (self.samples_per_replica > 1 or not full)
        return full + bool(has_own_step)

    def steps(self, position: int = 0) -> Iterator[range]:
        """The positions of each step from ``position`` on, over all replicas."""
        while (size := self._step_size(self.length - position)) > 0:
            yield range(position, position + size)
            position += size

    def positions_of(self, replicas: range, step: range) -> range:
        """The positions of ``step`` that consecutive ``replicas`` see, first replica first; may be empty."""
        return parts(step, replicas, self.num_replicas)

    def _step_size(self, remaining: int) -> int:
        full = self.samples_per_step
        if remaining < full:
            return 0 if self.drop_last else remaining
        if self.drop_last or not full < remaining < full + self.num_replicas:
            return full
        return remaining if self.samples_per_replica == 1 else remaining - self.num_replicas
