"""Whether ranks have a core each."""

import os
from collections.abc import Collection

import pytest

from popdist.host_memory.waiting import is_crowded


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
