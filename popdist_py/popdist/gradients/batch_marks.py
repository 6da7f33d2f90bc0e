"""What the instances tell each other of their batches when a step begins.

Batches of popdist's loaders are dealt, and those of one step belong together: all instances must bring them in the
same step. Other batches are the program's own: that several instances bring the same samples is worth a warning.
"""

import warnings
from collections.abc import Sequence
from typing import Final, NamedTuple

from popdist.errors import CollectiveError, PopdistWarning, name_instances
from popdist.groups import Group

_NOT_DEALT: Final = -1


class BatchMark(NamedTuple):
    """What tells the batch of an instance from those of others.

    Attributes:
        digest: Of its samples, where they are the program's own; 0 where they are not compared.
        epoch: That of the loader of popdist that has dealt it; -1 for the program's own.
        stop: The position in that epoch at which the next batch begins, over all replicas.
    """

    digest: int = 0
    epoch: int = _NOT_DEALT
    stop: int = 0


NO_MARK: Final = BatchMark()
"""Of a batch of which nothing is told."""


def refuse_other_steps(group: Group, marks: Sequence[BatchMark]) -> None:
    """Refuse batches that loaders have dealt in different steps.

    Raises:
        CollectiveError: If there are some; it says who brings which.
    """
    if marks.count(NO_MARK) == len(marks):
        return
    owners: dict[tuple[int, int], list[int]] = {}
    for instance, mark in zip(group.instances, marks, strict=True):
        if mark.epoch != _NOT_DEALT:
            owners.setdefault((mark.epoch, mark.stop), []).append(instance)
    if len(owners) > 1:
        brought = "; ".join(
            f"{name_instances(instances)}: epoch {epoch} up to position {stop}"
            for (epoch, stop), instances in owners.items()
        )
        raise CollectiveError(
            f"the instances bring batches of different steps of their loaders: {brought}. One has left out a "
            "batch that others have not, as by `continue` or after an exception that it alone has caught; has "
            "read a loader alone, or loaded its state; has made more steps with a batch, as LBFGS with a closure "
            "that returns a loss of its own; or they choose between loaders by chance. Do it alike on all "
            "instances"
        )


def warn_of_equal_batches(group: Group, marks: Sequence[BatchMark]) -> None:
    """Warn, on the first of them, of instances that bring the same samples."""
    own = marks[group.instances.index(group.backend.instance_index)].digest
    if not own:
        return
    equal = [it for it, mark in zip(group.instances, marks, strict=True) if mark.digest == own]
    if len(equal) > 1 and equal[0] == group.backend.instance_index:
        warnings.warn(
            f"{name_instances(equal)} train on the same samples in this step: what draws the batches, such as a "
            "torch DataLoader with shuffle=True, gives all of the data to each instance. Have it dealt: "
            "popdist.data_loader(dataset, micro_batch_size, shuffle=True)",
            PopdistWarning,
            stacklevel=2,
        )
