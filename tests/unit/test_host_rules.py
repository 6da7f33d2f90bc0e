"""What is wrong with a host, by what its agents count: found by rules, and in words.

Holds poprun.observe.account.machine_counters and poprun.observe.show.host_words.
"""

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun.observe.account.machine_counters import read_counters, read_heat
from poprun.observe.account.state import InstanceStatus, MachineTotals, MemoryCurve, Usage
from poprun.observe.judge.host_rules import find_host_findings, growth_rate
from poprun.observe.show.host_words import describe_finding
from tests.unit.test_pressure import write_files

MEBIBYTE = 1 << 20


def curve(sizes: list[float]) -> MemoryCurve:
    """A sample each second."""
    found = MemoryCurve()
    for second, size in enumerate(sizes):
        found = found.after(float(second), int(size))
    return found


def warnings(statuses: Sequence[InstanceStatus], hosts: Mapping[int, str]) -> dict[str, str]:
    """What is found, in words, by host."""
    return {it.host: describe_finding(it) for it in find_host_findings(statuses, hosts)}


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

    assert warnings([*here, still], hosts) == {
        "n1": "the memory of instances 0 and 1 grows by 1.2 GiB a minute: in 10 min 11.7 GiB more are "
        "used, which is all that is left"
    }
    assert warnings([*here, still], {0: "n1", 1: "n3", 2: "n2"}).keys() == {"n1", "n3"}
    assert warnings([still], {2: "n2"}) == {}


def test_a_host_that_throttles_its_processors_is_named() -> None:
    """Only what was counted since the program began matters, in a time that is long enough."""

    def status(index: int, heat: float = 0.0, quota: float = 0.0, seconds: float = 100.0) -> InstanceStatus:
        first = MachineTotals(throttled_seconds=50.0, counters={"heat_seconds": 70.0})
        last = MachineTotals(throttled_seconds=50.0 + quota, counters={"heat_seconds": 70.0 + heat})
        usage = Usage(at_seconds=1000.0 + seconds, memory_bytes=1, cpu_seconds=1.0, num_processes=1)
        known = InstanceStatus(index=index, first_machine=first, machine=last)
        return replace(known, started_at_seconds=1000.0, usage=usage)

    hot, narrow, cool, early = (
        status(0, heat=30.0),
        status(1, quota=20.0),
        status(2, heat=1.0),
        status(3, 9.0, 9.0, 9.0),
    )

    assert warnings([hot, narrow, cool, early], {0: "n1", 1: "n2", 2: "n3", 3: "n4"}) == {
        "n1": "host n1 throttles its processors for 30% of the time, because they are hot",
        "n2": "host n2 throttles its processors for 20% of the time, to the limit of a control group",
    }


def test_the_kernel_tells_for_how_long_it_throttles_for_heat(tmp_path: Path) -> None:
    """In milliseconds for each core and its package; there is nothing in many virtual machines."""
    write_files(
        tmp_path,
        {
            "possible": "0-2\n",
            "cpu0/thermal_throttle/core_throttle_total_time_ms": "3000\n",
            "cpu0/thermal_throttle/package_throttle_total_time_ms": "5000\n",
            "cpu1/thermal_throttle/core_throttle_total_time_ms": "1000\n",
        },
    )

    assert read_heat(1, str(tmp_path)) == {"heat_seconds": 3.0}
    assert read_heat(1, str(tmp_path / "nothing")) == {}
    assert read_counters(os.getpid()).keys() <= {"heat_seconds"}
