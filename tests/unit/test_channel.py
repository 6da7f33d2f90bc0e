"""The end of a channel: who still waits in it is not left waiting, and nothing comes after it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from popdist.comm import channel
from popdist.comm.channel import Channel
from popdist.errors import BackendError


def broken() -> None:
    """What a stream says after an error of CUDA's."""
    raise RuntimeError("device-side assert triggered")


@pytest.mark.parametrize(
    ("query", "is_broken_off"), [(lambda: True, False), (lambda: False, True), (broken, False)]
)
def test_close(monkeypatch: pytest.MonkeyPatch, query: object, is_broken_off: bool) -> None:  # noqa: FBT001 - parametrized
    """A stream that waits for a lost instance is broken off, and what is issued later is not done."""
    monkeypatch.setattr(channel, "END_SECONDS", 0.05)
    process_group = object()
    broken_off: list[object] = []
    done: list[str] = []
    made: Any = Channel(process_group, 2, 0, break_off=broken_off.append, find_lost=lambda: [1])
    made.issue(lambda: done.append("before"), [torch.ones(1)])
    made.wait()
    made._streams[torch.device("cuda")] = SimpleNamespace(query=query)

    made.close()
    made.issue(lambda: done.append("after"), [torch.ones(1)])

    assert made._thread is None
    assert done == ["before"]
    assert broken_off == [process_group] * is_broken_off
    assert made.is_broken
    with pytest.raises(BackendError, match="instance 1 was closed"):
        made.wait()
