"""Numbers as text: in range notation, `0-3,6`, and counts with their noun. For printing and for plan files."""

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

MAX_NUMBERS: Final = 65_536

_RANGES = re.compile(r"(?:[0-9]{1,9}(?:-[0-9]{1,9})?(?:,(?!$)|$))*")


def counted(count: int, noun: str) -> str:
    """``count`` with its noun: ``1 host``, ``1,024 hosts``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def fold_numbers(numbers: Iterable[int]) -> str:
    """``numbers``, ascending, as ranges: (0, 1, 2, 3, 6) → ``0-3,6``; no numbers → the empty text."""
    if isinstance(numbers, range) and numbers.step == 1:
        return _piece(numbers[0], numbers[-1]) if numbers else ""
    pieces: list[tuple[int, int]] = []
    for number in numbers:
        if pieces and number == pieces[-1][1] + 1:
            pieces[-1] = (pieces[-1][0], number)
        else:
            pieces.append((number, number))
    return ",".join(_piece(first, last) for first, last in pieces)


def parse_numbers(text: str) -> tuple[int, ...]:
    """The numbers of ``text``, inverse of :func:`fold_numbers`; a ValueError if it is not of that form."""
    if not _RANGES.fullmatch(text):
        raise ValueError(f"{text!r} is no list of numbers and ranges such as 0-3,6")
    ranges = [(int(first), int(last or first)) for first, _, last in map(_cut, text.split(",")) if first]
    bounds = [bound for pair in ranges for bound in pair]
    ascends = all(first <= last for first, last in ranges) and all(
        before[1] < after[0] for before, after in pairwise(ranges)
    )
    if not ascends:
        raise ValueError(f"the numbers of {text!r} do not ascend")
    if bounds and sum(last - first + 1 for first, last in ranges) > MAX_NUMBERS:
        raise ValueError(f"{text!r} holds more than {MAX_NUMBERS:,} numbers")
    return tuple(number for first, last in ranges for number in range(first, last + 1))


def _cut(piece: str) -> tuple[str, str, str]:
    return piece.partition("-")


def _piece(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
