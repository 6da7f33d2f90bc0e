"""Whether a server hands out a pool to other hosts: there is one at most, and it keeps a file locked."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from poprun.errors import PoolError
from poprun.pool.holders import is_locked
from poprun.pool.place import prepare_folder
from poprun.pool.schema import mode_of

_MODE: Final = 0o666
_PATIENCE_SECONDS: Final = 2.0
"""Who only looks has the file locked, too, for a moment."""
_TRY_AGAIN_SECONDS: Final = 0.05
_PID_BYTES: Final = 20


@contextmanager
def sole_server(pool: str) -> Iterator[None]:
    """Be the one server of the pool in the file ``pool``: two would end each other's leases.

    Raises:
        PoolError: If there is another one, or there can be no pool there.
    """
    prepare_folder(pool)
    try:
        descriptor = os.open(_file(pool), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _MODE)
        with suppress(PermissionError):
            os.fchmod(descriptor, mode_of(pool, _MODE))
        if not _lock(descriptor):
            holder = os.pread(descriptor, _PID_BYTES, 0).decode(errors="replace").strip()
            raise PoolError(f"pool {pool} is served already, by process {holder}")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        raise PoolError(f"pool {pool}: {error.filename or pool}: {error.strerror}") from None
    try:
        yield
    finally:
        os.close(descriptor)


def is_served(pool: str) -> bool:
    """Whether a server hands out the pool in the file ``pool``."""
    try:
        return is_locked(_file(pool))
    except OSError:
        return False


def _lock(descriptor: int) -> bool:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_TRY_AGAIN_SECONDS)
        else:
            return True


def _file(pool: str) -> str:
    return f"{pool}.server"
