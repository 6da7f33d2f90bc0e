"""Spans of ``libpvti`` in a profile of torch's."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from poptorch.stubs import trace_points
from poptorch.stubs.trace_points import TraceChannel, Tracepoint


def test_spans_of_channels_that_are_on() -> None:
    """As a context, from a begin to an end, and as a moment; an end without a begin is nothing."""
    channel, off = TraceChannel("mine"), TraceChannel("off", enabled=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with Tracepoint(channel, "context"), Tracepoint(off, "context"):
            Tracepoint.begin(trace_points.tracePoplar, "begun")
            torch.ones(2, dtype=torch.float32)
            Tracepoint.end(trace_points.tracePoplar, "begun")
        Tracepoint.end(channel, "never begun")
        Tracepoint.event(channel, "moment")
        Tracepoint.event(off, "hidden")

    names = [it.name for it in profile.events() or [] if ": " in it.name]
    assert sorted(names) == ["Poplar: begun", "mine: context", "mine: moment"]
    with pytest.raises(AttributeError, match="no 'Graph' here"):
        _ = trace_points.Graph


def test_a_thread_ends_its_own_span() -> None:
    """Another thread may have begun one of the same name since then."""
    channel = TraceChannel("mine")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with ThreadPoolExecutor(1) as pool, torch.profiler.profile(activities=activities) as profile:
        Tracepoint.begin(channel, "work")
        pool.submit(Tracepoint.begin, channel, "work").result()
        Tracepoint.end(channel, "work")
        Tracepoint.event(channel, "after it")
        pool.submit(Tracepoint.end, channel, "work").result()

    spans = sorted((it.time_range.start, it.time_range.end, it.name) for it in profile.events() or [])
    end = next(end for _, end, name in spans if name == "mine: work")
    assert end <= next(begin for begin, _, name in spans if name == "mine: after it")
