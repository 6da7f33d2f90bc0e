"""Where each tensor lies in a store's files, and which instance of a host updates which parameter. Only computes.

Each tensor begins at a multiple of ``BLOCK_BYTES``, as direct reads and writes need it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from popdist.local_tensors import TensorForm

BLOCK_BYTES: Final = 4096
"""Start, length and address of what is read and written directly are multiples of it."""


def whole_blocks(num_bytes: int) -> int:
    """``num_bytes``, rounded up to whole blocks."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Bytes of a file; it begins with a block, and nothing else lies in the last block that it needs."""

    start: int
    num_bytes: int

    @property
    def length(self) -> int:
        """How much is read and written: whole blocks."""
        return whole_blocks(self.num_bytes)

    @property
    def end(self) -> int:
        """Where the next region may begin."""
        return self.start + self.length


def lay_out(forms: Mapping[str, TensorForm]) -> dict[str, Region]:
    """The region of each tensor in one file, in their order."""
    regions: dict[str, Region] = {}
    start = 0
    for name, form in forms.items():
        regions[name] = Region(start=start, num_bytes=form.num_bytes)
        start = regions[name].end
    return regions


def total_bytes(regions: Mapping[str, Region]) -> int:
    """The size of the file that holds them."""
    return max((region.end for region in regions.values()), default=0)


def deal(units: Sequence[Mapping[str, int]], num_instances: int) -> dict[str, int]:
    """Give each parameter to one of a host's instances; within each unit they get about as many bytes.

    A unit maps the names of its parameters to their bytes. The largest ones are dealt first, each to the instance
    that has least: of this unit, then of all, then the first.
    """
    owners: dict[str, int] = {}
    in_all = [0] * num_instances
    for unit in units:
        in_unit = [0] * num_instances
        for name in sorted(unit, key=lambda name: -unit[name]):
            if name in owners:  # tied with a parameter of an earlier unit
                continue
            owner = min(range(num_instances), key=lambda index: (in_unit[index], in_all[index], index))
            owners[name] = owner
            in_unit[owner] += unit[name]
            in_all[owner] += unit[name]
    return owners
