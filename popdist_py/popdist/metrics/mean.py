"""Exact means over the numbers of all instances, bitwise equal for any number of instances.

A floating-point sum depends on its order, and a program adds its losses in another order for each number of
instances. Here a sum is a whole number of units of 2^-1074, the smallest float above 0. Every float is a multiple
of this unit, so nothing is rounded before the mean is computed.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from popdist.errors import CollectiveError, name_instances
from popdist.job.collectives import gather_bytes, of_each_replica
from popdist.job.context import current_group

if TYPE_CHECKING:
    from torch import Tensor

Numbers: TypeAlias = "float | Tensor | Iterable[float | Tensor]"
"""A number, a tensor of numbers, or an iterable of numbers and tensors."""

_UNIT_EXPONENT: Final = 1074
"""The exponent of the unit of exact sums: the unit is 2 to the power of minus 1074."""


class _ExactSum:
    """A sum of floats and integers without rounding: a whole number of units of 2^-1074, the smallest float."""

    def __init__(self) -> None:
        self.num_units = 0
        self.infinite = 0.0

    def add(self, numbers: Sequence[float]) -> None:
        """Add the floats and integers ``numbers`` to the sum without rounding."""
        for number in numbers:
            if isinstance(number, int):
                self.num_units += number << _UNIT_EXPONENT
            elif math.isfinite(number):
                numerator, denominator = number.as_integer_ratio()  # the denominator is a power of 2
                self.num_units += numerator << (_UNIT_EXPONENT + 1 - denominator.bit_length())
            else:
                self.infinite += number

    def __str__(self) -> str:
        """Return the sum as text: a hexadecimal number of units, then the infinite part: 0.0, inf, -inf or nan."""
        return f"{self.num_units:x} {self.infinite}"

    def add_words(self, num_units: str, infinite: str) -> None:
        """Add the exact sum of another instance to this sum. The other instance sends its sum as two words: the
        finite part ``num_units``, a hexadecimal number of units, and ``infinite``, which is 0, inf, -inf or nan.
        """
        self.num_units += int(num_units, 16)
        self.infinite += float(infinite)


_NOTHING: Final = f"{_ExactSum()} {_ExactSum()}".split()
"""The text that an instance sends to the other instances if its total and its count are 0."""


def weighted_mean(total: Numbers, count: Numbers) -> float:
    """Return the sum of the totals of all instances, divided by the sum of the counts of all instances.

    The result is never a mean of means. ``weighted_mean(num_correct, num_samples)`` is the accuracy, and
    ``weighted_mean([loss.item() * len(x), ...], num_samples)`` is the loss per sample. All numbers are added
    without rounding, over all instances, and the quotient is rounded once. So the result is the same for any
    number of instances if the numbers are the same: give one total for each micro batch, in a list or tensor. If
    the program itself adds the totals of several micro batches, the sum is rounded and depends on the number of
    instances. :class:`Mean` takes one total after the other. If several instances share a replica, each replica
    counts once: with the numbers of its last instance that counted anything, such as the last stage of a pipeline.

    Args:
        total: Total of this instance: a number, a tensor of any shape, or a list of numbers and tensors, whose
            elements are all added. NaN and infinity make the mean NaN or infinity.
        count: Number of things that ``total`` sums up, in any unit; same types as ``total``, finite and at least
            0. An instance that saw nothing passes 0 for both.

    Returns:
        The same float on every instance.

    Raises:
        CollectiveError: If no instance counted anything, an instance makes another call, or an instance passes no
            number or a negative count; on every instance.
        NotInitializedError: Before ``popdist.init()``.
        BackendError: If an instance was lost or came too late.
    """
    mean = Mean()
    try:
        mean.add(total, count)
    except CollectiveError as error:
        fault = str(error).removeprefix("Mean.add")
        _gather("", "weighted_mean()", f"weighted_mean{fault}")
        raise
    return mean._over_all("weighted_mean()")  # noqa: SLF001 - the class is in this module


class Mean:
    """An exact mean over the numbers that all instances add, for a loss, an accuracy or another metric.

    ::

        loss = popdist.Mean()
        for batch in loader:
            for x, y in batch:
                loss.add(loss_fn(model(x), y) * len(x), len(x))
        print(loss.compute())

    Nothing is rounded when totals are added, so the order of the totals, and which instance adds a total, change
    no bit. Add one total for each micro batch, because a total that the program has added up over several is
    already rounded. Instances that share a replica count as in :func:`weighted_mean`.
    """

    def __init__(self) -> None:
        self._total = _ExactSum()
        self._count = _ExactSum()

    def add(self, total: Numbers, count: Numbers) -> None:
        """Add ``total``, the sum of ``count`` values, to this instance's part of the mean. No communication.

        Args:
            total: A number, a tensor of any shape, or a list of numbers and tensors, whose elements are all added.
            count: Same types as ``total``, finite and at least 0.

        Raises:
            CollectiveError: If an argument is no number, or a count is negative or not finite; nothing is added
                then.
        """
        try:
            totals, counts = _flat(total), _flat(count)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise CollectiveError(
                f"Mean.add({_shown(total)}, {_shown(count)}): expected numbers, tensors, or lists of them"
            ) from None
        if not all(0 <= number < math.inf for number in counts):
            raise CollectiveError(
                f"Mean.add({_shown(total)}, {_shown(count)}): expected a finite count of at least 0"
            )
        self._total.add(totals)
        self._count.add(counts)

    def compute(self) -> float:
        """Return the mean over all instances, the totals divided by the counts. All instances must call it.

        The call changes nothing, so more numbers may be added afterwards.

        Returns:
            The same float on every instance: the exact quotient, rounded once; infinity if it is too large.

        Raises:
            CollectiveError: If no instance counted anything, or an instance makes another call.
            NotInitializedError: Before ``popdist.init()``.
            BackendError: If an instance was lost or came too late.
        """
        return self._over_all("Mean.compute()")

    def _over_all(self, text: str) -> float:
        """Return the mean over all instances' sums. All instances call this; ``text`` names the call in errors."""
        total, count = _ExactSum(), _ExactSum()
        received = [sums.split() for sums in _gather(f"{self._total} {self._count}", text)]
        for place in of_each_replica(current_group(), [words != _NOTHING for words in received]):
            total.add_words(*received[place][:2])
            count.add_words(*received[place][2:])
        if not count.num_units:
            raise CollectiveError(f"{text}: the counts of all instances add up to 0, so there is no mean")
        if total.infinite:  # true also for NaN
            return total.infinite
        try:
            return total.num_units / count.num_units  # Python rounds a quotient of any size correctly
        except OverflowError:
            return math.inf if total.num_units > 0 else -math.inf


