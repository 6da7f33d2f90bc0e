"""What a monitor makes of the views that a job sends."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from popdist.progress import Progress
from poprun.job.monitors import job_view
from poprun.job.orders import JobIdentity
from poprun.job.record import Record
from poprun.job.state import InstanceState, InstanceStatus, Usage
from poprun.messages.control import ProtocolError, decode, encode
from poprun.messages.view import InstanceView, JobView
from poprun.monitor.job_table import Rate, describe_bytes, describe_seconds, rates, render
from tests.planning import planned

RUNNING = InstanceView(
    index=0,
    host="node0",
    state="running",
    looked_at_seconds=100.0,
    num_steps=40,
    step=1200,
    loss=0.123456,
    cpu_seconds=8.0,
    memory_bytes=3 * 2**30,
    last_line="epoch 2",
)
WAITING = replace(RUNNING, index=1, host="node1", waits_in="all_reduce(float32)", loss=None)
FAILED = replace(RUNNING, index=2, exit_code=-11, state="exited", last_line="")
JOB = JobView(
    pid=77,
    job_id="5f",
    restart_count=1,
    phase="running",
    seconds=3723.4,
    program=("/bin/python", "-c", "one\ntwo"),
    num_replicas=6,
    instances=(RUNNING, WAITING, FAILED),
)


def drawn(job: JobView, speeds: list[Rate], height: int = 50, width: int = 110) -> str:
    """The table as text without colours."""
    console = Console(file=StringIO(), width=width)
    with console.capture() as capture:
        console.print(render(job, speeds, height))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def test_a_view_comes_through_the_connection() -> None:
    """Both ends know the same value."""
    assert JobView.from_message(decode(encode(JOB.to_message()).rstrip())) == JOB


@pytest.mark.parametrize("message", [{}, {"instances": [{"colour": 1}]}, {**JOB.to_message(), "more": 1}])
def test_a_view_of_another_version_is_told_of(message: dict[str, object]) -> None:
    """In words."""
    with pytest.raises(ProtocolError, match="another version of poprun"):
        JobView.from_message(message)


def test_the_rate_is_between_two_looks() -> None:
    """Views that tell of the same look say nothing of the rate."""
    later = replace(RUNNING, looked_at_seconds=104.0, num_steps=50, cpu_seconds=14.0)
    fast = rates(JOB, replace(JOB, instances=(later, WAITING, FAILED)))

    assert fast == [Rate(steps_per_second=2.5, cpu_share=1.5), Rate(), Rate()]
    assert rates(None, JOB) == [Rate()] * 3
    assert rates(replace(JOB, restart_count=0), JOB) == [Rate()] * 3


def test_the_table() -> None:
    """As a person sees it."""
    assert (
        drawn(JOB, [Rate(steps_per_second=2.5, cpu_share=1.5), Rate(), Rate()])
        == """\
poprun 77  job 5f  /bin/python -c 'one two'
running for 1:02:03 · attempt 1 · 3 instances · 6 replicas · 9.0 GiB

 instance   host    state                        step   steps/s     loss    CPU    memory   last line
 ────────────────────────────────────────────────────────────────────────────────────────────────────────────
        0   node0   running                      1200       2.5   0.1235   150%   3.0 GiB   epoch 2
        1   node1   waits: all_reduce(float32)   1200                             3.0 GiB   epoch 2
        2   node0   signal 11                    1200             0.1235          3.0 GiB
"""
    )


def test_what_programs_write_moves_no_cursor() -> None:
    """Whatever a host or a program is called, or prints: it is shown, and neither obeyed nor taken for markup."""
    nasty = "\x1b[2J\x07[red]x[/red]"
    instance = replace(RUNNING, host=nasty, last_line=nasty, waits_in="")
    table = drawn(replace(JOB, program=("a\x1b[1m",), instances=(instance, RUNNING)), [Rate(), Rate()], width=160)

    assert table.replace("\n", "").isprintable()
    assert table.count("\\x1b[2J\\x07[red]x[/red]") == 2
    assert "a\\x1b[1m" in table


def test_columns_that_say_nothing_are_left_out() -> None:
    """A program without popdist, on one host."""
    plain = InstanceView(index=0, host="localhost", state="running", last_line="hello")
    table = drawn(replace(JOB, instances=(plain, replace(plain, index=1))), [Rate(), Rate()], width=60)

    assert table.splitlines()[3].split() == ["instance", "state", "last", "line"]


def test_a_screen_that_is_too_low_shows_who_needs_a_look() -> None:
    """Who failed, then who is furthest behind; and how many there are besides."""
    many = [replace(RUNNING, index=index, num_steps=1000 + index) for index in range(64)]
    many[40] = replace(many[40], num_steps=3)
    many[50] = replace(many[50], exit_code=7, state="exited")
    lines = drawn(replace(JOB, instances=tuple(many)), [Rate()] * 64, height=10).splitlines()

    assert len(lines) <= 10
    assert [line.split()[0] for line in lines[5:8]] == ["0", "40", "50"]
    assert lines[-1] == "and 61 more instances, further on than these"


def test_what_the_supervisor_knows_is_what_is_seen() -> None:
    """An instance that waits, one that ended, and one that nobody has looked at."""
    waiting = InstanceStatus(
        index=0,
        state=InstanceState.RUNNING,
        usage=Usage(at_seconds=9.0, memory_bytes=5, cpu_seconds=1.5, num_processes=2),
        progress=Progress(pid=1, num_steps=3, collective="barrier()", waiting_since_seconds=8.0),
    )
    ended = InstanceStatus(index=1, state=InstanceState.ENDED, exit_code=0)

    identity = JobIdentity(job_id="5f", restart_count=2, began_at_seconds=1.0)
    record = Record(planned(num_instances=2), identity, now_seconds=4.0)
    record.statuses = [waiting, ended]

    view = job_view(record, lambda index: f"line {index}", now_seconds=11.0)
    first, second = view.instances

    assert (view.job_id, view.restart_count, view.phase, view.seconds) == ("5f", 2, "starting", 10.0)
    assert (first.waits_in, first.num_steps, first.memory_bytes, first.last_line) == ("barrier()", 3, 5, "line 0")
    assert (second.state, second.exit_code, second.memory_bytes) == ("ended", 0, None)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (12_700_000_000, "11.8 GiB"), (2**40 * 700, "700 TiB")]
)
def test_sizes(num_bytes: int, text: str) -> None:
    """Three digits and a unit."""
    assert describe_bytes(num_bytes) == text


def test_durations() -> None:
    """As a clock shows them."""
    assert [describe_seconds(seconds) for seconds in (0.4, 61, 3600)] == ["0:00", "1:01", "1:00:00"]
