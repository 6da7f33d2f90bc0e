"""Who called MPI_Abort: MPICH kills every process at once, before the caller's own end can be told. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from poprun.job.state import InstanceStatus

_WORDS: Final = re.compile(r"Abort\(-?\d+\) on node \d+ ")
"""What MPICH prints on standard error: "Abort(9) on node 1 (rank 1 in comm 0): application called MPI_Abort"."""


def blame_aborter(
    statuses: Sequence[InstanceStatus], tails: Mapping[int, Sequence[str]], launcher_code: int | None
) -> list[InstanceStatus]:
    """The statuses, in which the instance that aborted the job has failed with the launcher's exit code.

    Args:
        statuses: Every instance, by index.
        tails: The last lines of each instance's standard error.
        launcher_code: How the MPI launcher ended; what a job was aborted with, if it was.
    """
    aborters = [
        status for status in statuses if status.was_stopped and any(map(_WORDS.match, tails.get(status.index, ())))
    ]
    if not aborters or launcher_code is None or launcher_code <= 0:
        return list(statuses)
    first = min(aborters, key=lambda status: status.exited_at_seconds or 0.0)
    blamed = replace(first, exit_code=launcher_code, was_stopped=False, problem="")
    return [blamed if status is first else status for status in statuses]
