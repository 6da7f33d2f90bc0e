"""Reports of jobs that never ran, with curves and phases as real ones have them."""

import json
import math
from dataclasses import replace

from popdist.ground.progress import Progress
from poprun.observe.account.curves import JobCurves
from poprun.observe.account.job_record import InstanceRecord, JobRecord
from poprun.observe.account.judgements import Slowness
from poprun.observe.account.state import InstanceState, InstanceStatus, MemoryCurve
from poprun.observe.judge.job_end import JobEnd
from poprun.observe.show.report_file import record_job
from poprun.text.ranges import parse_hosts
from tests.planning import CLUSTER_NODE, planned

PHASES = {"start": 0.02, "data": 0.1, "forward": 0.2, "backward": 0.4, "checkpoint": 0.03, "communication": 0.1}
"""Shares of an instance's time; the rest is spent outside."""

NETWORK = Slowness(
    instance=None,
    phase="communication",
    delay_seconds=0.048,
    share=0.39,
    since_seconds=5.0,
    since_step=120,
    hosts=("n1", "n2"),
)


def measured_end(num_instances: int, seconds: float, began_seconds: float = 0.0, *, names: int = 2) -> JobEnd:
    """An attempt whose instances report, all alike, a loss that falls to 0.25, and more numbers, 880 times."""
    curves = JobCurves(num_instances, 0.0)
    first = InstanceStatus(
        index=0,
        state=InstanceState.ENDED,
        exit_code=0,
        started_at_seconds=0.01 * seconds,
        exited_at_seconds=0.99 * seconds,
    )
    for look in range(10, 890):
        at = look * seconds / 900
        first = replace(first, progress=Progress(num_steps=40 * look))
        numbers = {"loss": 0.25 + math.exp(-at / seconds * 9), **{f"number {it}": it for it in range(1, names)}}
        event = {"num_processes": 1, "memory_bytes": 2**31 + look, "cpu_seconds": at * 3.5, "read_at_seconds": at}
        curves.add_look(first, {**event, "numbers": json.dumps([at, numbers])}, at)
    curves.instances = curves.instances[:1] * num_instances
    return JobEnd(
        statuses=[
            replace(first, index=index, memory=MemoryCurve(peak_bytes=2**31 + index))
            for index in range(num_instances)
        ],
        started_at_epoch_seconds=1_795_000_000 + began_seconds,
        seconds=seconds,
        curves=curves,
    )


def measured_job(num_instances: int, seconds: float, **last_lines: str) -> JobRecord:
    """Return the record of a job of one attempt on a slow network."""
    end = replace(
        measured_end(num_instances, seconds),
        last_lines={index: [*last_lines.values()] for index in range(num_instances)},
        slowdowns=[NETWORK],
        warnings=["the memory grows"],
    )
    hosts = parse_hosts("localhost" if num_instances < 16 else f"node[0-{num_instances // 8 - 1}]")
    plan = planned(CLUSTER_NODE, num_instances=num_instances, hosts=hosts)
    plan = replace(plan, program=("/usr/bin/python", "train.py"))
    job = record_job(plan, "a job", [end])
    (attempt,) = job.attempts
    instances = tuple(map(_with_phases, attempt.instances))
    return replace(job, attempts=(replace(attempt, instances=instances),))


def _with_phases(instance: InstanceRecord) -> InstanceRecord:
    ran = instance.duration_seconds or 0.0
    waiting = 0.0 if instance.index == 2 else 0.08
    phases = {**{name: it * ran for name, it in PHASES.items()}, "waiting": waiting * ran}
    return replace(instance, phase_seconds=phases)
