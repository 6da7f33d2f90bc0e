"""The report of a job as JSON: what stands in it.

Holds poprun.observe.account.field_types and poprun.observe.account.judgements.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from popdist.ground.progress import PhaseCounters, Progress
from popdist.startup.phase_sampler import PHASES
from poprun.devices.pool.records import HeldLease
from poprun.launch.messages.clock import Exchange
from poprun.observe.account.curves import JobCurves
from poprun.observe.account.evidence import Call, GroupRecord, Helper, InstanceEvidence, StackFrame, Stacks
from poprun.observe.account.job_record import read_report
from poprun.observe.account.judgements import Cause, Slowness, Verdict
from poprun.observe.account.last_words import LastWords
from poprun.observe.account.state import InstanceState, InstanceStatus, MemoryCurve
from poprun.observe.judge.findings import Findings
from poprun.observe.judge.job_end import JobEnd
from poprun.observe.show.printed_report import render_end
from poprun.observe.show.report_file import record_job, render_job
from poprun.plan.plan import LaunchPlan
from poprun.plan.plan_file import plan_to_dict
from poprun.plan.request import AskedMapping
from tests.planning import planned

PLAN = planned(num_instances=2, num_replicas=4)
COUNTERS = PhaseCounters(
    seconds={**dict.fromkeys(PHASES, 0.0), "forward": 1.0},
    idle_backward_seconds=0.0,
    disk_seconds=0.0,
    worker_seconds=0.0,
    message_seconds=0.0,
    long_forward_seconds=0.0,
    gc_seconds=0.0,
    began_at_seconds=10.5,
    num_optimizer_steps=7,
    num_samples=0,
)
SLOWDOWN = Slowness(
    instance=1,
    phase="data",
    delay_seconds=0.1,
    share=0.5,
    since_seconds=2.0,
    since_step=20,
    reasons=("its disk",),
)
GOOD = InstanceStatus(
    index=0,
    state=InstanceState.ENDED,
    exit_code=0,
    started_at_seconds=10.0,
    exited_at_seconds=12.25,
    memory=MemoryCurve().after(10.5, 1000).after(11.5, 3000).after(12.0, 2000),
    counters=COUNTERS,
)
KILLED = replace(GOOD, index=1, exit_code=-15, exited_at_seconds=11.0, counters=None)
THEN = 1_700_000_001
CALL = Call(name="all_reduce", number=3, sizes=((4,),), types=("float32",), is_done=False, begin_ns=THEN * 10**9)
EVIDENCE = InstanceEvidence(
    stacks=Stacks(threads=((StackFrame("train.py", 7, "main"),),)),
    helpers=(Helper(pid=9, process="process 9: ended"),),
    groups=(GroupRecord(name="0", num_called=3, num_done=2, calls=(CALL,)),),
    held_locks=("08:01:7",),
    awaited_locks=(("08:01:8", "process 9"),),
    full_disks=("/tmp",),
)
VERDICT = Verdict(
    cause=Cause.EXCEPTION,
    culprits=(1,),
    victims=(0,),
    places={1: "train.py:3"},
    details=("a",),
    since_epoch_seconds=THEN,
)
ROUNDS = {"n2": [Exchange(0, 1_500_000_000, 0), Exchange(10**9, 2_500_000_000, 10**9)], "n3": []}
END = JobEnd(
    statuses=[GOOD, KILLED],
    started_at_epoch_seconds=1_700_000_000.5,
    began_at_seconds=7.0,
    seconds=3.0,
    launcher_code=0,
    stop_reason="instance 1 failed",
    evidence={0: EVIDENCE},
    warnings=["memory"],
    slowdowns=[SLOWDOWN],
    clock_rounds=ROUNDS,
    findings=Findings(words={1: LastWords(summary="ValueError: x", lines=("ValueError: x",))}, verdict=VERDICT),
)
LEASE = HeldLease(host="n1", names=("GPU 0", "GPU 1"), pool="/pool", partition="p")

NO_STACKS: Any = {"threads": [], "processes": []}
JOB = {
    "version": 1,
    "poprun_version": "0.1.0",
    "job_id": "j",
    "is_over": True,
    "exit_code": 143,
    "error": "",
    "plan": plan_to_dict(PLAN),
    "leases": [{"host": "n1", "held": ["GPU 0", "GPU 1"], "partition": "p", "pool": "/pool"}],
    "provenance": {},
    "attempts": [
        {
            "is_over": True,
            "started_at": "2023-11-14T22:13:20.500Z",
            "ended_at": "2023-11-14T22:13:23.500Z",
            "duration_seconds": 3.0,
            "exit_code": 143,
            "stop_reason": "instance 1 failed",
            "first_failure": 1,
            "launcher_exit_code": 0,
            "launcher_excerpt": [],
            "survivors": [],
            "printed": render_end(END, PLAN),
            "verdict": {
                "cause": "exception",
                "culprits": [1],
                "victims": [0],
                "torn_down": [],
                "places": {"1": "train.py:3"},
                "details": ["a"],
                "since_epoch_seconds": THEN,
                "advice": "",
            },
            "clocks": {
                "n2": {
                    "at_ns": 0,
                    "offset_seconds": 1.5,
                    "uncertainty_seconds": 0.0,
                    "drift": 0.0,
                    "drift_uncertainty": 0.0,
                }
            },
            "curves": {},
            "warnings": ["memory"],
            "slowdowns": [
                {
                    "instance": 1,
                    "phase": "data",
                    "delay_seconds": 0.1,
                    "share": 0.5,
                    "since_seconds": 2.0,
                    "since_step": 20,
                    "until_seconds": None,
                    "reasons": ["its disk"],
                    "num_windows": 0,
                    "hosts": [],
                }
            ],
            "instances": [
                {
                    "index": 0,
                    "host": "localhost",
                    "replicas": "0-1",
                    "ipus": "0-1",
                    "devices": [],
                    "exit_code": 0,
                    "signal": "",
                    "was_stopped": False,
                    "problem": "",
                    "hint": "",
                    "excerpt": [],
                    "began_seconds": 3.0,
                    "duration_seconds": 2.25,
                    "peak_memory_bytes": 3000,
                    "memory": [[0.5, 1000], [1.5, 3000], [2.0, 2000]],
                    "num_steps": 7,
                    "last_lines": [],
                    "curves": {},
                    "phase_seconds": {**dict.fromkeys(PHASES, 0.0), "start": 1.25, "forward": 1.0, "waiting": 0.0},
                    "evidence": {
                        "stacks": {
                            "threads": [[{"file": "train.py", "line": 7, "function": "main"}]],
                            "processes": [],
                        },
                        "helpers": [{"pid": 9, "process": "process 9: ended", "stacks": NO_STACKS}],
                        "groups": [
                            {
                                "name": "0",
                                "ranks": [],
                                "num_called": 3,
                                "num_done": 2,
                                "calls": [
                                    {
                                        "name": "all_reduce",
                                        "number": 3,
                                        "sizes": [[4]],
                                        "types": ["float32"],
                                        "is_done": False,
                                        "begin_ns": THEN * 10**9,
                                    }
                                ],
                            }
                        ],
                        "crash": NO_STACKS,
                        "held_locks": ["08:01:7"],
                        "awaited_locks": {"08:01:8": "process 9"},
                        "ended_children": [],
                        "full_disks": ["/tmp"],
                    },
                },
                {
                    "index": 1,
                    "host": "localhost",
                    "replicas": "2-3",
                    "ipus": "2-3",
                    "devices": [],
                    "exit_code": 143,
                    "signal": "SIGTERM",
                    "was_stopped": False,
                    "problem": "",
                    "hint": "sent by somebody other than poprun, such as a batch system",
                    "excerpt": ["ValueError: x"],
                    "began_seconds": 3.0,
                    "duration_seconds": 1.0,
                    "peak_memory_bytes": 3000,
                    "memory": [[0.5, 1000], [1.5, 3000], [2.0, 2000]],
                    "num_steps": None,
                    "last_lines": [],
                    "curves": {},
                    "phase_seconds": {},
                    "evidence": None,
                },
            ],
        }
    ],
}


def written(plan: LaunchPlan | None, ends: Sequence[JobEnd], **others: Any) -> dict[str, Any]:
    """The report as its readers get it."""
    job: dict[str, Any] = json.loads(render_job(record_job(plan, "j", ends, **others)))
    return job


def test_every_key_of_the_report() -> None:
    """Whoever reads the file counts on them; a change of one is a new version."""
    job = written(PLAN, [END], leases=[LEASE])
    assert job.pop("written_at").endswith("Z")
    assert job == JOB
    assert "[1.5, 3000],\n" in render_job(record_job(PLAN, "j", [END]))


def test_a_report_is_read_as_it_was_written() -> None:
    """Each value has one dataclass, which both judges and the report use."""
    job = record_job(PLAN, "j", [END], leases=[LEASE])
    assert read_report(render_job(job), "r.json") == job


def test_a_job_that_could_not_be_started_has_a_report() -> None:
    """With the error, and with what never happened left open."""
    never = replace(END, statuses=[InstanceStatus(index=0), InstanceStatus(index=1)], launcher_code=None)
    job = written(PLAN, [], error="cannot run mpiexec")
    attempt = written(PLAN, [never])["attempts"]

    assert (job["exit_code"], job["error"], job["attempts"]) == (None, "cannot run mpiexec", [])
    assert isinstance(attempt, list)
    assert [instance["exit_code"] for instance in attempt[0]["instances"]] == [None, None]
    assert attempt[0]["instances"][0]["peak_memory_bytes"] is None


def test_a_job_that_runs_has_a_report_and_curves() -> None:
    """No exit code yet; beyond 16 instances the curves are those of all together."""
    curves = JobCurves(2, 10.0)
    look = {"num_processes": 1, "memory_bytes": 10, "cpu_seconds": 1.0}
    for status in (GOOD, KILLED):
        curves.add_look(replace(status, progress=Progress(num_steps=3)), look, 10.5)
    running = replace(END, is_over=False, curves=curves, last_lines={1: ["epoch 1"]})
    many = [replace(GOOD, index=index) for index in range(17)]
    job = written(PLAN, [END, running])
    folded = written(planned(num_instances=17), [replace(running, statuses=many)])
    attempts: Any = job["attempts"]
    of_all: Any = folded["attempts"]
    memory = {"unit": "bytes", "seconds": [1.0], "values": [10.0], "last": 10}

    assert (job["is_over"], job["exit_code"]) == (False, None)
    assert [(it["is_over"], it["exit_code"], it["ended_at"]) for it in attempts[1:]] == [(False, None, None)]
    assert [it["curves"] for it in attempts[1]["instances"]] == [{"memory": memory}] * 2
    assert attempts[1]["instances"][1]["last_lines"] == ["epoch 1"]
    assert [it["curves"] for it in of_all[0]["instances"]] == [{}] * 17
    assert of_all[0]["curves"]["memory"]["median"] == [10.0]


def test_an_instance_of_a_shared_replica_has_its_place() -> None:
    """Beside its replica the report has stage and shard; reports of other jobs are as they were."""
    plan = planned(num_instances=2, mapping=AskedMapping(text="pp=2", pipeline=2))
    attempts = written(plan, [END])["attempts"]

    assert isinstance(attempts, list)
    places = [instance["place"] for instance in attempts[0]["instances"]]
    assert places == [{"replica": 0, "stage": 0, "shard": 0}, {"replica": 0, "stage": 1, "shard": 0}]


def test_the_documents_name_every_key() -> None:
    """The table of the report's keys is complete."""
    table = (Path(__file__).parents[2] / "docs" / "poprun-options.md").read_text(encoding="utf-8")
    keys = {*JOB, *END_KEYS, *INSTANCE_KEYS}

    assert {key for key in keys if f"`{key}`" not in table} == set()


END_KEYS = set(written(PLAN, [END])["attempts"][0])
INSTANCE_KEYS = set(written(PLAN, [END])["attempts"][0]["instances"][0])
