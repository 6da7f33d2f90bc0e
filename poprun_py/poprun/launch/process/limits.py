"""The limits of this machine for a job's processes, what a job needs, and how many processes the kernel killed.

A process is in control groups (cgroups(7)), which limit its time on cores and its memory; the limit of each group
counts. For each instance poprun has a socket and two pipes open, so it raises its own soft limit of open files
(getrlimit(2)). The programs start with the user's limit.
"""

import errno
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Final, NamedTuple

from poprun.errors import SHORTAGES, LaunchError

CGROUPS: Final = "/sys/fs/cgroup"
MEMBERSHIP: Final = "/proc/self/cgroup"
_VMSTAT: Final = "/proc/vmstat"


class ControlGroup(NamedTuple):
    """A control group (cgroup) that contains this process: its version, and its folder, which may not exist."""

    folder: str
    is_unified: bool

    def file(self, unified: str, older: str) -> str:
        """Return the path of a file of the group; it is called ``unified`` in cgroup version 2, else ``older``."""
        return os.path.join(self.folder, unified if self.is_unified else older)


def control_groups(controller: str, membership: str, cgroups: str) -> Iterator[ControlGroup]:
    """Yield this process's control groups that may limit ``controller``, such as ``memory``; innermost first."""
    try:
        lines = read_text(membership).splitlines()
    except OSError:
        return
    for line in lines:
        with suppress(ValueError):
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                root = os.path.join(cgroups, controller) if controllers else cgroups
                names = [name for name in path.split("/") if name]
                for depth in range(len(names), -1, -1):
                    yield ControlGroup(os.path.join(root, *names[:depth]), is_unified=not controllers)


def cpu_quota(membership: str = MEMBERSHIP, cgroups: str = CGROUPS) -> float | None:
    """Return how many cores' time this process's control groups allow, such as 1.5; None if none has a limit."""
    quotas = map(_group_quota, control_groups("cpu", membership, cgroups))
    return min((quota for quota in quotas if quota is not None), default=None)


def _group_quota(group: ControlGroup) -> float | None:
    with suppress(OSError, ValueError):
        quota, *period = read_text(group.file("cpu.max", "cpu.cfs_quota_us")).split()
        if quota in ("max", "-1"):
            return None
        return int(quota) / int(period[0] if period else read_text(group.file("", "cpu.cfs_period_us")))
    return None


class KillCounts(NamedTuple):
    """How many processes the kernel has ever killed for lack of memory: in a control group, and on the machine."""

    in_group: int | None = None  # in the control group of this process and in the groups inside it
    on_machine: int | None = None  # on the machine; None if unknown

    def since(self, before: "KillCounts") -> "KillCounts":
        """Return how many processes the kernel has killed since the earlier counts ``before``; None if unknown."""
        pairs = zip(self, before, strict=True)
        return KillCounts(*(None if now is None or then is None else now - then for now, then in pairs))


def kill_counts(membership: str = MEMBERSHIP, cgroups: str = CGROUPS, vmstat: str = _VMSTAT) -> KillCounts:
    """Return how many processes the kernel killed for lack of memory, in the control group and on the machine."""
    files = (
        group.file("memory.events", "memory.oom_control")
        for group in control_groups("memory", membership, cgroups)
    )
    counts = (named_count(file, "oom_kill") for file in files)
    in_group = next((count for count in counts if count is not None), None)
    return KillCounts(in_group=in_group, on_machine=named_count(vmstat, "oom_kill"))


def named_count(path: str, name: str) -> int | None:
    """Return the number after ``name`` in a file whose lines are names with numbers; None if it is missing."""
    with suppress(OSError, ValueError):
        rows = [line.split() for line in read_text(path).splitlines()]
        return next((int(row[1]) for row in rows if row[:1] == [name]), None)
    return None


def read_text(path: str) -> str:
    """Return the whole text of ``path``, a file of the kernel such as /proc/self/cgroup."""
    with open(path, encoding="utf-8") as file:
        return file.read()


_LEAST_FILES: Final = 13
_LEAST_FILES_OF_INSTANCE: Final = 3  # a limit of open files below these two numbers is too low for every job
_WANTED_FILES: Final = 64
_WANTED_FILES_OF_INSTANCE: Final = 8  # enough open files for poprun and every launcher, with logs and leases
_LOOPBACK: Final = ("127.0.0.1", 9)


def check_system() -> None:
    """Check that /proc shows processes, and that poprun can open files and /dev/null. Raise LaunchError if not."""
    raise_open_files(0)
    if not os.path.exists(f"/proc/{os.getpid()}/stat"):
        raise LaunchError(
            "there is no /proc, in which poprun finds the processes of a job: mount -t proc proc /proc"
        )
    try:
        os.close(os.open(os.devnull, os.O_RDWR))
    except OSError as error:
        if error.errno in SHORTAGES:
            raise
        raise LaunchError(
            f"{os.devnull} cannot be used ({error.strerror}), which the programs of a job read and write: "
            f"mknod -m 666 {os.devnull} c 1 3"
        ) from None


@cache
def users_open_files() -> int:
    """Return the soft limit of open files that the user set, before poprun raises it; programs get this limit."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_open_files(num_instances: int) -> None:
    """Enlarge this process's soft limit of open files for a job. Raise LaunchError if that is impossible."""
    users_open_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    most = hard if hard != resource.RLIM_INFINITY else _WANTED_FILES + _WANTED_FILES_OF_INSTANCE * num_instances
    least = _LEAST_FILES + _LEAST_FILES_OF_INSTANCE * num_instances
    if max(soft, most) < least:
        who = f"{num_instances} instances need" if num_instances else "poprun needs"
        raise LaunchError(
            f"too many open files: {who} at least {least}, and the hard limit is {hard}: "
            "raise it with `ulimit -n`, or in /etc/security/limits.conf"
        )
    new_soft = min(most, _WANTED_FILES + _WANTED_FILES_OF_INSTANCE * num_instances)
    if new_soft > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_soft, hard))


_LONGEST_ADDRESS: Final = 107  # largest address of a unix socket, in bytes: unix(7)
_SOCKET_NAME: Final = "/pymp-xxxxxxxx/listener-xxxxxxxx"  # the name of a socket of Python's multiprocessing


def find_tmpdir_problem(folder: str) -> str:
    """Return a message if the path of the TMPDIR ``folder`` is too long for sockets below it; "" if it is not."""
    num_bytes = len(os.fsencode(folder))
    if num_bytes + len(_SOCKET_NAME) <= _LONGEST_ADDRESS:
        return ""
    return (
        f"TMPDIR has {num_bytes} bytes, and paths of sockets below it may have {_LONGEST_ADDRESS} in all, so that "
        "workers of loaders may hang: export TMPDIR=/tmp, or another short one"
    )


def find_loopback_problem() -> str:
    """Return why processes cannot connect at this machine's loopback address; an empty text if they can."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_LOOPBACK)  # asks the kernel for a route, and sends nothing
    except OSError as error:
        if error.errno in (errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL):
            return (
                f"the loopback address {_LOOPBACK[0]}, at which instances connect, cannot be reached "
                f"({error.strerror}): ip link set lo up"
            )
    return ""
