"""The processes behind leases, and whether they still live.

Each lease has a file that poprun and its agents keep locked with flock(2): the kernel takes the lock away when the
last of them has gone. That holds between users and containers, where ids say nothing. If the file is gone, the
process's id, start time and pid namespace decide. The lease of a client of a server ends by that server only.
"""

import os
from collections.abc import Callable
from functools import cache

from poprun.devices.pool.records import Holder, short_words
from poprun.launch.process.process_tree import key_of, user_name

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


def is_alive(holder: Holder, is_locked: Callable[[], bool | None]) -> bool:
    """Whether the job of ``holder`` lives; ``is_locked`` tells of the lease's file, None where there is none."""
    if holder.client_key is not None:
        return True
    if holder.boot_id != boot_id():
        return False
    found = is_locked()
    return _is_process_alive(holder) if found is None else found


def is_here(holder: Holder) -> bool:
    """Whether the process of a lease lives in this boot and in this pid namespace, where its id can be found."""
    return holder.boot_id == boot_id() and holder.pid_namespace == pid_namespace()


def _is_process_alive(holder: Holder) -> bool:
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
