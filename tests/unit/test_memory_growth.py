"""Memory that grows without end, and memory that does not."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun.observe.account.state import InstanceStatus, MachineTotals, MemoryCurve
from poprun.observe.judge.memory_growth import find_growth, growth_rate

MEBIBYTE = 1 << 20


def curve(sizes: list[float]) -> MemoryCurve:
    """A sample each second."""
    found = MemoryCurve()
    for second, size in enumerate(sizes):
        found = found.after(float(second), int(size))
    return found


@given(st.floats(0.1, 50.0), st.integers(100, 2000), st.integers(0, 2**32))
def test_a_steady_growth_has_its_rate(rate: float, num_seconds: int, seed: int) -> None:
    """Under noise that is small against it; a plateau has none, however it began."""
    noise = random.Random(seed)  # noqa: S311 - no secrets
    grows = [(1000 + rate * second + noise.uniform(0, rate)) * MEBIBYTE for second in range(num_seconds)]
    full = [(1000 + rate * min(second, num_seconds / 3)) * MEBIBYTE for second in range(num_seconds)]

    assert growth_rate(curve(grows)) == pytest.approx(rate * MEBIBYTE, rel=0.1)
    assert growth_rate(curve(full)) == 0.0
    assert growth_rate(curve(grows[:60])) == 0.0
    assert growth_rate(MemoryCurve()) == 0.0


def test_the_instances_of_a_host_fill_it_together() -> None:
    """Each host is warned of once; one that has room for hours is not."""
    grows = curve([(1000 + 10 * second) * MEBIBYTE for second in range(200)])
    machine = MachineTotals(room_bytes=12000 * MEBIBYTE)
    here = [InstanceStatus(index=index, memory=grows, machine=machine) for index in range(2)]
    hosts = {0: "n1", 1: "n1", 2: "n2"}
    still = InstanceStatus(index=2, memory=curve([1.0] * 200), machine=machine)

    assert find_growth([*here, still], hosts) == {
        "n1": "the memory of instances 0 and 1 grows by 1.2 GiB a minute: in 10 min 11.7 GiB more are "
        "used, which is all that is left"
    }
    assert find_growth([*here, still], {0: "n1", 1: "n3", 2: "n2"}).keys() == {"n1", "n3"}
    assert find_growth([still, still, still], hosts) == {}
