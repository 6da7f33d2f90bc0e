"""What a monitor makes of the views that a job sends.

Holds poprun.job.monitors, poprun.launch.messages.view and poprun.observe.show.monitor.job_table.
"""

import socket
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO

import pyte
import pytest
from rich.console import Console

from popdist.ground.layout import Parallelism
from popdist.ground.progress import Progress
from poprun.job.monitors import Viewers, is_of_one_moment, job_view
from poprun.job.record import Record
from poprun.launch.messages import ProtocolError
from poprun.launch.messages.control import Link, decode, encode
from poprun.launch.messages.view import InstanceView, JobView
from poprun.observe.account.job_identity import JobIdentity
from poprun.observe.account.judgements import Slowness
from poprun.observe.account.state import InstanceState, InstanceStatus, Usage
from poprun.observe.judge.watch import PerformanceWatch
from poprun.observe.show.monitor.job_table import Rate, fit, rates, render
from poprun.observe.show.monitor.top import draw_views
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
    parallelism=Parallelism(),
    instances=(RUNNING, WAITING, FAILED),
)


def drawn(job: JobView, speeds: list[Rate], height: int = 50, width: int = 110) -> str:
    """The table as text without colours."""
    console = Console(file=StringIO(), width=width)
    with console.capture() as capture:
        console.print(render(job, speeds, height, width))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def test_a_view_comes_through_the_connection() -> None:
    """Both ends know the same value."""
    assert JobView.from_message(decode(encode(JOB.to_message()).rstrip())) == JOB


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"instances": [{"colour": 1}]},
        {**JOB.to_message(), "more": 1},
        {**JOB.to_message(), "seconds": float("inf")},
        {**JOB.to_message(), "seconds": None},
    ],
)
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


def test_a_restart_says_that_it_counts_anew() -> None:
    """Where the program does not report its steps."""
    silent = replace(JOB, instances=tuple(replace(it, step=None) for it in JOB.instances))
    assert "attempt 1, whose steps are counted from 0 · 3 instances" in drawn(silent, [Rate()] * 3)


def test_the_table() -> None:
    """As a person sees it."""
    assert (
        drawn(JOB, [Rate(steps_per_second=2.5, cpu_share=1.5), Rate(), Rate()])
        == """\
poprun 77  job 5f  /bin/python -c 'one two'
running for 1 h 2 min · attempt 1 · 3 instances · 6 replicas · 9.0 GiB

 instance   host    state                        step   steps/s     loss    CPU    memory   last line
 ────────────────────────────────────────────────────────────────────────────────────────────────────────────
        0   node0   running                      1200       2.5   0.1235   150%   3.0 GiB   epoch 2
        1   node1   waits: all_reduce(float32)   1200                             3.0 GiB   epoch 2
        2   node0   signal 11                    1200             0.1235          3.0 GiB
"""
    )


def test_who_is_slow_stands_below_the_title() -> None:
    """In at most two lines, with the reason; on a low screen an instance makes way."""
    slow = Slowness(
        instance=1,
        phase="data",
        delay_seconds=0.048,
        share=0.39,
        since_seconds=5.0,
        since_step=120,
        reasons=("at \x1b[1mtrain.py:7",),
    )
    record = Record(planned(num_instances=2), JobIdentity(job_id="5f", restart_count=0, began_at_seconds=0.0), 0.0)
    record.performance = PerformanceWatch(0.0)
    balanced = job_view(record, str, 9.0)
    record.performance.slow_link = replace(slow, instance=None, hosts=("n1", "n2"))
    linked = job_view(record, str, 9.0)
    record.performance.slowdowns = [replace(slow, until_seconds=7.0), slow]
    view = job_view(record, str, 9.0)
    lines = drawn(view, [Rate()] * 2, height=10).splitlines()

    assert balanced.slow == ""
    assert linked.slow.startswith("the network is slow since step 120: ")
    assert lines[2] == "instance 1 is slow in data since step 120: +48 ms a step (39%): at \\x1b[1mtrain.py:7"
    assert drawn(view, [Rate()] * 2, width=80).splitlines()[3].endswith("train.py:7")
    for slow_words in ("x", "word " * 99):
        assert len(drawn(replace(JOB, slow=slow_words), [Rate()] * 3, height=10).splitlines()) <= 10


