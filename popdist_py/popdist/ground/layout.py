"""Which replicas each instance owns, and which samples each replica gets. Pure arithmetic.

An instance owns consecutive replicas, and a host consecutive instances. Samples are dealt in consecutive parts, as
``torch.tensor_split`` cuts: so it makes no difference whether a step is dealt to all replicas at once, or first to
the instances and then to the replicas of each.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLayout:
    """How ``num_replicas`` model replicas are dealt to ``num_instances`` processes, to each as many."""

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
        """Replicas that each instance owns; the same for every instance."""
        return self.num_replicas // self.num_instances

    def replicas_of(self, instance: int) -> range:
        """Global indices of the replicas that ``instance`` owns, in local order."""
        if not 0 <= instance < self.num_instances:
            raise ValueError(f"instance {instance} is not one of 0 to {self.num_instances - 1}")
        first = instance * self.num_local_replicas
        return range(first, first + self.num_local_replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How the instances of one replica share its model: ``pipeline`` stages, each cut into ``tensor`` shards.

    A replica's instances stand in a row, those of one stage next to each other.

    Raises:
        ValueError: If a number is below 1, or stages and shards are not as many as the instances.
    """

    instances_per_replica: int = 1  # 1: each instance holds whole replicas, one or several
    tensor: int = 1  # instances that share each layer
    pipeline: int = 1  # stages that share the layers
    """Both are 1 where the program makes a mesh of its own."""

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
        """Whether a replica has several instances."""
        return self.instances_per_replica > 1

    @property
    def has_mesh(self) -> bool:
        """Whether it is known how the instances of a replica share it."""
        return self.tensor * self.pipeline == self.instances_per_replica

    def part_of(self, instance: int) -> "ReplicaPart":
        """Which part of which replica ``instance`` of the job holds."""
        replica, index = divmod(instance, self.instances_per_replica)
        stage, shard = divmod(index, self.tensor)
        return ReplicaPart(replica=replica, index=index, stage=stage, shard=shard)

    def stage_of(self, instance: int) -> range:
        """The instances that share the layers of ``instance``; where the program makes the mesh, its replica's."""
        size = self.tensor if self.has_mesh else self.instances_per_replica
        first = instance - instance % size
        return range(first, first + size)

    def place_of(self, instance: int) -> dict[str, int]:
        """The replica of ``instance`` and its place in it, by name; empty where no replica is shared."""
        part = self.part_of(instance)
        if not self.is_shared:
            return {}
        if not self.has_mesh:
            return {"replica": part.replica, "part": part.index}
        return {"replica": part.replica, "stage": part.stage, "shard": part.shard}

    def describe(self, instances: Iterable[int]) -> str:
        """What the places of ``instances`` have in common: ``replica 0, stage 1, shard 0`` for a single one."""
        first, *others = map(self.place_of, instances)
        common = [word for word in first.items() if all(word in place.items() for place in others)]
        return ", ".join(f"{name} {number}" for name, number in common)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPart:
    """The part of a replica that one of its instances holds; ``index`` alone, where the program makes the mesh."""

    replica: int
    index: int  # this instance among those of its replica
    stage: int  # of the pipeline
    shard: int  # of the stage's tensors


def part(row: range, index: int, num_parts: int) -> range:
    """Part ``index`` of ``row`` dealt to ``num_parts``; empty when the parts are more than the things."""
    return parts(row, range(index, index + 1), num_parts)


def parts(row: range, indices: range, num_parts: int) -> range:
    """The consecutive parts ``indices`` of ``row`` dealt to ``num_parts``, joined to one range."""
    return row[_start(len(row), indices.start, num_parts) : _start(len(row), indices.stop, num_parts)]


@lru_cache(maxsize=64)
def micro_batch_rows(num_samples: int, num_replicas: int, accumulation: int) -> tuple[range, ...]:
    """The samples of each micro batch, replica by replica; the last are empty where there are few samples."""
    samples = range(num_samples)
    shares = [part(samples, replica, num_replicas) for replica in range(num_replicas)]
    return tuple(part(share, index, accumulation) for share in shares for index in range(accumulation))


def _start(size: int, index: int, num_parts: int) -> int:
    base, larger = divmod(size, num_parts)
    return index * base + min(index, larger)
