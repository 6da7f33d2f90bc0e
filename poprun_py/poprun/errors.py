"""What poprun raises, as one tree; each branch has an exit code of its own.

2, 126 and 127 are the shell's own; 68, 69, 70, 73 and 74 are EX_NOHOST, EX_UNAVAILABLE, EX_SOFTWARE, EX_CANTCREAT
and EX_IOERR of sysexits.h. A job that was started ends with the code of its first failing instance instead.
"""

import errno
import os
from typing import ClassVar, Final


class PoprunError(Exception):
    """Base of every error that poprun raises on purpose; its text is all that the user sees."""

    exit_code: ClassVar[int] = 2


class UsageError(PoprunError):
    """An option or an argument cannot be read."""


class PlanError(PoprunError):
    """The request fits no plan: the message says which rule it breaks and the nearest legal choices."""


class HostsError(PoprunError):
    """Some hosts cannot take part in a job: the message has a table with all of them, with cause and remedy."""

    exit_code = 68


class MpiNotFoundError(PoprunError):
    """MPI was asked for and no runtime was found."""

    exit_code = 69


class LaunchError(PoprunError):
    """The instances could not be brought to life."""

    exit_code = 70


class OutputError(PoprunError):
    """What poprun prints, or the programs print through it, cannot be written: the disk is full, for example."""

    exit_code = 73


class ProgramNotExecutableError(PoprunError):
    """The program exists and cannot be executed."""

    exit_code = 126


class ProgramNotFoundError(PoprunError):
    """There is no such program."""

    exit_code = 127


class PoolError(PoprunError):
    """The pool of this machine cannot be used: its file is damaged, foreign, unreachable, or in a bad place."""

    exit_code = 74


class IpusTakenError(PoprunError):
    """Others hold the virtual IPUs that the job needs; the message says who, and since when."""

    exit_code = 69


class ServerError(PoprunError):
    """The server of virtual IPUs refuses this client, is another kind of server, or its answer makes no sense."""

    exit_code = 69


class ServerLostError(ServerError):
    """The server of virtual IPUs is not there, is busy, or does not answer in time; it may later."""


class LeaseEndedError(ServerError):
    """The server has ended the lease of a job, because the job was silent for too long or gave it back."""


class PartitionError(PoprunError):
    """There is no such partition, there is one already, or it does not fit."""


SHORTAGES: Final = {
    errno.EMFILE: "too many open files: raise the limit with `ulimit -n`",
    errno.ENFILE: "too many open files on this machine: raise fs.file-max with sysctl",
    errno.EAGAIN: "too many processes: raise the limit with `ulimit -u`, or that of the control group",
    errno.ENOMEM: "too little address space or memory: raise `ulimit -v`, or the limit of the control group",
}
"""What there is too much of, by error number, and what to do."""


_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def describe_error(number: int) -> str:
    """An error number (errno(3)) in words, with the limit to raise where there is one."""
    return SHORTAGES.get(number) or os.strerror(number)


def error_of_system(error: OSError | MemoryError) -> PoprunError:
    """What to say of an error that nobody expected: what there is too little of, or the file that it is about."""
    if isinstance(error, MemoryError):
        return LaunchError(SHORTAGES[errno.ENOMEM])
    if error.errno in SHORTAGES:
        return LaunchError(SHORTAGES[error.errno])
    if not error.filename and error.errno in _FULL:
        return OutputError(f"standard output cannot be written: {error.strerror}")
    what = os.strerror(error.errno) if error.errno else str(error)
    return PoprunError(f"{error.filename}: {what}" if error.filename else what)
