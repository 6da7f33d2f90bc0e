"""Jobs that are started again, that have a deadline, and that are sent signals of the user's own.

Holds poprun.job.signals.
"""

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.process.endings import has_met, write_program
from tests.process.test_endings import wait_until
from tests.running import DEADLINE_SECONDS, Poprun

ATTEMPT = """
import os, sys
count, job = os.environ["POPDIST_RESTART_COUNT"], os.environ["POPDIST_JOB_ID"]
print(f"attempt {count} of {job}")
"""


def test_a_failed_job_is_started_again_until_it_ends_well(launcher: Poprun) -> None:
    """Each attempt knows its number, all have the same job id, and the report lists them."""
    text = ATTEMPT + "sys.exit(3 if count < '1' and os.environ['RANK'] == '1' else 0)"

    finished = launcher("--max-restarts", "5", "--no-tag-output", "-n", "2", sys.executable, "-c", text)

    attempts, jobs = zip(*(line.split(" of ") for line in finished.succeeded().lines), strict=True)
    assert set(attempts) == {"attempt 0", "attempt 1"}
    assert len(set(jobs)) == 1
    assert "restart 1 of at most 5 in 1 s" in finished.err
    assert "attempt 0: instance 1 failed first, exit code 3" in finished.err
    assert "attempt 1: ended well" in finished.err


def test_the_last_attempt_gives_the_exit_code(poprun: Poprun) -> None:
    """When there are no more restarts."""
    finished = poprun("--max-restarts=1", sys.executable, "-c", ATTEMPT + "sys.exit(4 + int(count))")

    assert finished.code == 5


def test_a_job_that_would_fail_again_is_not_started_again(poprun: Poprun) -> None:
    """The second failure at the same line is the last, unless the user wants it all the same."""
    text = ATTEMPT + "raise ValueError(f'batch {count}')"
    words = ("--launcher=local", "--max-restarts=2", "--no-tag-output", "-n2", sys.executable, "-c", text)

    finished, anyway = poprun(*words), poprun("--restart-anyway", *words)

    assert (finished.code, len(set(finished.lines)), len(set(anyway.lines))) == (1, 2, 3)
    assert re.search(
        r"not started again: instances? \d.* failed twice at <string>:5 in the same way", finished.told
    )
    assert "(--restart-anyway starts it all the same)" in finished.told


def test_ctrl_c_ends_a_pause(poprun: Poprun) -> None:
    """The failure stays the job's end; the second pause is longer than the first."""
    with poprun.started("--max-restarts", "9", sys.executable, "-c", ATTEMPT + "sys.exit(6)") as process:
        assert process.stderr is not None
        while "in 2 s" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE_SECONDS)

    assert process.returncode == 6


def test_a_job_that_takes_too_long_is_stopped(launcher: Poprun, tmp_path: Path) -> None:
    """With 124, as timeout(1) does, and it is not started again."""
    words = write_program(tmp_path, "ready()\ntime.sleep(600)")

    finished = launcher("--timeout", "1.5", "--max-restarts", "2", "-n", "2", *words)

    assert finished.code == 124
    assert "not over after --timeout 1.5 s" in finished.err


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_a_program_that_handles_a_signal_gets_it(launcher: Poprun, tmp_path: Path, signum: signal.Signals) -> None:
    """Once, and its children do not, although a forked one has the same handler."""
    text = f"""
def handle(*_):
    print("got it", flush=True)
    time.sleep(0.3)  # a second signal would come now
    sys.exit(0)
signal.signal({int(signum)}, handle)
if os.fork() == 0: time.sleep(600)
ready()
time.sleep(600)
"""
    with launcher.started("--no-tag-output", "-n", "2", *write_program(tmp_path, text)) as process:
        wait_until(lambda: has_met(tmp_path, 2))
        process.send_signal(signum)
        out, _ = process.communicate(timeout=DEADLINE_SECONDS)

    assert (process.returncode, out.split("\n")) == (0, ["got it", "got it", ""])


def test_a_program_that_handles_no_signal_is_left_alone(launcher: Poprun, tmp_path: Path) -> None:
    """SIGUSR1 would end it; SIGHUP means that the terminal is gone, and the job ends in order."""
    words = write_program(tmp_path, "ready()\ntime.sleep(600)")
    with launcher.started("-vv", "-n", "2", *words) as process:
        wait_until(lambda: has_met(tmp_path, 2))
        process.send_signal(signal.SIGUSR1)
        assert process.stderr is not None
        while "signal_unhandled" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=DEADLINE_SECONDS)

    assert process.returncode == 143


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (143, 143)])
def test_programs_that_save_on_sigterm_give_the_exit_code(
    poprun: Poprun, tmp_path: Path, code: int, expected: int
) -> None:
    """All of them ended well: so did the job."""
    text = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))\nready()\ntime.sleep(600)"
    with poprun.started("-n", "2", *write_program(tmp_path, text)) as process:
        wait_until(lambda: has_met(tmp_path, 2))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_SECONDS)

    assert process.returncode == expected


def test_several_replicas_that_nobody_uses_are_told_of(poprun: Poprun) -> None:
    """A program that never asked popdist trains one model in each instance."""
    plain = poprun("-n", "2", "--num-replicas", "4", sys.executable, "-c", "pass").succeeded()
    aware = poprun(
        "-n", "2", "--num-replicas", "4", sys.executable, "-c", "import popdist; popdist.num_replicas()"
    ).succeeded()

    assert "no instance used popdist, so this was a job of 2, not of 4 replicas" in plain.err
    assert "no instance used" not in aware.err
