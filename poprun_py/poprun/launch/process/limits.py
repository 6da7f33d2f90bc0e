"""The limits of this machine for a job's processes, what a job needs, and how many processes the kernel killed.

A process is in control groups (cgroups(7)), which limit its time on cores and its memory; the limit of each group
counts. For each instance poprun has a socket and two pipes open, so it raises its own soft limit of open files
(getrlimit(2)). The programs start with the user's limit.
"""

import errno
import os
import resource
import socket
from contextlib import suppress
from functools import cache
from typing import Final, NamedTuple

from poprun.errors import SHORTAGES, LaunchError
from poprun.launch.pressure import CGROUPS, count_kills, group_folders, read_kernel_file

MEMBERSHIP: Final = "/proc/self/cgroup"
_VMSTAT: Final = "/proc/vmstat"


def cpu_quota(membership: str = MEMBERSHIP, cgroups: str = CGROUPS) -> float | None:
    """Return how many cores' time this process's control groups allow, such as 1.5; None if none has a limit."""
    quotas = map(_group_quota, group_folders("cpu", read_kernel_file(membership), cgroups))
    return min((quota for quota in quotas if quota is not None), default=None)


def _group_quota(folder: str) -> float | None:
    older = (f"{folder}/cpu.cfs_quota_us", f"{folder}/cpu.cfs_period_us")
    with suppress(ValueError):  # without a limit, the quota is called max
        words = read_kernel_file(f"{folder}/cpu.max") or " ".join(map(read_kernel_file, older))
        quota, period = map(int, words.split())
        return quota / period if quota >= 0 else None
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
    return KillCounts(*count_kills(read_kernel_file(membership), cgroups, vmstat))


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
