"""What the system refuses, in words: error numbers (errno(3)), with the limit to raise where there is one."""

import errno
import os
from typing import Final

SHORTAGES: Final = {
    errno.EMFILE: "too many open files: raise the limit with `ulimit -n`",
    errno.ENFILE: "too many open files on this machine: raise fs.file-max with sysctl",
    errno.EAGAIN: "too many processes: raise the limit with `ulimit -u`, or that of the control group",
}
"""What there is too much of, by error number, and what to do."""


def describe_error(number: int) -> str:
    """An error number in words."""
    return SHORTAGES.get(number) or os.strerror(number)