def test_what_was_said_before_a_monitor_came_is_not_sent_to_it() -> None:
    """It was printed elsewhere, perhaps long ago."""
    record = Record(planned(), JobIdentity(job_id="5f", restart_count=0, began_at_seconds=0.0), 0.0)
    viewers = Viewers()
    assert not viewers.add_text("old")
    ours, theirs = socket.socketpair()
    with theirs:
        viewers.add(Link(ours))
        assert viewers.add_text("new")
        viewers.send_view(record, str, 1.0)
        viewers.close()
        view = JobView.from_message(decode(theirs.makefile("rb").read().rstrip()))

    assert view.said == "new"


def test_what_programs_write_moves_no_cursor() -> None:
    """Whatever a host or a program is called, or prints: nothing is obeyed or markup; last lines lose colours."""
    nasty = "\x1b[2J\x07[red]x[/red]"
    instance = replace(RUNNING, host=nasty, last_line=nasty, waits_in="")
    table = drawn(replace(JOB, program=("a\x1b[1m",), instances=(instance, RUNNING)), [Rate(), Rate()], width=160)

    assert table.replace("\n", "").isprintable()
    assert table.count("\\x1b[2J\\x07[red]x[/red]") == 1
    assert table.count("[red]x[/red]") == 2
    assert "a\\x1b[1m" in table


def test_columns_that_say_nothing_are_left_out() -> None:
    """A program without popdist, on one host."""
    plain = InstanceView(index=0, host="localhost", state="running", last_line="hello")
    table = drawn(replace(JOB, instances=(plain, replace(plain, index=1))), [Rate(), Rate()], width=60)

    assert table.splitlines()[3].split() == ["instance", "state", "last", "line"]
    assert " · 1 instance · 1 replica · " in drawn(replace(JOB, num_replicas=1, instances=(plain,)), [Rate()])


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


def test_places_in_shared_replicas_have_columns() -> None:
    """Replica, stage and shard of each instance are there, also on a narrow terminal; of others there are none."""
    job = replace(JOB, parallelism=Parallelism(instances_per_replica=4, tensor=2, pipeline=2))
    wide, narrow = (drawn(job, [Rate()] * 3, width=width).splitlines() for width in (110, 40))

    assert wide[3].split()[:5] == ["instance", "replica", "stage", "shard", "host"]
    assert [line.split()[:4] for line in wide[5:8]] == [
        ["0", "0", "0", "0"],
        ["1", "0", "0", "1"],
        ["2", "0", "1", "0"],
    ]
    assert "shard" in narrow[3]
    assert "replica " not in drawn(JOB, [Rate()] * 3)
    assert "part" in drawn(replace(job, parallelism=Parallelism(instances_per_replica=2)), [Rate()] * 3)


class Terminal:
    """A terminal of some size, on which a console draws."""

    def __init__(self, width: int, height: int = 24) -> None:
        self._screen = pyte.Screen(width, height)
        self._stream = pyte.Stream(self._screen)
        self._file = StringIO()
        self.console = Console(file=self._file, force_terminal=True, color_system=None, width=width, height=height)

    def resize(self, width: int) -> None:
        """Make it narrower or wider."""
        self._screen.resize(columns=width)
        self.console.size = (width, self.console.height)

    @property
    def rows(self) -> list[str]:
        """What stands there, without empty rows at the end."""
        self._stream.feed(self._file.getvalue().replace("\n", "\r\n"))  # as the line discipline does
        self._file.seek(0)
        self._file.truncate()
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip().split("\n")


LONG = replace(
    JOB,
    program=("/bin/python", "train.py", "--epochs", "30", "--data", "/data/of/the/job"),
    instances=(replace(RUNNING, last_line="epoch 2 of 30, 512 samples each second"), WAITING),
)
BEFORE = replace(
    LONG,
    instances=tuple(
        replace(each, looked_at_seconds=98.0, num_steps=35, cpu_seconds=5.0) for each in LONG.instances
    ),
)

