"""Medians of samples, with the interval in which the true one lies; pure."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Median:
    """The median of some samples.

    Attributes:
        value: The samples' own median.
        lower: The true median is not below this, with ``CONFIDENCE`` that it lies between the two.
        upper: The true median is not above this.
    """

    value: float
    lower: float
    upper: float


def median(samples: Sequence[float]) -> Median:
    """The median of ``samples`` and its interval, which assumes nothing about their distribution.

    The interval's ends are two of the samples: that k of them lie below the true median is as likely as k heads
    in as many throws of a coin (David and Nagaraja, Order Statistics, 7.1). Of fewer than 6 samples, it spans all.

    Raises:
        statistics.StatisticsError: If there are no samples.
    """
    ordered = sorted(samples)
    most_below = (1 - CONFIDENCE) / 2 * 2 ** len(ordered)
    left_out, ways = 0, 1
    while ways <= most_below:
        left_out += 1
        ways += math.comb(len(ordered), left_out)
    first = max(left_out - 1, 0)
    return Median(value=statistics.median(ordered), lower=ordered[first], upper=ordered[-1 - first])


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> Median:
    """The median of the ratios within each round: both were timed right after one another there."""
    return median([their / our for their, our in zip(theirs, ours, strict=True)])
