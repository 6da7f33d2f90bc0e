"""What the project asks of its all-reduce on two cores, and whether a run holds it; pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from measuring.medians import Median, ratio

KIB, MIB = 1024, 1024**2

Samples = Mapping[int, Mapping[str, Sequence[float]]]
"""Size in bytes → contender → seconds of each round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How many times as long as ours another one has to take at least."""

    num_ranks: int
    num_bytes: int
    ours: str
    theirs: str
    least: float


def _limits() -> Iterator[Limit]:
    for size, least in ((KIB, 30.0), (64 * KIB, 15.0)):
        yield Limit(num_ranks=2, num_bytes=size, ours="popdist", theirs="gloo", least=least)
    yield Limit(num_ranks=2, num_bytes=25 * MIB, ours="popdist shared", theirs="popdist in place", least=0.9)
    for num_ranks, ours, gloo, mpich in (
        (2, "popdist", 5.0, 2.0),
        (2, "popdist in place", 10.0, 4.0),
        (4, "popdist in place", 10.0, 3.0),
    ):
        for theirs, least in (("gloo", gloo), ("MPICH", mpich)):
            yield Limit(num_ranks=num_ranks, num_bytes=25 * MIB, ours=ours, theirs=theirs, least=least)


LIMITS = tuple(_limits())


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A limit and what was measured of it."""

    limit: Limit
    found: Median

    @property
    def holds(self) -> bool:
        """Whether the measured median keeps the limit."""
        return self.found.value >= self.limit.least


def verdicts(num_ranks: int, samples: Samples) -> list[Verdict]:
    """Every limit that ``samples`` of a world of ``num_ranks`` say something of."""
    return [
        Verdict(limit=limit, found=ratio(times[limit.theirs], times[limit.ours]))
        for limit in LIMITS
        if limit.num_ranks == num_ranks
        and {limit.ours, limit.theirs} <= (times := samples.get(limit.num_bytes, {})).keys()
    ]


def size_name(num_bytes: int) -> str:
    """Such as 64 KiB."""
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


def duration_name(seconds: float) -> str:
    """Three digits and a unit."""
    factor, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{seconds * factor:.3g} {unit}"
