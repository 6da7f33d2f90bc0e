"""What a job holds while it runs, in words. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from poprun.text.ranges import fold_numbers

KEEPER_MARK: Final = "poprun-keeper:"
"""Stands before what the keeper of a lease says: a shell's startup files may print lines of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLease:
    """Virtual IPUs, or cores, of one host that a job has to itself.

    Attributes:
        host: What the plan calls the host.
        names: What is held, as people read it: ``GPU 0``, ``cpu/3``, ``core/3``.
        pool: File of the pool on that host.
        partition: The partition that they are, or None.
        descriptor: The locked file that is the lease; None where another process keeps it.
    """

    host: str
    names: tuple[str, ...]
    pool: str
    partition: str | None = None
    descriptor: int | None = None

    def __str__(self) -> str:
        where = f"on {self.host}, from the pool {self.pool}"
        return f"{fold_names(self.names)}{f' (partition {self.partition})' if self.partition else ''} {where}"


def fold_names(names: Sequence[str]) -> str:
    """``GPU 0-3``, ``cpu/0-3``; names that differ in more than a number at their end one by one."""
    stems = {name.rstrip("0123456789") for name in names}
    numbers = [name.removeprefix(stem) for name in names for stem in stems]
    if len(stems) != 1 or not all(number.isdecimal() for number in numbers):
        return ", ".join(names)
    return f"{stems.pop()}{fold_numbers(sorted(map(int, numbers)))}"
