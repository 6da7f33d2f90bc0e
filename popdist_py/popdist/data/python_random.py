"""The state of Python's own generator, in a fraction of the time that ``random.getstate`` takes.

``getstate`` makes 625 Python numbers and ``setstate`` reads them back. Together they take as long as a small layer
of a network, and a step needs both more than once. CPython keeps these numbers in one row inside of the generator,
so here they are copied as bytes. That is nowhere promised, so it is tried with two generators when this module is
loaded; where it fails, ``getstate`` and ``setstate`` do the work.
"""

import ctypes
import random
import struct
import sys
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

State: TypeAlias = tuple[bytes, float | None]
"""The row, and the second of a pair of normal numbers if it is still to come; equal if nothing was drawn since."""

_ROW: Final = struct.Struct("=i624I")
"""Which word is next, and the 624 words of the Mersenne Twister."""

_VERSION: Final = 3
"""Of the states that ``random.getstate`` gives."""

_generator: Final[Any] = random.getstate.__self__  # type: ignore[attr-defined] # behind the functions of the module


def current() -> State:
    """The state of the generator behind the functions of ``random``."""
    return _read(_generator) if _row is None else (bytes(_row), _generator.gauss_next)


def put_in_place(state: State) -> None:
    """Let that generator go on from ``state``."""
    if _row is None:
        _generator.setstate(_unpacked(state))
    else:
        _row[:], _generator.gauss_next = state


def seeded(seed: int) -> State:
    """What ``random.seed(seed)`` would make of it."""
    return _read(random.Random(seed))  # noqa: S311 - for training, not for secrets


def as_numbers(state: State) -> tuple[list[int], float | None]:
    """``state`` as in ``random.getstate``: version, words and which one is next; and the second of a pair."""
    version, internal, gauss = _unpacked(state)
    return [version, *internal], gauss


def from_numbers(numbers: Sequence[int], gauss: float | None) -> State:
    """The inverse of :func:`as_numbers`.

    Raises:
        TypeError, ValueError: If these are no state.
    """
    version, *internal = numbers
    generator = random.Random()  # noqa: S311 - as above
    generator.setstate((version, tuple(internal), gauss))
    return _read(generator)


def _read(generator: random.Random) -> State:
    _, (*words, index), gauss = generator.getstate()
    return _ROW.pack(index, *words), gauss


def _unpacked(state: State) -> tuple[int, tuple[int, ...], float | None]:
    index, *words = _ROW.unpack(state[0])
    return _VERSION, (*words, index), state[1]


def _row_of(generator: random.Random) -> memoryview:
    """Where in memory CPython keeps the row: behind what every object begins with."""
    return memoryview((ctypes.c_char * _ROW.size).from_address(id(generator) + object.__basicsize__)).cast("B")


def _are_rows_in_place() -> bool:
    """Whether a row that is copied from one generator to another takes its whole state along."""
    end = object.__basicsize__ + _ROW.size
    if sys.implementation.name != "cpython" or not end <= random.Random.__basicsize__ < end + 64:
        return False
    left, right = random.Random(1), random.Random(2)  # noqa: S311 - as above
    right.random()
    if any(bytes(_row_of(it)) != _read(it)[0] for it in (left, right)):
        return False
    _row_of(left)[:] = bytes(_row_of(right))
    return left.getstate() == right.getstate()


_row: Final = _row_of(_generator) if _are_rows_in_place() else None
