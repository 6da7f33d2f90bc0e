"""Which replicas each instance owns, and which samples each replica gets. Pure arithmetic.

An instance owns consecutive replicas, and a host consecutive instances. Samples are dealt in consecutive parts, as
``torch.tensor_split`` cuts: so it makes no difference whether a step is dealt to all replicas at once, or first to
the instances and then to the replicas of each.
"""

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
