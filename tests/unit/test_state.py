"""The few samples that are kept of an instance's memory."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from poprun.observe.account.state import MAX_SAMPLES, MemoryCurve

GAPS = st.floats(0.25, 4)


@given(st.lists(st.tuples(GAPS, st.integers(0, 2**40)), min_size=1, max_size=500))
def test_a_curve_stays_small(steps: list[tuple[float, int]]) -> None:
    """It keeps its first and its last sample, the order, and the peak whose sample may be gone."""
    curve, now_seconds = MemoryCurve(), 0.0
    for gap_seconds, num_bytes in steps:
        now_seconds += gap_seconds
        curve = curve.after(now_seconds, num_bytes)

    assert 0 < len(curve.samples) <= MAX_SAMPLES
    assert curve.samples[0] == (steps[0][0], steps[0][1])
    assert curve.samples[-1] == (now_seconds, steps[-1][1])
    assert list(curve.samples) == sorted(curve.samples, key=lambda sample: sample[0])
    assert curve.peak_bytes == max(num_bytes for _, num_bytes in steps)


def test_a_long_curve_is_spread_over_its_time() -> None:
    """The samples of a day are minutes apart, and those of its end no closer."""
    curve = MemoryCurve()
    for second in range(86_400):
        curve = curve.after(float(second), second)
    times = [at_seconds for at_seconds, _ in curve.samples]

    assert len(times) > MAX_SAMPLES / 4
    assert all(after - before > 600 for before, after in pairwise(times[:-1]))


def test_a_peak_between_the_samples_is_heard_of() -> None:
    """The kernel tells it at the process's end."""
    assert MemoryCurve().after(1.0, 10).with_peak(30).peak_bytes == 30
    assert MemoryCurve().after(1.0, 10).with_peak(5).peak_bytes == 10
