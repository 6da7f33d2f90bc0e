"""What a job needs of this machine before anything starts: /proc, /dev/null, open files, a loopback interface.

poprun finds the processes of a job in /proc, and has a socket and two pipes open for each instance; an MPI
launcher has about as many. poprun raises its own soft limit (getrlimit(2)) as far as the job needs it and the hard
one allows; the programs start with the user's.
"""

import errno
import os
import resource
import socket
from functools import cache
from typing import Final

from poprun.errors import SHORTAGES, LaunchError

_LEAST_FILES: Final = 13
_LEAST_FILES_OF_INSTANCE: Final = 3
"""Fewer are not enough for any job."""

_WANTED_FILES: Final = 64
_WANTED_FILES_OF_INSTANCE: Final = 8
"""So many are enough for poprun and for every launcher, with logs and leases."""

_LOOPBACK: Final = ("127.0.0.1", 9)


def check_system() -> None:
    """Check that the system shows its processes, and lets poprun open a few files.

    Raises:
        LaunchError: If /proc or /dev/null is missing, or the limit of open files is too low for any job.
    """
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
    """The soft limit of open files that poprun was called with, for the programs."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_open_files(num_instances: int) -> None:
    """Raise this process's limit of open files to what a job needs, as far as that is allowed.

    Args:
        num_instances: As many instances the job has; 0 when that is not known yet.

    Raises:
        LaunchError: If the hard limit is too low for the job.
    """
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
    wanted = min(most, _WANTED_FILES + _WANTED_FILES_OF_INSTANCE * num_instances)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def find_loopback_problem() -> str:
    """Why the processes of this machine cannot reach each other at its loopback address; empty when they can."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_LOOPBACK)  # asks the kernel for a way, and sends nothing
    except OSError as error:
        if error.errno in (errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL):
            return (
                f"the loopback address {_LOOPBACK[0]}, at which instances meet, cannot be reached "
                f"({error.strerror}): ip link set lo up"
            )
    return ""
