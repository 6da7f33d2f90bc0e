"""The handling of forks: objects that a forked child must neither use nor end, and marks that children can see.

Only the parent has the threads that a connection's end would wait for, and the barriers belong to the parent.
"""

import atexit
import ctypes
import hashlib
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

_connections: Final["weakref.WeakSet[Any]"] = weakref.WeakSet()
_exit_handlers: Final[list[Callable[[], None]]] = []
_in_children: Final["list[weakref.WeakMethod[Callable[[], None]]]"] = []


def never_destroy_in_children(*connections: object) -> None:
    """Keep torch's groups and stores alive in forked children, where destructors would wait for lost threads."""
    _connections.update(connections)


def call_in_children(method: Callable[[], None]) -> None:
    """Call ``method`` in each forked child process, as long as the method's object exists."""
    _in_children[:] = [reference for reference in _in_children if reference() is not None]
    _in_children.append(weakref.WeakMethod(method))


def call_at_exit(handler: Callable[[], None]) -> None:
    """Call ``handler`` when this process exits, but not in forked children; a second call replaces the first."""
    atexit.unregister(handler)
    atexit.register(handler)
    if handler not in _exit_handlers:
        _exit_handlers.append(handler)


def mark_process(name: str) -> int | None:
    """Mark this process with ``name`` by an open memory file, so that its descendants find the process; return the
    file's descriptor, whose closing removes the mark. Return None if that is impossible.
    """
    try:
        return os.memfd_create(_file_of(name), os.MFD_CLOEXEC)
    except OSError:
        return None


def find_marked_ancestor(name: str) -> int | None:
    """Return the id of the nearest ancestor process that is marked with ``name``; None if there is none."""
    mark = Path(f"/memfd:{_file_of(name)} (deleted)")
    pid = os.getppid()
    with suppress(OSError):  # the process has ended or belongs to another user
        while pid > 1:
            if mark in map(_target_of, Path(f"/proc/{pid}/fd").iterdir()):
                return pid
            stat = Path(f"/proc/{pid}/stat").read_bytes()
            pid = int(stat.rpartition(b")")[2].split()[1])
    return None


def _target_of(link: Path) -> Path | None:
    with suppress(OSError):  # the descriptor was closed in the meantime
        return link.readlink()
    return None


def _file_of(name: str) -> str:
    return f"popdist-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"


def _part_from_parent() -> None:
    for connection in list(_connections):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
    for handler in _exit_handlers:
        atexit.unregister(handler)
    for reference in _in_children:
        method = reference()
        if method is not None:
            with suppress(Exception):
                method()


os.register_at_fork(after_in_child=_part_from_parent)
