"""Exit codes, the report of a failure, and the instance that called MPI_Abort, from values alone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist.ground.progress import Progress
from poprun.observe.account.judgements import Cause, Verdict
from poprun.observe.account.last_words import LastWords, last_words
from poprun.observe.account.state import SHIM_KILLED, InstanceState, InstanceStatus, describe_code
from poprun.observe.judge.findings import Findings
from poprun.observe.judge.job_end import JobEnd, exit_code, first_failure, num_lone
from poprun.observe.show.printed_report import blame_aborter, explain, render_attempts, render_end, render_warning
from poprun.plan.request import AskedMapping
from tests.planning import CLUSTER_NODE, planned

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


GOOD = InstanceStatus(index=0, state=InstanceState.ENDED, exit_code=0, exited_at_seconds=5.0)
BAD = replace(GOOD, index=1, exit_code=7, exited_at_seconds=3.0)
CRASHED = replace(BAD, index=2, exit_code=-11, exited_at_seconds=2.0)
STOPPED = replace(GOOD, index=3, exit_code=-15, was_stopped=True, exited_at_seconds=1.0)
LET_DOWN = replace(STOPPED, index=4, problem=SHIM_KILLED)
SHIMLESS = InstanceStatus(index=6, state=InstanceState.ENDED, problem=SHIM_KILLED, exited_at_seconds=0.5)
LOST = InstanceStatus(index=5, state=InstanceState.ENDED, problem="its agent was killed", exited_at_seconds=0.5)

TABLE = [
    (JobEnd(statuses=[GOOD]), 0),
    (JobEnd(statuses=[GOOD, BAD]), 7),
    (JobEnd(statuses=[BAD, CRASHED]), 139),
    (JobEnd(statuses=[GOOD, STOPPED, BAD]), 7),
    (JobEnd(statuses=[GOOD, STOPPED], num_interrupts=1), 130),
    (JobEnd(statuses=[GOOD, BAD], num_interrupts=1), 7),
    (JobEnd(statuses=[STOPPED], is_terminated=True), 143),
    (JobEnd(statuses=[GOOD, STOPPED], is_terminated=True), 143),
    (JobEnd(statuses=[GOOD], is_terminated=True), 0),
    (
        JobEnd(
            statuses=[replace(STOPPED, exit_code=143), replace(STOPPED, index=1, exit_code=3)], is_terminated=True
        ),
        3,
    ),
    (JobEnd(statuses=[replace(STOPPED, exit_code=-9)], is_terminated=True), 143),
    (
        JobEnd(
            statuses=[STOPPED], num_interrupts=1, has_started=False, launcher_ended_early=True, launcher_code=-2
        ),
        130,
    ),
    (JobEnd(statuses=[GOOD], is_terminated=True, has_started=False), 143),
    (JobEnd(statuses=[STOPPED], is_timed_out=True, stop_reason="x"), 124),
    (JobEnd(statuses=[STOPPED, BAD], is_timed_out=True, stop_reason="x"), 124),
    (JobEnd(statuses=[STOPPED], is_hung=True, stop_reason="x"), 75),
    (JobEnd(statuses=[STOPPED, LOST], is_hung=True, stop_reason="x"), 75),
    (JobEnd(statuses=[STOPPED], is_output_closed=True), 141),
    (JobEnd(statuses=[LET_DOWN], launcher_code=-9), 137),
    (JobEnd(statuses=[LET_DOWN, BAD], launcher_code=-9), 7),
    (JobEnd(statuses=[LOST], launcher_code=0), 137),
    (JobEnd(statuses=[SHIMLESS], launcher_code=0), 137),
    (JobEnd(statuses=[SHIMLESS], launcher_code=0, has_started=False), 70),
    (JobEnd(statuses=[STOPPED], launcher_ended_early=True, launcher_code=3, stop_reason="x"), 3),
    (JobEnd(statuses=[STOPPED], launcher_ended_early=True, launcher_code=0, stop_reason="x"), 70),
    (
        JobEnd(statuses=[GOOD], has_started=False, launcher_ended_early=True, launcher_code=255, stop_reason="x"),
        70,
    ),
    (JobEnd(statuses=[STOPPED], stop_reason="1 of 1 agents have not reported"), 70),
]


@pytest.mark.parametrize(("end", "code"), TABLE)
def test_the_first_failure_gives_the_exit_code(end: JobEnd, code: int) -> None:
    """A signal counts from 128; a death that poprun asked for is no failure; who failed alone comes first."""
    assert exit_code(end) == code


def test_who_failed_alone_comes_before_who_was_let_down() -> None:
    """An instance whose launcher was lost is not the cause when another one failed by itself."""
    assert first_failure([LET_DOWN, BAD]) is BAD
    assert first_failure([GOOD, STOPPED]) is None


def test_codes_are_told_in_words() -> None:
    """Signals by name, exit codes as they are, and what a shell made of a signal as that."""
    assert describe_code(3) == "exit code 3"
    assert describe_code(255) == "exit code 255"
    assert describe_code(137) == "exit code 137, which stands for SIGKILL"
    assert describe_code(-11) == "SIGSEGV, segmentation fault"
    assert describe_code(-40).startswith("signal 40")


@given(
    st.lists(st.sampled_from([GOOD, BAD, CRASHED, STOPPED, LET_DOWN, LOST]), min_size=1, max_size=200),
    st.lists(st.lists(st.text(max_size=300), max_size=40), min_size=1, max_size=20),
    st.lists(st.integers(1, 2**22), max_size=50),
)
def test_a_report_has_at_most_fifteen_lines(
    statuses: list[InstanceStatus], tails: list[list[str]], survivors: list[int]
) -> None:
    """At any instance count, whatever the programs printed; and no line is long."""
    numbered = [replace(status, index=index) for index, status in enumerate(statuses)]
    words = [last_words(tail) for tail in tails]
    end = JobEnd(
        statuses=numbered,
        stop_reason="x",
        survivors=tuple(survivors),
        findings=Findings(
            words={index: words[index % len(words)] for index in range(len(numbered))}, launcher_words=words[0]
        ),
    )
    lines = render_end(end, planned(num_instances=len(numbered)))

    assert len(lines) <= 15
    assert all(len(line) <= 240 and "\n" not in line for line in lines)


def test_the_report_of_a_failure() -> None:
    """Which instance, where, how, its last words, and how the others ended."""
    plan = planned(num_instances=4, num_replicas=8)
    words = {1: last_words(["ValueError: bad batch"])}
    end = JobEnd(statuses=[GOOD, BAD, replace(STOPPED, index=2), STOPPED], findings=Findings(words=words))

    assert render_end(end, plan) == [
        "instance 1 failed first: exit code 7 (host localhost, replicas 2-3)",
        "  | ValueError: bad batch",
        "  instance 0          ended with 0",
        "  instances 2 and 3   stopped by poprun: SIGTERM",
    ]


def test_failures_alike_are_one_line() -> None:
    """The same code and the same words but for numbers; one that failed while poprun stopped it is one, too."""
    said = {index: LastWords(summary=f"ValueError: no data for rank {index}") for index in range(8)}
    said |= {2: LastWords(summary="KeyError: 'lr'")}
    bad = [replace(BAD, index=index, was_stopped=index > 5, exited_at_seconds=float(index)) for index in range(8)]
    end = JobEnd(
        statuses=[*bad, replace(STOPPED, index=8), replace(BAD, index=9, exit_code=3)],
        findings=Findings(words=said),
    )

    assert render_end(end, planned(num_instances=10))[1:] == [
        "  instances 1 and 3 to 7   failed in the same way",
        "  instance 2               failed, too: exit code 7: KeyError: 'lr'",
        "  the others               ended in 2 further ways",
    ]


def test_an_instance_may_end_by_itself_while_poprun_stops_it() -> None:
    """Its exit code and its last words are told; whether it failed or saved its work, nobody knows."""
    stopped = [replace(STOPPED, index=index, exit_code=1) for index in range(1, 3)]
    said = {2: LastWords(summary="KeyError: 'lr'")}
    end = JobEnd(statuses=[replace(BAD, index=0), *stopped], findings=Findings(words=said))

    assert render_end(end, planned(num_instances=3))[1:] == [
        "  instance 1   ended while poprun stopped the job: exit code 1",
        "  instance 2   ended while poprun stopped the job: exit code 1: KeyError: 'lr'",
    ]


def test_what_poprun_ended_has_not_failed_in_the_same_way() -> None:
    """A killed instance and one that poprun killed have the same code, and may have the same last words."""
    statuses = [replace(CRASHED, index=0, exit_code=-9), replace(STOPPED, index=1, exit_code=-9)]
    said = dict.fromkeys(range(2), LastWords(summary="epoch 1"))

    assert render_end(JobEnd(statuses=statuses, findings=Findings(words=said)), planned(num_instances=2))[-1] == (
        "  instance 1   killed by poprun: SIGKILL, not ended within --stop-timeout"
    )


def test_an_error_on_the_way_out_is_told() -> None:
    """Its program was asked to end, to save, and has not: as from any failure, with what it said last."""
    failed = replace(GOOD, index=1, exit_code=1, was_stopped=True)
    end = JobEnd(statuses=[replace(GOOD, exit_code=143, was_stopped=True), failed], is_terminated=True)

    lines = render_end(end, planned(num_instances=2))

    assert lines[0] == "instance 1 failed when it was asked to end: exit code 1 (host localhost, replica 1)"


@pytest.mark.parametrize(("num_interrupts", "num_lines"), [(0, 1), (1, 1), (2, 0)])
def test_who_was_killed_while_saving_is_told_the_option(num_interrupts: int, num_lines: int) -> None:
    """In one line; not after a second Ctrl-C, which asked for it."""
    late = [replace(GOOD, index=index, exit_code=-9, was_stopped=True) for index in range(2)]
    end = JobEnd(statuses=late, is_terminated=not num_interrupts, num_interrupts=num_interrupts)
    line = (
        "instances 0 and 1 were killed, not having ended 5 s after the request: "
        "a longer --stop-timeout leaves time to save"
    )

    assert render_end(end, planned(num_instances=2)) == [line] * num_lines


def test_a_good_end_is_silent() -> None:
    """So is one that the user asked for."""
    assert render_end(JobEnd(statuses=[GOOD]), planned()) == []
    assert render_end(JobEnd(statuses=[STOPPED], num_interrupts=1, stop_reason="x"), planned()) == []


def test_the_tracebacks_of_ctrl_c_are_one_line() -> None:
    """Whose they were."""
    end = JobEnd(statuses=[STOPPED], num_interrupts=1, interrupted=(0, 1, 2, 3))

    assert render_end(end, planned()) == ["interrupted: instances 0 to 3"]


def test_a_program_that_left_has_not_failed() -> None:
    """It saved and ended with 143 by itself; what an agent ended, because a shim was lost, did not."""
    left = JobEnd(statuses=[replace(BAD, exit_code=143), STOPPED], seconds=2.0)
    lost = JobEnd(statuses=[replace(BAD, exit_code=143, problem=SHIM_KILLED)])

    assert render_end(left, planned(num_instances=2)) == ["the program left when it was asked to: exit code 143"]
    assert render_attempts([lost, left])[1] == "attempt 1: left when it was asked to, 2 s"
    assert SHIM_KILLED in render_attempts([lost, left])[0]


def test_who_leaves_mpi_too_early_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """MPICH ends a job when a process ends without MPI_Finalize; an instance that ends later has no part in it."""
    lost = replace(LET_DOWN, index=0, exited_at_seconds=6.0)
    later = replace(GOOD, index=2, exited_at_seconds=7.0)
    end = JobEnd(statuses=[lost, replace(GOOD, index=1), later], launcher_code=0)
    explain(end, planned(CLUSTER_NODE, num_instances=3), {}, [], None)
    explain(end, planned(num_instances=3), {}, [], None)

    said = capsys.readouterr().err
    assert said.count("ends without MPI_Finalize: instance 1 had ended with 0\n") == 1
    assert "sent by somebody other" not in said  # the agent sent it


def test_hydra_says_on_which_host_a_shim_was_killed_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that Hydra killed then may be heard of before; its own code and words are a consequence."""
    lost = [replace(SHIMLESS, index=index, exited_at_seconds=9.0 - (index == 0)) for index in range(2)]
    end = JobEnd(statuses=lost, launcher_code=255)
    output = ["=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES", "=   PID 219 RUNNING AT b", "[n1] HYD"]
    explained = explain(end, planned(CLUSTER_NODE, hosts=("a", "b"), num_instances=2), {}, output, None)

    said = capsys.readouterr().err
    assert exit_code(explained) == 137
    assert "instance 1 failed first: its shim was killed (host b, replica 1)" in said
    assert "HYD" not in said


