"""The processes behind leases, and whether they still live; and whether a server hands out the pool.

Each lease has a file that its job keeps locked with flock(2): poprun, and each of its agents, which outlive a
poprun that is killed until their programs have ended. The kernel takes the lock away when the last of them has
gone, however it went. That holds between users and between containers that share the pool, where ids say nothing.
A lease of another boot has ended. If the file is gone, the process's id, start time and pid namespace decide.

The lease of a client of a server has no file: nothing on this machine knows whether that client lives, except the
server, which ends the lease. While there is no server nobody knows, and the lease stays.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Final

from poprun.errors import PoolError
from poprun.pool.database import mode_of
from poprun.pool.place import prepare_folder
from poprun.pool.records import Holder, short_words
from poprun.process.tree import key_of, user_name

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def this_process(words: str) -> Holder:
    """This process as the holder of a lease, with what it runs in ``words``."""
    key = key_of(os.getpid())
    return Holder(
        pid=os.getpid(),
        start_ticks=0 if key is None else key.start_ticks,
        boot_id=boot_id(),
        pid_namespace=pid_namespace(),
        user=user_name(os.getuid()),
        words=short_words(words),
    )


@cache
def boot_id() -> str:
    """The id of this run of the kernel (random(4)); empty where it has none."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


@cache
def pid_namespace() -> str:
    """The name of the pid namespace of this process, such as ``pid:[4026531836]``."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def lock_new(file: str, mode: int) -> int:
    """Make the file of a new lease and lock it; its descriptor, which is the lease."""
    with suppress(FileNotFoundError):
        os.unlink(file)  # of a lease with the same number in a pool that was there before
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        os.fchmod(descriptor, mode)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def lives(holder: Holder, file: str) -> bool:
    """Whether the job is still there for which ``holder`` took the lease that has ``file``."""
    if holder.key is not None:
        return True
    if holder.boot_id != boot_id():
        return False
    try:
        return is_locked(file)
    except FileNotFoundError:
        return _process_lives(holder)
    except OSError:
        return True  # not to be opened: better a lease too many than a device for two jobs


def is_locked(file: str) -> bool:
    """Whether a process has locked ``file`` with flock(2); an OSError where it cannot be opened."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def is_here(holder: Holder) -> bool:
    """Whether the process of a lease has its id in the pid namespace of this process, and this boot."""
    return holder.boot_id == boot_id() and holder.pid_namespace == pid_namespace()


def _process_lives(holder: Holder) -> bool:
    """Whether the process lives, by its ids; one of another pid namespace cannot be seen, and is taken to live."""
    if not is_here(holder):
        return True
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    key = key_of(holder.pid)
    return key is None or key.start_ticks == holder.start_ticks


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
