"""The end of a channel: who still waits in it is not left waiting, and nothing comes after it."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from popdist.errors import BackendError
from popdist.exchange.transport import channel
from popdist.exchange.transport.channel import Channel
from tests.running import DEADLINE_SECONDS


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
    made: Any = Channel(process_group, 2, 0, abort=broken_off.append, name_lost=lambda: "instance 1")
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


def test_a_channel_with_work_left_is_broken_off() -> None:
    """What waits for an instance that does not come ends with an error, and what stands behind it is not done."""
    is_broken_off = threading.Event()
    done: list[str] = []
    made: Any = Channel(object(), 2, 0, abort=lambda _: is_broken_off.set(), name_lost=lambda: "instance 1")

    def wait_for_lost() -> None:
        assert is_broken_off.wait(DEADLINE_SECONDS)
        raise RuntimeError("the connection was closed")

    made.issue(wait_for_lost, [torch.ones(1)])
    made.issue(lambda: done.append("after"), [torch.ones(1)])
    made.close()
    was_broken_off = is_broken_off.is_set()
    is_broken_off.set()

    assert was_broken_off
    assert done == []
    with pytest.raises(BackendError, match="instance 1 was closed"):
        made.wait()
