"""``libpvti`` as far as programs mark spans with it, named after their channels.

Torch's profiler records them, and so does ``poprun --trace``.
"""

from collections import defaultdict
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any, NoReturn, Self

from torch.profiler import record_function

__all__ = ["TraceChannel", "Tracepoint", "createTraceChannel", "traceDrivers", "traceFramework", "tracePoplar"]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"libpvti has no {name!r} here: it is not installed, and poptorch stands for {', '.join(__all__)}"
    )


class TraceChannel:
    """A name under which spans are shown, unless it is not ``enabled``."""

    def __init__(self, name: str, enabled: bool = True) -> None:
        self.name = name
        self.enabled = enabled


createTraceChannel = TraceChannel
traceDrivers = TraceChannel("Drivers")
tracePoplar = TraceChannel("Poplar")
traceFramework = TraceChannel("Framework")

_open: defaultdict[tuple[int, str, str], list[AbstractContextManager[Any]]] = defaultdict(list)
"""The spans that a thread has begun and not ended, by its number, their channel and name."""


class Tracepoint:
    """A span of a channel: a context, or from :meth:`begin` to :meth:`end`."""

    def __init__(self, channel: TraceChannel, name: str) -> None:
        self._channel = channel
        self._name = name

    def __enter__(self) -> Self:
        self.begin(self._channel, self._name)
        return self

    def __exit__(self, *error: object) -> None:
        self.end(self._channel, self._name)

    @staticmethod
    def begin(channel: TraceChannel, name: str) -> None:
        """Begin a span."""
        if channel.enabled:
            span = record_function(f"{channel.name}: {name}")
            span.__enter__()
            _open[get_ident(), channel.name, name].append(span)

    @staticmethod
    def end(channel: TraceChannel, name: str) -> None:
        """End the latest span of this name that this thread has begun."""
        spans = _open[get_ident(), channel.name, name]
        if spans:
            spans.pop().__exit__(None, None, None)

    @classmethod
    def event(cls, channel: TraceChannel, name: str) -> None:
        """Show a moment: a span without a length."""
        cls.begin(channel, name)
        cls.end(channel, name)
