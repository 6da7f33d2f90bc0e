"""`Channel`: names for parts of a program, which torch's profiler shows."""

import functools
from contextlib import AbstractContextManager
from typing import Any

from torch.profiler import record_function


class Channel:
    """A name that stands before those of its parts."""

    def __init__(self, name: str) -> None:
        self.name = name

    def tracepoint(self, name: str) -> AbstractContextManager[Any]:
        """A context whose time the profiler shows as ``channel: name``."""
        return record_function(f"{self.name}: {name}")

    def instrument(self, obj: object, *methods: str) -> None:
        """Show calls of these methods of ``obj`` in the profile."""
        for name in methods:
            setattr(obj, name, self._shown(name, getattr(obj, name)))

    def _shown(self, name: str, method: Any) -> Any:
        @functools.wraps(method)
        def shown(*args: Any, **kwargs: Any) -> Any:
            with self.tracepoint(name):
                return method(*args, **kwargs)

        return shown
