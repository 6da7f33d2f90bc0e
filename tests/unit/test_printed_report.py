"""An aborted job names the instance that called MPI_Abort."""

from dataclasses import replace

import pytest

from poprun.job.report.printed_report import blame_aborter
from poprun.job.state import SHIM_KILLED, InstanceState, InstanceStatus

WORDS = "Abort(9) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 9) - process 1"


def stopped(index: int, at_seconds: float = 1.0) -> InstanceStatus:
    """An instance that the MPI runtime and then its agent ended."""
    return InstanceStatus(
        index=index,
        state=InstanceState.ENDED,
        exit_code=-15,
        exited_at_seconds=at_seconds,
        was_stopped=True,
        problem=SHIM_KILLED,
    )


def test_the_instance_that_says_so_has_failed() -> None:
    """With the launcher's code, which is the one that the program gave."""
    first, second = blame_aborter([stopped(0), stopped(1)], {0: ["hello"], 1: ["", WORDS]}, 9)

    assert first == stopped(0)
    assert (second.has_failed, second.exit_code, second.problem) == (True, 9, "")


def test_the_first_of_several_is_blamed() -> None:
    """An error that all instances meet aborts the job once."""
    statuses = [stopped(0, 3.0), stopped(1, 2.0)]

    assert [one.was_stopped for one in blame_aborter(statuses, {0: [WORDS], 1: [WORDS]}, 9)] == [True, False]


def test_who_lost_its_shim_before_it_was_stopped_has_failed() -> None:
    """The MPI runtime kills the shims, and may do so before poprun has heard of anything."""
    lost = replace(stopped(1), was_stopped=False, exit_code=None)

    (blamed,) = blame_aborter([lost], {1: [WORDS]}, 9)

    assert (blamed.exit_code, blamed.problem) == (9, "")


@pytest.mark.parametrize("launcher_code", [None, -9, 0])
def test_a_launcher_that_killed_shims_may_not_tell_the_code(launcher_code: int | None) -> None:
    """It was killed itself, or heard of the shims' ends first: what is printed has the code."""
    (blamed,) = blame_aborter([stopped(0)], {0: [WORDS.replace("Abort(9)", "Abort(-1)")]}, launcher_code)

    assert (blamed.has_failed, blamed.exit_code) == (True, 255)


def test_nobody_is_blamed_without_words_or_failure() -> None:
    """A program may print what it likes where its launcher ended well, and in other words."""
    statuses = [replace(stopped(0), problem="")]

    assert blame_aborter(statuses, {0: [WORDS]}, 0) == statuses
    assert blame_aborter(statuses, {0: ["an Abort(9) on node 1 "]}, 9) == statuses
    assert blame_aborter(statuses, {}, None) == statuses
