"""Whether ranks have a core each, and how they wait where they have not."""

import os
from collections.abc import Collection

import pytest

from popdist.exchange.host_memory.barriers import LONGEST_YIELD_SECONDS, MOST_SLEEPS, CrowdedYields, is_crowded


@pytest.mark.parametrize(
    ("pids", "crowded"), [([1], False), ([1, 2], False), ([2, 3], True), ([1, 2, 3], True), ([1, 4], False)]
)
def test_cores_are_those_of_all_ranks(
    pids: Collection[int], *, crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks that are bound to a core each have two, and so have two that may run on both."""
    cores = {1: {0}, 2: {1}, 3: {1}, 4: {0, 1}}
    monkeypatch.setattr(os, "sched_getaffinity", cores.__getitem__)
    assert is_crowded(pids) is crowded


def test_ranks_yield_until_that_is_not_enough() -> None:
    """Then some waits sleep at once: more after each failure, up to a most, and fewer after successes."""
    yields = CrowdedYields()

    def num_sleeps_after(waited_seconds: float) -> int:
        assert yields.next_seconds() == LONGEST_YIELD_SECONDS
        yields.record_wait(waited_seconds)
        count = 0
        while yields.next_seconds() == 0:
            count += 1
        return count

    short, long = LONGEST_YIELD_SECONDS / 2, 2 * LONGEST_YIELD_SECONDS
    assert [num_sleeps_after(waited) for waited in (short, long, long, long)] == [0, 1, 3, 7]
    assert [num_sleeps_after(waited) for waited in (short, short, long)] == [0, 0, 11]
    assert max(num_sleeps_after(long) for _ in range(9)) == MOST_SLEEPS
