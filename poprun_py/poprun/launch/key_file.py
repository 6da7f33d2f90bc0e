"""The file through which a host's shims are given the key of their job; see `poprun.hosts.remote_side`.

Standard library only: the agents run this in a bare interpreter.
"""

import os
import stat
from contextlib import suppress
from typing import NamedTuple

_MOST_BYTES = 1024


class HeldKey(NamedTuple):
    """The key of a job, as an agent of it has it; both are empty where the kernel knows the agents.

    Attributes:
        text: The key.
        file: Where it was read.
    """

    text: str
    file: str


def read_key(file: str) -> HeldKey:
    """The key in ``file``; none without a file's name.

    Raises:
        OSError: If it cannot be read.
        PermissionError: If others than this user can read or write it.
    """
    if not file:
        return HeldKey("", "")
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
            raise PermissionError(f"{file} is not this user's alone")
        return HeldKey(os.read(descriptor, _MOST_BYTES).decode("ascii"), file)
    finally:
        os.close(descriptor)


def forget_key(key: HeldKey) -> None:
    """Remove the file once every shim of the job has read it, or will not; another agent may have done so."""
    with suppress(OSError):
        os.unlink(key.file)
