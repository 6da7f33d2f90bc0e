"""The supervisor's policy, as a table: what is seen, what is decided."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun.job.policy import Action, decide
from poprun.observe.account.state import JobSnapshot, Phase
from poprun.plan.request import EndingSettings

ENDING = EndingSettings(timeout_seconds=100, hang_report_seconds=20, hang_timeout_seconds=30)
STARTING = JobSnapshot(phase=Phase.STARTING, in_phase_seconds=1, num_instances=4)
RUNNING = replace(STARTING, phase=Phase.RUNNING, in_phase_seconds=1e6)
INTERRUPTED = replace(RUNNING, phase=Phase.INTERRUPTED, in_phase_seconds=1, num_interrupts=1)
STOPPING = replace(RUNNING, phase=Phase.STOPPING, in_phase_seconds=1)
KILLING = replace(RUNNING, phase=Phase.KILLING, in_phase_seconds=1)

TABLE = [
    (replace(STARTING, num_ready=3), Action.WAIT),
    (replace(STARTING, num_ready=4), Action.START),
    (replace(STARTING, in_phase_seconds=60), Action.STOP),
    (replace(STARTING, has_launcher_ended=True), Action.STOP),
    (replace(STARTING, num_interrupts=1), Action.STOP),
    (replace(STARTING, has_lost_shim=True), Action.STOP),
    (replace(STARTING, no_shim_seconds=9), Action.WAIT),
    (replace(STARTING, no_shim_seconds=10), Action.STOP),
    (replace(STARTING, no_shim_seconds=0.9, num_ready=1), Action.WAIT),
    (replace(STARTING, no_shim_seconds=1, num_ready=1), Action.STOP),
    (replace(STARTING, in_job_seconds=100), Action.TIME_OUT),
    (RUNNING, Action.WAIT),
    (replace(RUNNING, in_job_seconds=99.9), Action.WAIT),
    (replace(RUNNING, in_job_seconds=100), Action.TIME_OUT),
    (replace(STOPPING, in_job_seconds=100), Action.WAIT),
    (replace(RUNNING, num_ended=3), Action.WAIT),
    (replace(RUNNING, num_ended=4), Action.FINISH),
    (replace(RUNNING, failed_instance=0), Action.STOP),
    (replace(RUNNING, failed_instance=0, has_recorders=True), Action.ASK),
    (replace(RUNNING, failed_instance=0, has_recorders=True, awaits_culprit=True), Action.WAIT),
    (replace(RUNNING, failed_instance=0, awaits_evidence=True), Action.WAIT),
    (replace(RUNNING, failed_instance=0, awaits_evidence=True, is_terminated=True), Action.STOP),
    (replace(INTERRUPTED, failed_instance=0, has_recorders=True), Action.WAIT),
    (replace(RUNNING, is_terminated=True), Action.STOP),
    (replace(RUNNING, is_output_closed=True), Action.STOP),
    (replace(RUNNING, has_launcher_ended=True), Action.STOP),
    (replace(RUNNING, num_interrupts=1), Action.INTERRUPT),
    (replace(RUNNING, num_interrupts=2), Action.KILL),
    (INTERRUPTED, Action.WAIT),
    (replace(INTERRUPTED, failed_instance=1), Action.WAIT),
    (replace(INTERRUPTED, in_phase_seconds=5), Action.STOP),
    (replace(INTERRUPTED, num_interrupts=2), Action.KILL),
    (replace(INTERRUPTED, is_terminated=True), Action.STOP),
    (replace(RUNNING, hang_seconds=19.9), Action.WAIT),
    (replace(RUNNING, hang_seconds=20), Action.REPORT_HANG),
    (replace(RUNNING, hang_seconds=20, is_hang_suspected=True), Action.REPORT_HANG),
    (replace(RUNNING, hang_seconds=99, is_hang_suspected=True, is_hang_told=True), Action.WAIT),
    (replace(RUNNING, hang_seconds=20, awaits_stacks=True), Action.WAIT),
    (replace(RUNNING, hang_seconds=29.9, is_hang_told=True), Action.WAIT),
    (replace(RUNNING, hang_seconds=30), Action.REPORT_HANG),
    (replace(RUNNING, hang_seconds=30, is_hang_told=True, awaits_stacks=True), Action.WAIT),
    (replace(RUNNING, hang_seconds=30, is_hang_told=True), Action.STOP_HUNG),
    (replace(RUNNING, hang_seconds=30, is_hang_told=True, failed_instance=0), Action.STOP),
    (replace(INTERRUPTED, hang_seconds=30, is_hang_told=True), Action.WAIT),
    (STOPPING, Action.WAIT),
    (replace(STOPPING, in_phase_seconds=5.9), Action.WAIT),
    (replace(STOPPING, in_phase_seconds=6), Action.KILL),
    (replace(STOPPING, num_interrupts=1), Action.WAIT),
    (replace(STOPPING, num_interrupts=2), Action.KILL),
    (KILLING, Action.WAIT),
    (replace(KILLING, in_phase_seconds=4.9), Action.WAIT),
    (replace(KILLING, in_phase_seconds=5), Action.FINISH),
]


@pytest.mark.parametrize(("snapshot", "action"), TABLE)
def test_each_snapshot_has_its_decision(snapshot: JobSnapshot, action: Action) -> None:
    """One row, one decision; a decision to do something says why."""
    decision = decide(snapshot, ENDING)

    assert decision.action is action
    assert bool(decision.reason) is (action is not Action.WAIT)


snapshots = st.builds(
    JobSnapshot,
    phase=st.sampled_from(Phase),
    in_phase_seconds=st.floats(0, 100),
    in_job_seconds=st.floats(0, 200),
    has_lost_shim=st.booleans(),
    no_shim_seconds=st.floats(0, 20),
    hang_seconds=st.floats(0, 50),
    is_hang_told=st.booleans(),
    awaits_stacks=st.booleans(),
    num_instances=st.integers(1, 8),
    num_ready=st.integers(0, 8),
    num_ended=st.integers(0, 7),
    failed_instance=st.none() | st.integers(0, 7),
    num_interrupts=st.integers(0, 3),
    is_terminated=st.booleans(),
    is_output_closed=st.booleans(),
    has_launcher_ended=st.booleans(),
)


@given(snapshots)
def test_a_job_never_goes_back(snapshot: JobSnapshot) -> None:
    """No decision leads to an earlier phase, so every job ends."""
    target = {
        Action.START: Phase.RUNNING,
        Action.INTERRUPT: Phase.INTERRUPTED,
        Action.STOP: Phase.STOPPING,
        Action.TIME_OUT: Phase.STOPPING,
        Action.STOP_HUNG: Phase.STOPPING,
        Action.KILL: Phase.KILLING,
    }
    action = decide(snapshot, ENDING).action

    assert action not in target or target[action] > snapshot.phase


@given(snapshots)
def test_every_wait_of_a_stop_is_bounded(snapshot: JobSnapshot) -> None:
    """Once a job is to end, no phase lasts longer than its limit."""
    late = replace(snapshot, in_phase_seconds=ENDING.stop_timeout_seconds + 1)

    assert late.phase <= Phase.RUNNING or decide(late, ENDING).action is not Action.WAIT


@pytest.mark.parametrize(
    ("report", "timeout", "action"),
    [
        (None, None, Action.WAIT),
        (None, 30, Action.REPORT_HANG),
        (20, None, Action.REPORT_HANG),
        (1000, 30, Action.REPORT_HANG),
        (1000, None, Action.WAIT),
    ],
)
def test_a_hang_is_told_of_before_it_ends_a_job(
    report: float | None, timeout: float | None, action: Action
) -> None:
    """Also where only ``--hang-timeout`` is set."""
    ending = replace(ENDING, hang_report_seconds=report, hang_timeout_seconds=timeout)

    assert decide(replace(RUNNING, hang_seconds=40), ending).action is action
