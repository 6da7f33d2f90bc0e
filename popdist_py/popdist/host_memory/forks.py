"""What a forked child inherits and must not end: only its parent has the threads that the end would wait for."""

import atexit
import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any, Final

_connections: Final["weakref.WeakSet[Any]"] = weakref.WeakSet()
_exit_handlers: Final[list[Callable[[], None]]] = []


def never_destroy_in_children(*connections: object) -> None:
    """Keep torch's process groups and stores alive in forked children: their destructors join threads."""
    _connections.update(connections)


def call_at_exit(handler: Callable[[], None]) -> None:
    """Call ``handler`` when this process exits, and not when a forked child does. Registering again moves it."""
    atexit.unregister(handler)
    atexit.register(handler)
    if handler not in _exit_handlers:
        _exit_handlers.append(handler)


def _part_from_parent() -> None:
    for connection in list(_connections):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
    for handler in _exit_handlers:
        atexit.unregister(handler)


os.register_at_fork(after_in_child=_part_from_parent)
