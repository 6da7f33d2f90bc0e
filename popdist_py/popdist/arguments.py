"""What calls are given: numbers of the right kind, or popdist's own error in place of Python's. Pure."""

import math
from operator import index
from typing import SupportsFloat, SupportsIndex

from popdist.errors import PopdistError

_SMALLEST_SEED, _LARGEST_SEED = -(2**63), 2**64 - 1
"""The seeds that torch's generators take."""


def whole_number(what: str, value: object, error: type[PopdistError], *, minimum: int = 1) -> int:
    """``value`` as an int; numpy's integers are whole numbers, too, bools and floats are none.

    Args:
        what: How the caller named it.
        value: What was given.
        error: What to raise.
        minimum: The smallest that is possible.

    Raises:
        PopdistError: An ``error``, if it is no whole number or too small.
    """
    number = _as_whole(value)
    if number is None or number < minimum:
        raise error(f"{what}={value!r} must be a whole number of at least {minimum}")
    return number


def seed_number(value: object, error: type[PopdistError]) -> int:
    """``value`` as a seed.

    Raises:
        PopdistError: An ``error``, if it is none that torch takes.
    """
    number = _as_whole(value)
    if number is None or not _SMALLEST_SEED <= number <= _LARGEST_SEED:
        raise error(f"seed={value!r} must be a whole number from -2**63 to 2**64 - 1")
    return number


def as_float(value: object) -> float:
    """``value`` as a float; NaN if it is no number."""
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def _as_whole(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return index(value)
    except TypeError:
        return None
