"""The assignment of replicas to instances, and of samples to replicas. Pure arithmetic.

An instance owns consecutive replicas, and a host has consecutive instances. Samples are dealt in consecutive
parts, as by ``torch.tensor_split``. So the samples of a step can be dealt to all replicas at once, or first to the
instances and then to the replicas of each instance, with the same result.
"""

import dataclasses
from collections.abc import Iterable
from functools import lru_cache

from popdist.ground.values import dataclass


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)  # compiled: each step makes some
class ReplicaLayout:
    """The assignment of ``num_replicas`` model replicas to ``num_instances`` processes, equally many to each."""

    num_instances: int  # processes in the job (torch's world size). At least 1
    num_replicas: int  # model replicas in the whole job. A multiple of ``num_instances``

    def __post_init__(self) -> None:
        if self.num_instances < 1 or self.num_replicas < 1:
            raise ValueError(
                f"num_instances={self.num_instances} and num_replicas={self.num_replicas} must both be at least 1"
            )
        if self.num_replicas % self.num_instances:
            raise ValueError(
                f"num_replicas={self.num_replicas} does not divide over num_instances={self.num_instances}"
            )

    @property
    def num_local_replicas(self) -> int:
        """Number of replicas that each instance owns; equal for every instance."""
        return self.num_replicas // self.num_instances

    def replicas_of(self, instance: int) -> range:
        """Return the job-wide numbers of the replicas that ``instance`` owns, ascending."""
        if not 0 <= instance < self.num_instances:
            raise ValueError(f"instance {instance} is not one of 0 to {self.num_instances - 1}")
        first = instance * self.num_local_replicas
        return range(first, first + self.num_local_replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """The division of one replica's model over its instances: ``pipeline`` stages, each with ``tensor`` shards.

    The instances of a replica have consecutive indices, and so have the instances of a stage.

    Raises:
        ValueError: If a number is below 1, or stages times shards is not the number of instances.
    """

    instances_per_replica: int = 1  # 1: each instance holds one or several whole replicas
    tensor: int = 1  # instances that share each layer
    pipeline: int = 1  # stages that share the layers
    """``tensor`` and ``pipeline`` are both 1 if the program makes its own device mesh."""

    def __post_init__(self) -> None:
        if min(self.instances_per_replica, self.tensor, self.pipeline) < 1:
            raise ValueError(f"{self} must have no number below 1")
        if self.tensor * self.pipeline not in (1, self.instances_per_replica):
            raise ValueError(
                f"tensor={self.tensor} times pipeline={self.pipeline} must be the "
                f"{self.instances_per_replica} instances of a replica"
            )

    @property
    def is_shared(self) -> bool:
        """Whether several instances share one replica."""
        return self.instances_per_replica > 1

    @property
    def has_mesh(self) -> bool:
        """Whether the numbers of pipeline stages and tensor shards are known."""
        return self.tensor * self.pipeline == self.instances_per_replica

    def part_of(self, instance: int) -> "ReplicaPart":
        """Return the part of a replica, with its stage and shard, that ``instance`` of the job holds."""
        replica, index = divmod(instance, self.instances_per_replica)
        stage, shard = divmod(index, self.tensor)
        return ReplicaPart(replica=replica, index=index, stage=stage, shard=shard)

    def stage_of(self, instance: int) -> range:
        """Return the instances of ``instance``'s pipeline stage; without stages, the instances of its replica."""
        size = self.tensor if self.has_mesh else self.instances_per_replica
        first = instance - instance % size
        return range(first, first + size)

    def place_of(self, instance: int) -> dict[str, int]:
        """Return replica, stage and shard number of ``instance``, by name; {} if instances share no replica."""
        part = self.part_of(instance)
        if not self.is_shared:
            return {}
        if not self.has_mesh:
            return {"replica": part.replica, "part": part.index}
        return {"replica": part.replica, "stage": part.stage, "shard": part.shard}

    def describe(self, instances: Iterable[int]) -> str:
        """Return in words the replica, stage and shard that all ``instances`` share, such as ``replica 0``."""
        first, *others = map(self.place_of, instances)
        common = [word for word in first.items() if all(word in place.items() for place in others)]
        return ", ".join(f"{name} {number}" for name, number in common)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)  # compiled: each step makes some
class ReplicaPart:
    """The part of a replica that one instance holds; if a program has its own mesh, ignore stage and shard."""

    replica: int
    index: int  # index of this instance among the instances of the replica
    stage: int  # number of the pipeline's stage
    shard: int  # number of the shard of the stage's tensors


def part(row: range, index: int, num_parts: int) -> range:
    """Cut the range ``row`` into ``num_parts`` parts, and return the part with the ``index``; it may be empty."""
    return parts(row, range(index, index + 1), num_parts)


def parts(row: range, indices: range, num_parts: int) -> range:
    """Cut the range ``row`` into ``num_parts`` parts, and return the parts ``indices`` as one range."""
    return row[_start(len(row), indices.start, num_parts) : _start(len(row), indices.stop, num_parts)]


@lru_cache(maxsize=64)
def micro_batch_rows(num_samples: int, num_replicas: int, accumulation: int) -> tuple[range, ...]:
    """Return which samples of a step each micro batch gets, replica by replica; the last ranges may be empty."""
    samples = range(num_samples)
    shares = [part(samples, replica, num_replicas) for replica in range(num_replicas)]
    return tuple(part(share, index, accumulation) for share in shares for index in range(accumulation))


def _start(size: int, index: int, num_parts: int) -> int:
    base, larger = divmod(size, num_parts)
    return index * base + min(index, larger)
