"""The lock that allows only one server for each pool, the record of a machine's leases."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from poprun.devices.pool.folder import BUSY_SECONDS, opened_folder
from poprun.errors import PoolError
from poprun.launch.process.process_tree import user_name

_SERVER: Final = "server"
_MAX_DIGITS: Final = 10


@contextmanager
def sole_server(pool: str) -> Iterator[None]:
    """A context in which only this process serves the folder ``pool``. Raise PoolError if another one does."""
    key = secrets.token_hex(16)
    with opened_folder(pool, makes=True) as folder:
        with folder.alone(BUSY_SECONDS):
            for kind, other in folder.keys(_SERVER):
                file = folder.read(kind, other)
                if file is not None and folder.is_locked(kind, other):
                    process = file.data[:_MAX_DIGITS].decode(errors="replace")
                    name = process if process.isdecimal() else "that says not which"
                    raise PoolError(f"pool {pool} is served already, by process {name} of {user_name(file.uid)}")
                if file is not None and file.is_own:
                    folder.remove(kind, other)
            descriptor = folder.make_lock(_SERVER, key, str(os.getpid()).encode())
        try:
            yield
        finally:
            folder.remove(_SERVER, key)
            os.close(descriptor)


def is_served(pool: str) -> bool:
    """Return whether a server now leases the devices of the pool in the folder ``pool``."""
    try:
        with opened_folder(pool, makes=False) as folder:
            return any(folder.is_locked(kind, key) for kind, key in folder.keys(_SERVER))
    except (OSError, PoolError):
        return False
