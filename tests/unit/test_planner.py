"""What was asked and what the machine has decide the plan, and nothing else does.

Holds poprun.plan.topology.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun.errors import MpiNotFoundError, PlanError
from poprun.plan.plan import LauncherKind
from poprun.plan.planner import make_plan
from poprun.plan.request import EndingSettings, LauncherChoice, LaunchRequest, OutputSettings
from poprun.plan.topology import ProcessPlacement
from tests.machines import EIGHT_NODES, TWO_SOCKETS, facts_of
from tests.planning import CLUSTER_NODE, LAPTOP, MPICH, planned, with_gpus


def test_debugging_is_a_matter_of_variables() -> None:
    """What the user says of the same variables is left alone."""
    plan = planned(is_debugged=True, mpi_local_args=("-x", "PYTHONFAULTHANDLER=0"))

    assert plan.variables == (("PYTHONFAULTHANDLER", "0"), ("TORCH_DISTRIBUTED_DEBUG", "INFO"))


def test_the_plan_for_nothing_asked() -> None:
    """One instance with one replica on this machine, with all of its cores."""
    plan = make_plan(LaunchRequest(program=("/bin/true",)), LAPTOP)

    assert (plan.num_instances, plan.num_replicas, plan.hosts) == (1, 1, ("localhost",))
    assert (plan.threads_per_replica, plan.devices, plan.launcher) == (4, (), LauncherKind.LOCAL)
    assert plan.instance(0).cores == (0, 1, 2, 3)


def test_replicas_default_to_instances() -> None:
    """One replica per instance."""
    assert planned(num_instances=3).num_replicas == 3


@pytest.mark.parametrize(
    ("gpus", "asked", "instances"),
    [
        ("", {}, 1),
        ("ffff", {}, 4),
        ("fbfb", {}, 2),
        ("bb", {}, 1),
        ("ffff", {"ipus_per_replica": 2}, 2),
        ("fff", {"ipus_per_replica": 4}, 1),
        ("fff", {"num_replicas": 4}, 2),
        ("ffff", {"num_replicas": 2}, 2),
        ("ffff", {"hosts": ("a", "b")}, 8),
        ("", {"hosts": ("a", "b")}, 2),
    ],
)
def test_auto_is_one_instance_per_free_gpu(gpus: str, asked: dict[str, Any], instances: int) -> None:
    """``auto`` takes one instance for each replica's worth of free GPUs, as far as the replicas divide."""
    assert planned(with_gpus(gpus), num_instances=None, **asked).num_instances == instances


@pytest.mark.parametrize(
    ("gpus", "instances", "ipus", "devices"),
    [
        ("ffff", 2, 1, ("0", "1")),
        ("bfbf", 2, 1, ("1", "3")),
        ("bfbf", 3, 1, ("0", "1", "3")),
        ("ffff", 2, 2, ("0", "1", "2", "3")),
        ("ff", 3, 1, ()),
        ("ffff", 2, 3, ()),
        ("", 1, 1, ()),
    ],
)
def test_free_gpus_come_first(gpus: str, instances: int, ipus: int, devices: tuple[str, ...]) -> None:
    """A host's virtual IPUs are its GPUs when they suffice, free ones before busy ones, in slot order."""
    assert planned(with_gpus(gpus), num_instances=instances, ipus_per_replica=ipus).devices == devices


@pytest.mark.parametrize(
    ("asked", "user", "threads"),
    [
        ({"num_replicas": 1}, None, 4),
        ({"num_replicas": 2}, None, 2),
        ({"num_replicas": 3}, None, 1),
        ({"num_replicas": 9}, None, 1),
        ({"num_instances": 2, "num_replicas": 2, "hosts": ("a", "b")}, None, 4),
        ({"num_replicas": 1}, "", 4),
        ({"num_replicas": 1}, "7", None),
        ({"num_replicas": 1, "threads_per_replica": 3}, "7", 3),
    ],
)
def test_threads_belong_to_the_replica(asked: dict[str, Any], user: str | None, threads: int | None) -> None:
    """The job's cores are shared out to the replicas, unless the user says otherwise."""
    assert planned(replace(LAPTOP, user_num_threads=user), **asked).threads_per_replica == threads