SCREENS = {
    40: """\
poprun 77  job 5f  /bin/python train.py…
running for 1 h 2 min · attempt 1

 instance   state     step   steps/s
 ───────────────────────────────────
        0   running   1200       2.5
        1   waits     1200       2.5""",
    60: """\
poprun 77  job 5f  /bin/python train.py --epochs 30 --data…
running for 1 h 2 min · attempt 1 · 2 instances · 6 replicas

 instance   host    state     step   steps/s     loss
 ────────────────────────────────────────────────────
        0   node0   running   1200       2.5   0.1235
        1   node1   waits     1200       2.5""",
    80: """\
poprun 77  job 5f  /bin/python train.py --epochs 30 --data /data/of/the/job
running for 1 h 2 min · attempt 1 · 2 instances · 6 replicas · 6.0 GiB

 instance   host    state     step   steps/s     loss    CPU    memory
 ─────────────────────────────────────────────────────────────────────
        0   node0   running   1200       2.5   0.1235   150%   3.0 GiB
        1   node1   waits     1200       2.5            150%   3.0 GiB""",
    120: """\
poprun 77  job 5f  /bin/python train.py --epochs 30 --data /data/of/the/job
running for 1 h 2 min · attempt 1 · 2 instances · 6 replicas · 6.0 GiB

 instance   host    state                        step   steps/s     loss    CPU    memory   last line
 ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
        0   node0   running                      1200       2.5   0.1235   150%   3.0 GiB   epoch 2 of 30, 512 samples…
        1   node1   waits: all_reduce(float32)   1200       2.5            150%   3.0 GiB   epoch 2""",  # noqa: E501 - as wide as the terminal
}


@pytest.mark.parametrize("width", SCREENS)
def test_columns_make_room_in_a_fixed_order(width: int) -> None:
    """No word is cut, and no line is wider than the terminal."""
    terminal = Terminal(width)
    draw_views((BEFORE, LONG), terminal.console, is_transient=False)

    assert "\n".join(terminal.rows) == SCREENS[width]


def test_each_drawing_takes_the_place_of_the_one_before_at_any_width() -> None:
    """Also where the terminal got narrower in between, and with what is said above it."""
    terminal = Terminal(120)

    def views() -> Iterator[JobView]:
        yield from (BEFORE, LONG)
        assert "\n".join(terminal.rows) == SCREENS[120]
        terminal.resize(40)
        yield LONG
        assert "\n".join(terminal.rows) == SCREENS[40]
        yield from (replace(LONG, said="where they stand:\n  line 7\x1b[2J"), LONG)
        assert "\n".join(terminal.rows) == "where they stand:\n  line 7\\x1b[2J\n" + SCREENS[40]

    draw_views(views(), terminal.console, is_transient=True)
    assert terminal.rows == ["where they stand:", "  line 7\\x1b[2J"]


@pytest.mark.parametrize(
    ("text", "width", "cut"),
    [
        ("one two", 7, "one two"),
        ("one two", 6, "one…"),
        ("one two three", 8, "one two…"),
        ("unbroken", 4, "unb…"),
        ("", 0, ""),
        ("日本 語", 5, "日本…"),
    ],
)
def test_what_is_too_long_is_cut_between_words(text: str, width: int, cut: str) -> None:
    """Letters of two columns count as two."""
    assert fit(text, width) == cut


def test_steps_of_one_moment_are_shown() -> None:
    """A view waits for the measurements that are on their way, and not for those of an instance that has ended."""
    seen = [
        InstanceStatus(
            index=index,
            usage=Usage(at_seconds=at, memory_bytes=5, cpu_seconds=1.5, num_processes=2),
            exit_code=code,
        )
        for index, at, code in ((0, 9.0, None), (1, 9.1, None), (2, 8.0, 0))
    ]

    assert is_of_one_moment(seen)
    assert is_of_one_moment([*seen, InstanceStatus(index=3)])
    assert not is_of_one_moment([*seen, replace(seen[2], exit_code=None)])
