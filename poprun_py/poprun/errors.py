"""All exceptions that poprun raises, as one tree of classes; each class has an exit code.

The codes 2, 126 and 127 are the shell's. The codes 68, 69, 70, 73 and 74 are EX_NOHOST, EX_UNAVAILABLE,
EX_SOFTWARE, EX_CANTCREAT and EX_IOERR of sysexits.h. A job that was started returns the exit code of the instance
that failed first.
"""

import errno
import os
from typing import ClassVar, Final


class PoprunError(Exception):
    """Base class of all errors that poprun raises on purpose; the user sees only the text of the error."""

    exit_code: ClassVar[int] = 2


class UsageError(PoprunError):
    """Error for an option or an argument that poprun cannot read."""


class PlanError(PoprunError):
    """Error for a job that cannot be planned as the user asked; the message names the broken rule and a remedy."""


class HostsError(PoprunError):
    """Error for hosts that cannot take part in a job; the message has a table with all causes and remedies."""

    exit_code = 68


class MpiNotFoundError(PoprunError):
    """Error if the user asks for MPI on a machine where poprun finds no MPI runtime."""

    exit_code = 69


class LaunchError(PoprunError):
    """Error if poprun cannot start the instances (processes) of a job."""

    exit_code = 70


class OutputError(PoprunError):
    """Error if output of poprun or of a program cannot be written, for example because the disk is full."""

    exit_code = 73


class ProgramNotExecutableError(PoprunError):
    """Error for a program that exists but cannot be executed."""

    exit_code = 126


class ProgramNotFoundError(PoprunError):
    """Error for a program that does not exist."""

    exit_code = 127


class PoolError(PoprunError):
    """Error if poprun cannot use the pool folder, which records the jobs that use this machine's devices: for
    example, a file in the folder is damaged, or the folder is on a network file system.
    """

    exit_code = 74


class IpusTakenError(PoprunError):
    """Error for virtual IPUs that the job needs but other jobs use; the message names these jobs."""

    exit_code = 69


class ServerError(PoprunError):
    """Error if a server of virtual IPUs refuses this client, is no server of poprun, or answers wrongly."""

    exit_code = 69


class ServerLostError(ServerError):
    """Error for a server of virtual IPUs that is absent, busy or too slow; a later attempt may succeed."""


class LeaseEndedError(ServerError):
    """Error if a server has ended the job's lease of virtual IPUs: the job sent no message, or had released it."""


class PartitionError(PoprunError):
    """Error for a partition (reserved virtual IPUs) that does not exist, exists already, or does not fit a job."""


SHORTAGES: Final = {
    errno.EMFILE: "too many open files: raise the limit with `ulimit -n`",
    errno.ENFILE: "too many open files on this machine: raise fs.file-max with sysctl",
    errno.EAGAIN: "too many processes: raise the limit with `ulimit -u`, or that of the control group",
    errno.ENOMEM: "too little address space or memory: raise `ulimit -v`, or the limit of the control group",
}
"""Messages for error numbers that mean a lack of some resource; each message says which limit to raise."""


_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def describe_error(number: int) -> str:
    """Return the message for an error number (errno(3)), and how to raise the limit if a limit is the cause."""
    return SHORTAGES.get(number) or os.strerror(number)


def error_of_system(error: OSError | MemoryError) -> PoprunError:
    """Return ``error`` of the operating system as a PoprunError that names the lacking resource or the file."""
    if isinstance(error, MemoryError):
        return LaunchError(SHORTAGES[errno.ENOMEM])
    if error.errno in SHORTAGES:
        return LaunchError(SHORTAGES[error.errno])
    if not error.filename and error.errno in _FULL:
        return OutputError(f"standard output cannot be written: {error.strerror}")
    what = os.strerror(error.errno) if error.errno else str(error)
    return PoprunError(f"{error.filename}: {what}" if error.filename else what)
