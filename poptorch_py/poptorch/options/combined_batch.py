"""`CombinedBatch`: how many micro batches one call of a model takes, in which order, and who shares them."""

from dataclasses import dataclass
from typing import Self

from poptorch.enums import CommGroupType
from poptorch.errors import Error
from poptorch.options.model_options import Options


@dataclass(frozen=True, kw_only=True)
class CombinedBatch:
    """The micro batches of one call on this process: by device iteration, step of accumulation, then replica."""

    num_iterations: int  # device iterations. At least 1
    num_accumulations: int  # micro batches of a replica in a step of the optimizer. At least 1
    num_replicas: int  # replicas of this process. At least 1
    group_size: int  # replicas that get the same samples
    group_type: CommGroupType  # whether these are consecutive ones, or every so many

    def __post_init__(self) -> None:
        if self.num_replicas % self.group_size:
            raise Error(
                f"replicationFactor({self.num_replicas}) is no multiple of the input groups' size, "
                f"{self.group_size}"
            )

    @classmethod
    def of(cls, options: Options) -> Self:
        """What ``options`` say."""
        return cls(
            num_iterations=options.device_iterations,
            num_accumulations=options.Training.gradient_accumulation,
            num_replicas=options.replication_factor,
            group_size=options.input_group_size,
            group_type=options.input_group_type,
        )

    @property
    def num_parts(self) -> int:
        """How many equal parts dim 0 of an input has."""
        return self.num_iterations * self.num_accumulations * (self.num_replicas // self.group_size)

    @property
    def part_of_each(self) -> tuple[int, ...]:
        """The part that each micro batch gets, for all replicas of all steps in order."""
        num_groups = self.num_replicas // self.group_size
        is_strided = self.group_type is CommGroupType.Orthogonal
        groups = [
            replica % num_groups if is_strided else replica // self.group_size
            for replica in range(self.num_replicas)
        ]
        steps = range(self.num_iterations * self.num_accumulations)
        return tuple(step * num_groups + group for step in steps for group in groups)
