"""What the tables of faults show: golden texts."""

import signal
from dataclasses import replace

import pytest

from tests.faults.catalogue import Fault, Moment, Step, Target
from tests.faults.outcome import Outcome
from tests.faults.table import percentile, render_comparison, render_matrix

EXITS = Fault(name="exits with 7", program="", codes=frozenset({7}), named=1)
IGNORES = replace(EXITS, name="ignores SIGTERM", obeys=False)
KILL = Step(when=Moment.READY, target=Target.LAUNCHER, signum=signal.SIGKILL)
KILLED = Fault(name="the launcher is killed", program="", codes=frozenset({-9}), steps=(KILL,))

OWN = 'Traceback (most recent call last):\n  File "/x/poprun/launch/shim.py", line 5, in main\n'
USERS = 'Traceback (most recent call last):\n  File "/x/poprun_example.py", line 5, in main\n'

RIGHT = Outcome(contestant="local", fault=EXITS, code=7, named=1, seconds=0.25)


@pytest.mark.parametrize(
    ("num_values", "share", "expected"),
    [(0, 0.5, 0.0), (1, 0.99, 1.0), (2, 0.5, 1.0), (100, 0.5, 50.0), (100, 0.99, 99.0), (101, 0.99, 100.0)],
)
def test_a_percentile_is_one_of_the_values(num_values: int, share: float, expected: float) -> None:
    """The nearest rank, in any order of the values."""
    assert percentile([float(value) for value in range(num_values, 0, -1)], share) == expected


def test_the_matrix_has_a_row_for_each_fault_and_two_for_all() -> None:
    """Wrong codes, wrong names, processes, files and sockets are counted."""
    outcomes = [
        RIGHT,
        replace(RIGHT, named=0, seconds=0.5, survivors=("a", "b"), memory=("/dev/shm/x",), err=OWN),
        replace(RIGHT, fault=IGNORES, seconds=2.0),
        Outcome(contestant="mpich", fault=KILLED, code=-9, named=None, seconds=0.125, sockets=("@poprun",)),
    ]

    assert render_matrix(outcomes) == (
        "| what goes wrong | runs | exit code | wrong | tracebacks of poprun's own | "
        "processes left | files, sockets left | p50 | p99 |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| exits with 7 | 2 | 7 | 1 | 1 | 2 | 1 | 0.25 s | 0.50 s |\n"
        "| ignores SIGTERM | 1 | 7 | 0 | 0 | 0 | 0 | 2.00 s | 2.00 s |\n"
        "| the launcher is killed | 1 | \N{EN DASH} | 0 | 0 | 0 | 1 | 0.12 s | 0.12 s |\n"
        "| **all whose programs end when asked** | 3 |  | 1 | 1 | 2 | 2 | 0.25 s | 0.50 s |\n"
        "| **all others: 2 s of grace** | 1 |  | 0 | 0 | 0 | 0 | 2.00 s | 2.00 s |\n"
    )


def test_a_comparison_has_a_column_for_each_launcher() -> None:
    """That of poprun's launchers, which are one, shows the worst; what cannot happen to a launcher is left out."""
    other = replace(RIGHT, contestant="torchrun")
    outcomes = [
        RIGHT,
        replace(RIGHT, contestant="mpich", seconds=0.5),
        Outcome(contestant="local", fault=KILLED, code=-9, named=None, seconds=0.125),
        replace(other, code=1, survivors=("a",)),
        replace(other, contestant="mpiexec", code=None, seconds=20.0, survivors=("a", "b")),
        replace(other, fault=KILLED, code=-9, survivors=("a", "b")),
    ]

    assert render_comparison(outcomes) == (
        "| what goes wrong | poprun | torchrun | mpiexec |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| exits with 7 | 7, 0.50 s | **1**, 0.25 s; **1 live on** | > 10 s |\n"
        "| the launcher is killed | all gone, 0.12 s | **2 live on** | \N{EN DASH} |\n"
    )


@pytest.mark.parametrize(
    ("outcome", "mistakes"),
    [
        (RIGHT, []),
        (replace(RIGHT, code=0), ["exit code 0"]),
        (replace(RIGHT, err=OWN), ["shows a traceback of poprun's own"]),
        (replace(RIGHT, err=USERS), []),
        (replace(RIGHT, named=None), ["names instance None, not 1"]),
        (replace(RIGHT, code=None, survivors=("sleep",)), ["exit code None", "leaves sleep"]),
        (replace(RIGHT, fault=replace(EXITS, codes=frozenset()), named=0), []),
        (replace(RIGHT, fault=replace(EXITS, codes=frozenset()), code=0), ["exit code 0"]),
    ],
)
def test_what_is_wrong_is_said(outcome: Outcome, mistakes: list[str]) -> None:
    """A fault without codes may end with any but 0, and name whom it likes."""
    assert outcome.mistakes == mistakes


def test_a_job_is_late_when_its_programs_had_no_more_time() -> None:
    """One second from the failure, beside the grace when a program ignores the request."""
    assert not RIGHT.is_late
    assert replace(RIGHT, seconds=1.5).is_late
    assert not replace(RIGHT, fault=IGNORES, seconds=2.5).is_late
    assert replace(RIGHT, fault=IGNORES, seconds=3.5).is_late
    assert not replace(RIGHT, fault=replace(EXITS, scarce="-n"), seconds=2.5).is_late
