"""What a loop may hand to ``micro_batches``, and the micro batches that it means.

A nest of tensors is cut along dim 0. A loader's batch brings its micro batches with it. Anything else is cut by a
function of the program's own. In each case a micro batch weighs the samples it holds, unless the program says what
it weighs, as the tokens of a sequence model do.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from popdist.arguments import as_float, whole_number
from popdist.errors import BatchError
from popdist.training.combined_batch import Nest, count_samples, micro_batch_rows, take

Split = Callable[[Nest], Sequence[Nest]]
"""Gives this instance's micro batches of a batch, replica by replica; None for one without samples."""


class MicroBatch(NamedTuple):
    """One forward and backward pass.

    Attributes:
        weight: What its gradient counts in the mean. At least 0.
        content: What the loop gets; None when there is nothing to compute.
    """

    weight: float
    content: Nest


class Splitting(NamedTuple):
    """This instance's part of one step.

    Attributes:
        accumulation: Micro batches of each local replica.
        micro_batches: Of each local replica in turn.
    """

    accumulation: int
    micro_batches: list[MicroBatch]


def split_batch(
    batch: Nest,
    num_replicas: int,
    accumulation: int,
    *,
    split: Split | None = None,
    weights: Sequence[float] | None = None,
) -> Splitting:
    """The micro batches of ``batch``; each weighs its samples, unless ``weights`` says more.

    Args:
        batch: A nest of tensors, an object with an attribute ``micro_batches`` such as the batch of a loader of
            popdist, or anything that ``split`` understands.
        num_replicas: Local replicas.
        accumulation: Micro batches of each; 1 also stands for the number that a loader's batch has.
        split: Gives ``num_replicas x accumulation`` micro batches; ``list`` for a list of them.
        weights: One number for each micro batch, at least 0.

    Raises:
        BatchError: If the batch cannot be split so, a weight is not possible, or the numbers do not fit.
    """
    accumulation = whole_number("accumulation", accumulation, BatchError)
    if split is None and hasattr(batch, "micro_batches"):
        accumulation, found = _read_loaders(batch, num_replicas, accumulation)
    elif split is None:
        found = _cut(batch, num_replicas, accumulation)
    else:
        contents = _apply(split, batch)
        _expect(len(contents), "split gave {} micro batches", num_replicas, accumulation)
        found = [_weighed(content, is_weighed=weights is not None) for content in contents]
    if weights is not None:
        if not isinstance(weights, Iterable):
            raise BatchError(f"weights={weights!r} must be a list of numbers, one for each micro batch")
        weights = list(weights)
        _expect(len(weights), "there are {} weights", num_replicas, accumulation)
        pairs = zip(found, weights, strict=True)
        found = [MicroBatch(check_weight(weight), it.content) for it, weight in pairs]
        if idle := [index for index, it in enumerate(found) if it.content is None and it.weight]:
            raise BatchError(f"micro batch {idle[0]} weighs {found[idle[0]].weight}, but it has no samples")
    return Splitting(accumulation, found)


def check_weight(weight: float) -> float:
    """``weight`` as a float.

    Raises:
        BatchError: If it is negative or not finite.
    """
    if not 0 <= as_float(weight) < math.inf:
        raise BatchError(f"weight {weight!r} is not possible: a micro batch weighs a finite number from 0 up")
    return float(weight)


def _apply(split: Split, batch: Nest) -> list[Nest]:
    """What the program's own ``split`` makes of ``batch``."""
    if not callable(split):
        raise BatchError(f"split={split!r} must be a function that gives the micro batches of a batch")
    contents = split(batch)
    if not isinstance(contents, Iterable):
        raise BatchError(
            f"split gave a {type(contents).__name__}, and not this instance's micro batches as a list"
        )
    return list(contents)


def _cut(batch: Nest, num_replicas: int, accumulation: int) -> list[MicroBatch]:
    num_samples = count_samples(batch)
    if num_samples and num_replicas * accumulation == 1:
        return [MicroBatch(num_samples, batch)]
    rows_of_replicas = micro_batch_rows(num_samples, num_replicas, accumulation)
    return [
        MicroBatch(len(rows), take(batch, rows) if rows else None)
        for replica in rows_of_replicas
        for rows in replica
    ]


def _weighed(content: Nest, *, is_weighed: bool) -> MicroBatch:
    """``content`` with its samples as its weight; with weights to come, it need not be a nest of tensors."""
    if content is None:
        return MicroBatch(0.0, None)
    if is_weighed:
        return MicroBatch(1.0, content)
    num_samples = count_samples(content)
    return MicroBatch(num_samples, content if num_samples else None)


def _read_loaders(batch: Nest, num_replicas: int, accumulation: int) -> tuple[int, list[MicroBatch]]:
    found = [MicroBatch(it[2], it[3] if it[2] else None) for it in batch.micro_batches]
    if accumulation == 1:
        accumulation = max(1, len(found) // num_replicas)
    _expect(len(found), "the batch has {} micro batches", num_replicas, accumulation)
    return accumulation, found


def _expect(number: int, what: str, num_replicas: int, accumulation: int) -> None:
    if number != num_replicas * accumulation:
        raise BatchError(
            f"{what.format(number)}, and this step needs {num_replicas * accumulation}: "
            f"{num_replicas} local replicas x accumulation {accumulation}"
        )
