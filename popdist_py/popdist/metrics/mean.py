"""Means over everything that the instances of a job counted, exact for any split.

A floating-point sum depends on its order, and a program that adds up its losses adds them in another order for
each split. Here a sum is a whole number of units of 2^-1074, the smallest float above 0, of which every float is
a multiple: nothing is rounded before the mean is taken.
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
"""A number, a tensor of numbers, or several of them."""

_UNIT_EXPONENT: Final = 1074
"""A unit of the exact sums is 2 to the power of minus this."""


class _ExactSum:
    """The exact sum of floats and integers."""

    def __init__(self) -> None:
        self.num_units = 0
        self.infinite = 0.0

    def add(self, numbers: Sequence[float]) -> None:
        """Add ``numbers``, which are floats and integers."""
        for number in numbers:
            if isinstance(number, int):
                self.num_units += number << _UNIT_EXPONENT
            elif math.isfinite(number):
                numerator, denominator = number.as_integer_ratio()  # the latter is a power of 2
                self.num_units += numerator << (_UNIT_EXPONENT + 1 - denominator.bit_length())
            else:
                self.infinite += number

    def __str__(self) -> str:
        """The sum in two words, without rounding, for :meth:`add_words`."""
        return f"{self.num_units:x} {self.infinite}"

    def add_words(self, num_units: str, infinite: str) -> None:
        """Add the sum of another instance."""
        self.num_units += int(num_units, 16)
        self.infinite += float(infinite)


_NOTHING: Final = f"{_ExactSum()} {_ExactSum()}".split()
"""What an instance brings that has added nothing, or zeros."""


def weighted_mean(total: Numbers, count: Numbers) -> float:
    """The mean over everything that all instances counted: the sum of all totals divided by the sum of all counts.

    Never a mean of means. ``weighted_mean(num_correct, num_samples)`` is the accuracy, and
    ``weighted_mean([loss.item() * len(x), ...], num_samples)`` the loss per sample. All that is given here is
    added without rounding, over all instances, and the quotient is rounded once. So it is the same for every
    split if the numbers are: give one total for each micro batch, in a list or tensor. A total of several micro
    batches that the program added up itself was rounded on the way, in another order for every split.
    :class:`Mean` takes one total after the other. Where several instances share a replica, each replica counts
    once: what the last of its instances gave that counted anything, as the last stage of a pipeline.

    Args:
        total: What this instance summed up: a number, a tensor of any shape, or a list of these, whose elements
            are all added. NaN and infinity make the mean NaN or infinity.
        count: Over how many, in any unit: as ``total``, finite and at least 0. 0 on an instance that saw nothing,
            with a ``total`` of 0.

    Returns:
        The same float on every instance.

    Raises:
        CollectiveError: If no instance counted anything, an instance makes another call, or what one gave is no
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
    return mean._over_all("weighted_mean()")  # noqa: SLF001 - of this module


class Mean:
    """The exact mean over what all instances add to it; for a loss, an accuracy or any other metric.

    ::

        loss = popdist.Mean()
        for batch in loader:
            for x, y in batch:
                loss.add(loss_fn(model(x), y) * len(x), len(x))
        print(loss.compute())

    Nothing is rounded when totals are added, so their order, and which instance adds which of them, change no bit.
    Add one total for each micro batch: one that the program has added up over several was rounded on the way.
    Instances that share a replica count as in :func:`weighted_mean`.
    """

    def __init__(self) -> None:
        self._total = _ExactSum()
        self._count = _ExactSum()

    def add(self, total: Numbers, count: Numbers) -> None:
        """Add ``total``, which was summed up over ``count``, on this instance; there is no exchange.

        Args:
            total: A number, a tensor of any shape, or a list of these, whose elements are all added.
            count: As ``total``, finite and at least 0.

        Raises:
            CollectiveError: If one is no number, or a count is negative or not finite; then nothing is added.
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
        """The sum of the totals of all instances divided by the sum of their counts; every instance calls it.

        It changes nothing: more may be added afterwards.

        Returns:
            The same float on every instance: the exact quotient, rounded once; an infinity if it is too large.

        Raises:
            CollectiveError: If no instance counted anything, or one makes another call.
            NotInitializedError: Before ``popdist.init()``.
            BackendError: If an instance was lost or came too late.
        """
        return self._over_all("Mean.compute()")

    def _over_all(self, text: str) -> float:
        """Exchange the sums in the call ``text``, and return the mean over all instances."""
        total, count = _ExactSum(), _ExactSum()
        received = [sums.split() for sums in _gather(f"{self._total} {self._count}", text)]
        for place in of_each_replica(current_group(), [words != _NOTHING for words in received]):
            total.add_words(*received[place][:2])
            count.add_words(*received[place][2:])
        if not count.num_units:
            raise CollectiveError(f"{text}: the counts of all instances add up to 0, so there is no mean")
        if total.infinite:  # NaN is, too
            return total.infinite
        try:
            return total.num_units / count.num_units  # which Python rounds correctly, however large they are
        except OverflowError:
            return math.inf if total.num_units > 0 else -math.inf


def _flat(numbers: object) -> list[float]:
    """All numbers in ``numbers``, as floats and integers."""
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
        return [operator.index(numbers)]  # type: ignore[arg-type] # raises what is caught
    except TypeError:
        return [float(numbers)]  # type: ignore[arg-type] # raises what the caller catches


def _shown(numbers: object) -> str:
    """``numbers`` as text for a message; a long list or tensor is shown by its type."""
    text = repr(numbers)
    return text if len(text) <= 60 else f"a {type(numbers).__name__}"


def _gather(sums: str, text: str, fault: str | None = None) -> list[str]:
    """The sums of all instances, or an error if one brings none, which is ``fault`` on that one."""
    group = current_group()
    received = [data.decode() for data in gather_bytes(group, text, sums.encode())]
    refused = [instance for instance, it in zip(group.instances, received, strict=True) if not it]
    if refused:
        raise CollectiveError(
            fault or f"{text}: {name_instances(refused)} brought no numbers (see the error there)"
        )
    return received
