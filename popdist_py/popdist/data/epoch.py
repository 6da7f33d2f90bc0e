"""The steps of one epoch as the dataset's indices: positions dealt to replicas, looked up in the epoch's order."""

from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any, Final

import numpy as np
from torch.utils.data import IterableDataset

from popdist.arguments import whole_number
from popdist.data.epoch_plan import EpochPlan
from popdist.data.permutation import Permutation
from popdist.data.position import Progress
from popdist.errors import DatasetError

LOOKUP_SIZES: Final = (256, 16384)
"""Samples looked up in the permutation at once: few at first, so that an epoch starts at once, soon so many that
numpy's cost for each call does not show."""

_GROWTH: Final = 8
"""How many times more samples each lookup is than the one before it."""


def plan_epochs(
    length_or_dataset: int | Sized,
    num_replicas: int,
    micro_batch_size: int,
    accumulation: int,
    *,
    drop_last: bool,
) -> EpochPlan:
    """How the epochs of a dataset are dealt to the replicas of the job.

    Raises:
        DatasetError: If the dataset has no length or fewer samples than the job has replicas, a size is below 1,
            or ``drop_last`` leaves no step at all, so that a loop over it would never run.
    """
    check_sizes(micro_batch_size, accumulation)
    plan = EpochPlan(
        length=_length(length_or_dataset, num_replicas),
        num_replicas=num_replicas,
        samples_per_replica=micro_batch_size * accumulation,
        drop_last=drop_last,
    )
    if not plan.num_steps():
        raise DatasetError(
            f"drop_last=True leaves nothing of {plan.length} samples: a step takes {plan.samples_per_step} "
            f"({num_replicas} replicas x {micro_batch_size} samples x accumulation {accumulation}), so choose "
            "smaller ones or keep the last"
        )
    return plan


def check_sizes(micro_batch_size: int, accumulation: int) -> None:
    """Refuse sizes that no step can have.

    Raises:
        DatasetError: If one is no whole number or below 1.
    """
    whole_number("micro_batch_size", micro_batch_size, DatasetError)
    whole_number("accumulation", accumulation, DatasetError)


def deal_epoch(plan: EpochPlan, replicas: range, progress: Progress) -> Iterator[tuple[range, list[int]]]:
    """The rest of the epoch in which ``progress`` stands when this is called, step by step.

    Args:
        plan: How the epoch is dealt.
        replicas: Consecutive replicas, by their job-wide numbers.
        progress: Tells epoch, position and order; what becomes of it later plays no part.

    Returns:
        For each step its positions, over all replicas of the job, and the dataset's indices of the samples that
        ``replicas`` see, first replica first.
    """
    order = None
    if progress.identity["shuffle"]:
        order = Permutation(plan.length, seed=progress.identity["seed"], epoch=progress.epoch)
    return _dealt(plan, replicas, plan.steps(progress.position), order)


def _dealt(
    plan: EpochPlan, replicas: range, steps: Iterator[range], order: Permutation | None
) -> Iterator[tuple[range, list[int]]]:
    size, largest = (max(1, size // (plan.samples_per_replica * len(replicas))) for size in LOOKUP_SIZES)
    while ahead := list(islice(steps, size)):
        shares = [plan.positions_of(replicas, step) for step in ahead]
        indices = iter(_look_up(shares, order))
        for step, share in zip(ahead, shares, strict=True):
            yield step, list(islice(indices, len(share)))
        size = min(_GROWTH * size, largest)


def _look_up(shares: list[range], order: Permutation | None) -> list[int]:
    """The dataset's indices at the positions of all ``shares``, in one row."""
    arrays = [np.arange(share.start, share.stop, dtype=np.int64) for share in shares]
    positions = np.concatenate(arrays)
    indices: list[int] = (positions if order is None else order.indices(positions)).tolist()
    return indices


def _length(length_or_dataset: Any, num_replicas: int) -> int:  # noqa: ANN401 - what was given, checked here
    if isinstance(length_or_dataset, IterableDataset):
        raise DatasetError(
            f"{type(length_or_dataset).__name__} is a stream, which has no samples at indices: give it to "
            "popdist.data_loader as popdist.shard_iterable(stream)"
        )
    try:
        is_length = isinstance(length_or_dataset, int) and not isinstance(length_or_dataset, bool)
        length: int = length_or_dataset if is_length else len(length_or_dataset)
    except (TypeError, NotImplementedError) as error:
        raise DatasetError(
            f"{type(length_or_dataset).__name__} has no length: pass a number or a map-style dataset, and give a "
            "stream to popdist.data_loader as popdist.shard_iterable(stream)"
        ) from error
    if length < 1:
        raise DatasetError(f"a dataset of {length} samples has nothing to deal: look at where it is made")
    if length < num_replicas:
        raise DatasetError(
            f"a dataset of {length} samples is shorter than the job's {num_replicas} replicas, so some would "
            f"never have a sample: use at most --num-replicas {length}"
        )
    return length
