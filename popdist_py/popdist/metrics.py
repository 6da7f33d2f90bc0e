"""Numbers about the whole job from what each instance counted."""

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from popdist.collectives import DTYPES, exchange
from popdist.context import current_group
from popdist.errors import CollectiveError
from popdist.headers import name_instances
from popdist.queries import device

_REFUSED: Final = -1
"""Said in place of a description of the rows."""


def weighted_mean(total: float, count: float) -> float:
    """The mean over everything that all instances counted: the sum of totals divided by the sum of counts.

    It is exact whatever the split: never a mean of means. ``weighted_mean(loss_sum, num_samples)`` is the loss per
    sample, ``weighted_mean(num_correct, num_samples)`` the accuracy.

    Args:
        total: What this instance summed up.
        count: Over how many, in any unit; 0 on an instance that saw nothing, with a ``total`` of 0.

    Returns:
        The same float on every instance: both sums are rounded once, so it does not depend on their order.

    Raises:
        CollectiveError: If no instance counted anything, an instance makes another call, or what is given is no
            number or a negative count.
        NotInitializedError: Before ``popdist.init()``.
        BackendError: If an instance was lost or came too late.
    """
    try:
        bits = struct.unpack("=2q", struct.pack("=2d", float(total), float(count)))
    except (TypeError, ValueError):
        raise CollectiveError(f"weighted_mean({total!r}, {count!r}): expected two numbers") from None
    if not 0 <= count < math.inf:
        raise CollectiveError(f"weighted_mean({total!r}, {count!r}): expected a finite count of at least 0")
    gathered = exchange(bits, "weighted_mean()").wait()
    totals, counts = zip(*(struct.unpack("=2d", struct.pack("=2q", *pair)) for pair in gathered), strict=True)
    if not (num_counted := math.fsum(counts)):
        raise CollectiveError(
            f"weighted_mean: the counts {list(counts)} of all instances add up to 0: there is no mean"
        )
    return math.fsum(totals) / num_counted


def gather(rows: Tensor | Sequence[Tensor]) -> Tensor:
    """The rows of all instances, one instance after the other: predictions without duplicates, on every instance.

    Called once for each batch of ``data_loader``, it gives the rows of the step's samples in the order in which
    they were dealt, replica by replica; without shuffling that is the order of the dataset::

        for batch in popdist.data_loader(test, 64):
            predictions.append(popdist.gather([model(x).argmax(1) for x, _ in batch]))

    Rows gathered over several batches at once come instance by instance; gather ``torch.tensor(batch.indices)``
    too and sort by it.

    Args:
        rows: A tensor whose dim 0 counts samples, or several of them that are joined, one for each micro batch;
            none at all is legal. The instances may bring any number of rows, of the same shape and dtype.

    Returns:
        A new tensor, the same on every instance, without gradient. (A row of no instance's: an empty float32
        tensor of shape (0,).)

    Raises:
        CollectiveError: If the rows of the instances differ in shape or dtype, a tensor cannot be sent or has no
            rows (every instance raises it), or the instances do other things.
        NotInitializedError: Before ``popdist.init()``.
        BackendError: If an instance was lost or came too late.
    """
    group = current_group()
    parts = _as_list(rows)
    fault = _rows_fault(parts)
    mine = torch.cat([part.detach() for part in parts]) if parts and fault is None else None
    received = group.start("gather()", [_REFUSED] if fault else _describe(mine)).wait()
    kinds = dict(zip(group.instances, received, strict=True))
    _check_kinds(kinds, fault)
    brought = [kind for kind in received if kind]
    if not brought:
        return torch.empty(0)
    _, dtype, *shape = brought[0]
    most = max(kind[0] for kind in brought)
    place = device() if mine is None else mine.device
    sent = torch.zeros((most, *shape), dtype=DTYPES[dtype], device=place)
    if mine is not None:
        sent[: len(mine)] = mine
    gathered = group.backend.all_gather(sent)
    return torch.cat([row[: kind[0]] for row, kind in zip(gathered, received, strict=True) if kind])


def _as_list(rows: object) -> list[Any]:
    return list(rows) if isinstance(rows, Iterable) and not isinstance(rows, Tensor) else [rows]


def _describe(rows: Tensor | None) -> list[int]:
    """Number of rows, dtype and shape of a row; nothing for nothing."""
    return [] if rows is None else [len(rows), DTYPES.index(rows.dtype), *rows.shape[1:]]


def _rows_fault(parts: Sequence[object]) -> str | None:
    """Why these rows cannot be gathered, or None."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if others := [part for part in parts if not isinstance(part, Tensor)]:
        return f"expected a tensor or a list of them, and found a {type(others[0]).__name__}"
    for part in tensors:
        if part.layout is not torch.strided or part.dtype not in DTYPES:
            return f"expected dense tensors of one of the dtypes that can be sent, not {part.dtype}"
        if not part.dim():
            return "a tensor of shape () has no rows: keep one value for each sample"
    kinds = {(part.dtype, part.shape[1:], part.device) for part in tensors}
    return f"the micro batches' rows differ: {kinds}" if len(kinds) > 1 else None


def _check_kinds(kinds: dict[int, list[int]], fault: str | None) -> None:
    """Raise the same on every instance if one refuses its rows, or the rows differ."""
    if refused := [instance for instance, kind in kinds.items() if kind == [_REFUSED]]:
        raise CollectiveError(f"gather(): {fault or f'{name_instances(refused)} refused its rows (see there)'}")
    different = {tuple(kind[1:]): instance for instance, kind in kinds.items() if kind}
    if len(different) > 1:
        rows = ", ".join(
            f"{str(DTYPES[dtype]).removeprefix('torch.')}{list(shape)} on instance {instance}"
            for (dtype, *shape), instance in different.items()
        )
        raise CollectiveError(f"gather(): the rows of the instances differ: {rows}")
