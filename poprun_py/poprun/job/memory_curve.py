"""How the memory of an instance went up and down, in few samples. Pure."""

from dataclasses import dataclass
from typing import Final, Self

MAX_SAMPLES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Samples of an instance's memory: the first, the last, and in between so many that they stay few.

    Attributes:
        samples: (time, bytes), by time; at most ``MAX_SAMPLES``. The times are monotonic seconds.
        peak_bytes: The most that was ever seen, whether its sample is still there or not.
        gap_seconds: The least time between samples that are kept, but for the last one.
    """

    samples: tuple[tuple[float, int], ...] = ()
    peak_bytes: int = 0
    gap_seconds: float = 0.0

    def after(self, at_seconds: float, num_bytes: int) -> Self:
        """The curve with one more sample."""
        before = self.samples
        is_last_kept = len(before) < 2 or before[-1][0] - before[-2][0] >= self.gap_seconds  # noqa: PLR2004 - a pair
        samples = (*(before if is_last_kept else before[:-1]), (at_seconds, num_bytes))
        gap_seconds = self.gap_seconds
        if len(samples) > MAX_SAMPLES:
            gap_seconds = (samples[-1][0] - samples[0][0]) * 2 / MAX_SAMPLES
            samples = (*samples[:-1:2], samples[-1])
        peak_bytes = max(self.peak_bytes, num_bytes)
        return type(self)(samples=samples, peak_bytes=peak_bytes, gap_seconds=gap_seconds)

    def with_peak(self, num_bytes: int) -> Self:
        """The curve, when it is heard that the memory once was ``num_bytes``."""
        peak_bytes = max(self.peak_bytes, num_bytes)
        return type(self)(samples=self.samples, peak_bytes=peak_bytes, gap_seconds=self.gap_seconds)
