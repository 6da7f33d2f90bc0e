"""The tracebacks that Ctrl-C makes programs print, and nothing else, are taken out of what is shown.

Holds poprun.job.output.streams, too.
"""

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun.job.output.streams import ProgramStreams
from poprun.job.output.tracebacks import MAX_HELD_LINES, TracebackFilter
from poprun.observe.account.job_identity import JobIdentity
from poprun.plan.request import OutputSettings
from tests.planning import planned

HEADER = b"Traceback (most recent call last):\n"
CALL = b'  File "/home/me/train.py", line 3, in <module>\n    time.sleep(600)\n'
INTERRUPT = HEADER + CALL + b"KeyboardInterrupt\n"
ERROR = HEADER + CALL + b"ValueError: x\n"
WORKER = b"Process SpawnProcess-1:\n" + INTERRUPT
RANKED = b"".join(b"[rank3]: " + line for line in INTERRUPT.splitlines(keepends=True))
BLANK = HEADER + CALL + b"    \nKeyboardInterrupt\n"
COLOURED = HEADER + CALL + b"\x1b[1;35mKeyboardInterrupt\x1b[0m\n"
OTHERS = (b"step 1\n", b"saving\n", ERROR, HEADER, CALL, b"\xff\n", b"Process SpawnProcess-2:\n")


def sift(*chunks: bytes) -> tuple[bytes, tuple[int, ...]]:
    """What is shown of what instance 5 writes, and who was interrupted."""
    interrupts = TracebackFilter(shows_all=True)
    shown = b"".join(interrupts.feed(5, chunk, leaves_out_interrupts=True) for chunk in chunks)
    return shown + interrupts.finish(5), interrupts.interrupted


def test_a_traceback_of_ctrl_c_is_taken_out() -> None:
    """Also a worker's, one with torch.distributed's rank, one in colours, and one with a line of blanks."""
    for traceback in (INTERRUPT, WORKER, RANKED, COLOURED, BLANK):
        assert sift(b"step 1\n", traceback, b"saved\n") == (b"step 1\nsaved\n", (5,))


def test_another_traceback_is_shown() -> None:
    """A program may fail on its way out."""
    assert sift(ERROR, INTERRUPT, ERROR) == (ERROR + ERROR, (5,))
    assert sift(HEADER, CALL) == (HEADER + CALL, ())


def test_instances_do_not_disturb_each_other() -> None:
    """Each has tracebacks of its own, whatever the order in which they come."""
    interrupts = TracebackFilter(shows_all=True)
    shown = [
        interrupts.feed(instance, part, leaves_out_interrupts=True)
        for part in (HEADER + CALL, b"KeyboardInterrupt\n")
        for instance in (1, 0)
    ]

    assert shown == [b""] * 4
    assert interrupts.interrupted == (0, 1)


@given(st.lists(st.sampled_from(OTHERS), max_size=30), st.data())
def test_nothing_else_is_lost(parts: list[bytes], data: st.DataObject) -> None:
    """However it is cut into chunks of whole lines."""
    lines = b"".join(parts).splitlines(keepends=True)
    cut = data.draw(st.integers(0, len(lines)))

    assert sift(b"".join(lines[:cut]), b"".join(lines[cut:])) == (b"".join(lines), ())


def test_what_is_held_back_is_bounded() -> None:
    """A program that prints what looks like an endless traceback is shown."""
    endless = HEADER + CALL * MAX_HELD_LINES

    assert sift(endless) == (endless, ())
    assert TracebackFilter(shows_all=True).feed(0, endless, leaves_out_interrupts=True) != b""


def test_an_end_that_is_an_error_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    """A connection that is reset between hosts may have lost lines, and what came before is shown."""
    here, there = socket.socketpair()
    errors, end = socket.socketpair()
    end.close()
    here.send(b"never read: so the kernel resets the connection")
    there.send(b"step 1\n")
    there.close()
    identity = JobIdentity(job_id="j", restart_count=0, began_at_seconds=0.0)
    streams = ProgramStreams(planned(num_instances=2), {}, identity, shows_all=False)
    streams.open(0, {1: here.detach(), 2: errors.detach()})
    streams.start(lambda _error: None)
    streams.finish(60.0)

    shown, told = capfd.readouterr()
    assert "step 1" in shown
    assert "the stdout of instance 0 was cut off, and lines may be missing: Connection reset" in told


def test_an_attempt_leaves_no_descriptor_open(tmp_path: Path) -> None:
    """Whether or not its programs were started: a job may have many attempts."""
    plan = planned(num_instances=2, output=OutputSettings(log_dir=str(tmp_path)))
    before = set(Path("/proc/self/fd").iterdir())
    for attempt, has_programs in enumerate((True, False)):
        identity = JobIdentity(job_id="j", restart_count=attempt, began_at_seconds=0.0)
        streams = ProgramStreams(plan, {}, identity, shows_all=False)
        if has_programs:
            for instance in range(2):
                streams.close(streams.open(instance, {}))
            streams.start(lambda _error: None)
        streams.finish(60.0)

    assert set(Path("/proc/self/fd").iterdir()) == before
