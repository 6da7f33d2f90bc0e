"""The values that a program logs for each replica, combined as other libraries combine values of processes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from popdist.errors import BatchError
from popdist.job import context
from popdist.job.collectives import gather_json


@dataclass(frozen=True)
class LoggedValue:
    """A number that a program has logged for a batch of one replica.

    Attributes:
        size: The number of samples of the batch, if a mean over an epoch needs this number.
        is_shared: Whether the job logs one value of all replicas, and not a value of each instance.
        reduction: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"``.
    """

    value: Any
    size: int | None
    is_shared: bool
    reduction: str
    options: dict[str, Any]


Logs = dict[str, LoggedValue]
"""The logged values of one batch of one replica, by their names."""


def combine_logs(logs_of_replicas: Sequence[Logs]) -> Logs:
    """Combine the values that the program logged for one batch of each replica; all instances call the function.

    Args:
        logs_of_replicas: For each replica of this instance the logs of the replica's batch.

    Returns:
        For a shared value, the mean (sum, maximum, minimum) over all replicas, added in the order of the replicas,
        so that the result is bitwise equal for any number of instances. For another value that has a number of
        samples, the value of replica 0, because a callback may decide by this value, and all instances must decide
        alike. Otherwise the value of the first replica of this instance.

    Raises:
        BatchError: If two replicas have logged different names.
    """
    own = [
        {
            name: (it.value.item() if isinstance(it.value, Tensor) else it.value, it.size)
            for name, it in logs.items()
            if it.is_shared or it.size is not None  # a value with a size is for a mean over an epoch
        }
        for logs in logs_of_replicas
    ]
    names = own[0].keys()
    if not names:
        return logs_of_replicas[0]
    gathered = gather_json(context.data_parallel_group(), "combine the logged values of replicas", own)
    of_replicas = [values for of_instance in gathered for values in of_instance]
    for values in of_replicas:
        if values.keys() != names:
            raise BatchError(
                f"replicas have logged different names: {sorted(values)} and {sorted(names)}. With sync_dist=True "
                "or on_epoch=True, and in an evaluation, log the same names for each batch and on all ranks"
            )
    return {
        name: _combined(it, [values[name] for values in of_replicas[: None if it.is_shared else 1]])
        if name in names
        else it
        for name, it in logs_of_replicas[0].items()
    }


def _combined(first: LoggedValue, pairs: Sequence[tuple[float, int | None]]) -> LoggedValue:
    """Return ``first`` with the sum, minimum, maximum or weighted mean of ``pairs`` (value, number of samples)."""
    values, sizes = [value for value, _ in pairs], [size for _, size in pairs]
    num_samples = None if None in sizes else sum(map(int, sizes))  # type: ignore[arg-type]  # no None is left
    if first.reduction != "mean":
        combine: Any = {"sum": sum, "max": max, "min": min}[first.reduction]
        value = combine(values)
    elif num_samples and len(set(sizes)) > 1:
        value = sum(value * (size or 0) for value, size in pairs) / num_samples
    else:
        value = sum(values) / len(values)
    like = first.value if isinstance(first.value, Tensor) else torch.zeros(1, dtype=torch.float32, device="cpu")
    combined = torch.tensor(value, dtype=like.dtype, device=like.device)
    return replace(first, value=combined, size=num_samples)