def test_no_traceback_of_a_shim_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Below a launcher only shims run Python before the program does; what the runtime itself says is kept."""
    end = JobEnd(
        statuses=[GOOD], has_started=False, launcher_ended_early=True, launcher_code=255, stop_reason="it ended"
    )
    output = [
        "Traceback (most recent call last):",
        '  File "x.py", line 1',
        "KeyboardInterrupt",
        "[n1] no host n2",
    ]

    explain(end, planned(num_instances=1), {}, output, None)

    told = capsys.readouterr().err
    assert "[n1] no host n2" in told
    assert "Traceback" not in told
    assert "KeyboardInterrupt" not in told


def test_processes_that_trained_alone_are_told_of_in_one_line() -> None:
    """Several of them, in a job in which popdist was not used; what is said of replicas is the same cause."""
    plan = planned(num_instances=2, num_replicas=4)
    lone = [replace(GOOD, index=index, progress=Progress(has_trained_alone=True)) for index in range(2)]
    joined = [lone[0], replace(lone[1], progress=Progress(has_joined=True))]

    line = render_warning(JobEnd(statuses=lone), plan)

    assert line.startswith(
        "warning: 2 processes trained alone, each a model of its own, if they trained: neither popdist nor "
    )
    assert "replicas" not in line
    assert render_warning(JobEnd(statuses=joined), plan) == ""
    assert "trained alone" not in render_warning(JobEnd(statuses=[lone[0], replace(GOOD, index=1)]), plan)
    assert render_warning(JobEnd(statuses=lone, has_told_lone=True), plan) == ""
    assert num_lone(lone[:1]) == 0


def test_a_failure_in_a_shared_replica_names_stage_and_shard() -> None:
    """And what the others have in common with each other; a job that does not use popdist is not warned of it."""
    plan = planned(num_instances=8, mapping=AskedMapping(text="tp=2,pp=2", tensor=2, pipeline=2))
    failed = InstanceStatus(index=6, state=InstanceState.ENDED, exit_code=-9, exited_at_seconds=1.0)
    others = [replace(stopped(index), problem="") for index in range(8) if index != 6]
    alike = replace(failed, index=7, exited_at_seconds=2.0)
    end = JobEnd(statuses=[*others[:6], failed, alike])

    lines = render_end(end, plan)

    assert lines[0].endswith("(host localhost, replica 1, stage 1, shard 0)")
    assert any(line.startswith("  instance 7 (replica 1, stage 1, shard 1)") for line in lines)
    assert render_warning(JobEnd(statuses=[InstanceStatus(index=0)]), plan) == ""


def test_calls_that_differ_are_told_once() -> None:
    """The verdict has them; the message of popdist, which has them too, is not shown below it."""
    text = "popdist.errors.CollectiveError: the instances are not in the same collective:"
    words = {
        0: LastWords(summary=text, lines=("Traceback (most recent call last):", text, "  instance 0: barrier()"))
    }
    end = JobEnd(statuses=[replace(GOOD, exit_code=1), stopped(1)], findings=Findings(words=words))
    verdict = Verdict(cause=Cause.MISMATCH, details=("instance 0: barrier()",))
    told = replace(end, findings=replace(end.findings or Findings(), verdict=verdict))

    assert f"  | {text}" in render_end(end, planned(num_instances=2))
    assert not any(text in line for line in render_end(told, planned(num_instances=2)))
    assert "  instance 0: barrier()" in render_end(told, planned(num_instances=2))