@given(st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_threads_do_not_depend_on_the_split(instances: int) -> None:
    """The same replicas have the same threads, however many instances they are dealt to."""
    assert planned(num_instances=instances, num_replicas=12).threads_per_replica == 1
    assert planned(CLUSTER_NODE, num_instances=instances, num_replicas=12).threads_per_replica == 5


@pytest.mark.parametrize(
    ("choice", "mpi", "launcher"),
    [
        (LauncherChoice.AUTO, None, LauncherKind.LOCAL),
        (LauncherChoice.AUTO, MPICH, LauncherKind.MPI),
        (LauncherChoice.MPI, MPICH, LauncherKind.MPI),
        (LauncherChoice.LOCAL, MPICH, LauncherKind.LOCAL),
    ],
)
def test_auto_takes_mpi_where_there_is_one(choice: LauncherChoice, mpi: object, launcher: LauncherKind) -> None:
    """A plan holds a runtime exactly when that runtime starts it."""
    plan = planned(CLUSTER_NODE if mpi else LAPTOP, launcher=choice)

    assert plan.launcher is launcher
    assert plan.mpi == (MPICH if launcher is LauncherKind.MPI else None)


@pytest.mark.parametrize(
    ("words", "asked", "placement"),
    [
        (("--bind-to", "core"), ProcessPlacement.SPREADNUMA, ProcessPlacement.DISABLED),
        (("-bind-to", "numa"), ProcessPlacement.SPREADNUMA, ProcessPlacement.DISABLED),
        (("--bind-to=core",), ProcessPlacement.SPREADNUMA, ProcessPlacement.DISABLED),
        (("--bind-to", "none"), ProcessPlacement.SPREADNUMA, ProcessPlacement.SPREADNUMA),
        (("--tag-output",), ProcessPlacement.SPREADNUMA, ProcessPlacement.SPREADNUMA),
        (("--bind-to", "core"), ProcessPlacement.CORE, ProcessPlacement.CORE),
    ],
)
def test_who_binds(words: tuple[str, ...], asked: ProcessPlacement, placement: ProcessPlacement) -> None:
    """Words for the MPI launcher that bind come before the default, and after a placement that was asked for."""
    machine = replace(facts_of(TWO_SOCKETS), mpi=MPICH)
    for option in ("mpi_global_args", "mpi_local_args"):
        plan = planned(machine, num_instances=2, placement=asked, **{option: words})
        assert (plan.placement, bool(plan.bindings)) == (placement, placement is not ProcessPlacement.DISABLED)


def test_a_placement_leaves_the_threads_alone() -> None:
    """They belong to the replica, so that the bits do not depend on it."""
    for machine in (TWO_SOCKETS, EIGHT_NODES):
        plans = [planned(facts_of(machine), num_instances=4, placement=how) for how in ProcessPlacement]
        assert len({plan.threads_per_replica for plan in plans}) == 1


def test_mpi_asked_for_and_absent() -> None:
    """The error names the ways to get one and the way to do without, and what was found instead."""
    machine = replace(LAPTOP, unknown_mpi=("/opt/other/mpiexec",))

    with pytest.raises(MpiNotFoundError) as caught:
        planned(machine, launcher=LauncherChoice.MPI)
    for cure in ("poprun[mpich]", "module load", "PATH", "--launcher local", "/opt/other/mpiexec"):
        assert cure in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"num_instances": 4, "num_replicas": 6}, "nearest: 4 or 8 replicas, or 2, 3 or 6 instances"),
        ({"num_instances": 0}, "--num-instances 0"),
        ({"num_replicas": 0}, "--num-replicas 0"),
        ({"num_instances": None, "num_replicas": 0}, "--num-replicas 0"),
        ({"num_instances": None, "num_replicas": 10**30}, "0 is not possible: it can be at most 1048576"),
        ({"ipus_per_replica": 0}, "--ipus-per-replica 0"),
        ({"num_instances": None, "ipus_per_replica": 0}, "--ipus-per-replica 0"),
        ({"threads_per_replica": 0}, "--threads-per-replica 0"),
        (
            {"output": OutputSettings(shown_instances=(1,))},
            "--only-output-from-instance 1: there is no such instance",
        ),
        ({"output": OutputSettings(shown_instances=(0, 7))}, "numbers them from 0 to 0"),
        ({"ending": EndingSettings(stop_timeout_seconds=-1.0)}, "--stop-timeout -1"),
        ({"ending": EndingSettings(stop_timeout_seconds=float("nan"))}, "--stop-timeout nan"),
        ({"ending": EndingSettings(stop_timeout_seconds=float("inf"))}, "--stop-timeout inf"),
        ({"ending": EndingSettings(start_timeout_seconds=0.0)}, "--start-timeout 0 is not possible"),
        ({"ending": EndingSettings(timeout_seconds=0.0)}, "a number of seconds greater than 0"),
        ({"ending": EndingSettings(hang_report_seconds=-1.0)}, "--hang-report -1"),
        ({"ending": EndingSettings(hang_timeout_seconds=-1.0)}, "--hang-timeout -1"),
        ({"ending": EndingSettings(max_restarts=-1)}, "--max-restarts -1 is not possible: it must be at least 0"),
        ({"ending": EndingSettings(report_files=("",))}, "--report '' is not possible"),
        ({"ending": EndingSettings(report_files=("a.json", "b"))}, "--report b is not possible"),
        ({"ending": EndingSettings(metrics_port=-1)}, "--metrics-port -1 is not possible"),
        ({"ending": EndingSettings(metrics_port=65536)}, "--metrics-port 65536 is not possible"),
        ({"output": OutputSettings(tag_format="{rank}: ")}, "there is no {rank}; there are {instance}, {local_"),
        (
            {"output": OutputSettings(is_tagged=False, tag_format="> ")},
            "--tag-format is of no use with --no-tag-output",
        ),
        ({"output": OutputSettings(log_dir="a\0b")}, "--log-dir 'a\\x00b' is not possible"),
        ({"hosts": ("a", "a"), "num_instances": 2}, "names a twice"),
        ({"hosts": ("-x",)}, "no host name"),
        ({"hosts": ("localhost", "box"), "num_instances": 2}, "names this machine twice, as localhost and box"),
    ],
)
def test_what_is_refused(asked: dict[str, Any], what: str) -> None:
    """Every value out of its range is refused, by the name of its option."""
    with pytest.raises(PlanError) as caught:
        planned(**asked)
    assert what in str(caught.value)