def _flat(numbers: object) -> list[float]:
    """Return all numbers in a number, tensor or nested list as one flat list of floats and integers."""
    if isinstance(numbers, float | int):
        return [numbers]
    if isinstance(numbers, str | bytes | dict | set):
        raise TypeError
    to_list: Any = getattr(numbers, "tolist", None)  # tensors, and arrays and numbers of numpy
    if to_list is not None:
        return _flat(to_list())
    if isinstance(numbers, Iterable):
        return [number for item in numbers for number in _flat(item)]
    try:
        return [operator.index(numbers)]  # type: ignore[arg-type] # a TypeError is caught
    except TypeError:
        return [float(numbers)]  # type: ignore[arg-type] # the caller catches errors


def _shown(numbers: object) -> str:
    """Return ``numbers`` as text for an error message; a long list or tensor is shown by its type."""
    text = repr(numbers)
    return text if len(text) <= 60 else f"a {type(numbers).__name__}"


def _gather(sums: str, text: str, fault: str | None = None) -> list[str]:
    """Return the sums of all instances as texts. Raise CollectiveError if an instance has sent no sums."""
    group = current_group()
    received = [data.decode() for data in gather_bytes(group, text, sums.encode())]
    refused = [instance for instance, it in zip(group.instances, received, strict=True) if not it]
    if refused:
        raise CollectiveError(
            fault or f"{text}: {name_instances(refused)} brought no numbers (see the error there)"
        )
    return received
