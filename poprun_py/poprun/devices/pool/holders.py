"""The processes whose jobs hold leases on devices, and the check whether these jobs still run.

Each lease has a file that poprun and its agents keep locked with flock(2). The kernel removes the lock when the
last of these processes has ended. The lock also works between users and containers, where process ids do not help.
If the file is gone, the process id, start time and pid namespace decide. Only a server ends a lease of its client.
"""

import os
from collections.abc import Callable
from functools import cache

from poprun.devices.pool.records import Holder, short_words
from poprun.launch.process.process_tree import key_of, user_name

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def this_process(words: str) -> Holder:
    """Return this process as the holder of a lease on devices; ``words`` is its command line."""
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
    """Return the kernel's boot id, which changes with each boot (random(4)); "" if the kernel has none."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


@cache
def pid_namespace() -> str:
    """Return the name of this process's pid namespace, such as ``pid:[4026531836]``; "" if it is unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_alive(holder: Holder, is_locked: Callable[[], bool | None]) -> bool:
    """Return whether the job that holds a lease still runs, as the lease's locked file or its process id says."""
    if holder.client_key is not None:
        return True
    if holder.boot_id != boot_id():
        return False
    is_held = is_locked()
    return _is_process_alive(holder) if is_held is None else is_held


def is_here(holder: Holder) -> bool:
    """Return whether the process ``holder`` runs under this kernel and in this process's pid namespace."""
    return holder.boot_id == boot_id() and holder.pid_namespace == pid_namespace()


def _is_process_alive(holder: Holder) -> bool:
    """Return whether the process ``holder`` lives; True if another pid namespace hides it."""
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
