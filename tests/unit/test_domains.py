"""IPU-Link domains of a job, and counted virtual IPUs, in plans."""

import pytest

from poprun.errors import PlanError
from poprun.plan.inventory import num_ilds
from poprun.plan.planner import make_plan
from poprun.plan.pods import named_pod, read_pod
from poprun.plan.program_environment import program_environment
from poprun.plan.request import LaunchRequest
from poprun.plan.settings import VipuSettings
from poprun.render import render_plan
from poprun.text.formats import TopologyFormat
from tests.planning import LAPTOP, planned, with_gpus


@pytest.mark.parametrize(
    ("asked", "pod", "num_instances", "ipus_per_replica", "expected"),
    [
        (None, None, 8, 1, None),
        (2, None, 8, 1, 2),
        (None, "POD16", 4, 4, 1),
        (None, "POD256", 1, 1, 1),
        (None, "POD256", 256, 1, 4),
        (None, "POD256", 8, 16, 2),
        (None, "POD256", 2, 48, 2),
        (4, "POD256", 8, 16, 4),
        (None, "POD4096", 4096, 1, 64),
    ],
)
def test_the_domains_of_a_job(
    asked: int | None, pod: str | None, num_instances: int, ipus_per_replica: int, expected: int | None
) -> None:
    """As many as its instances fill, when each lies in one; more where that is asked for."""
    found = None if pod is None else named_pod(pod)

    assert num_ilds(asked, found, num_instances=num_instances, ipus_per_replica=ipus_per_replica) == expected


@pytest.mark.parametrize(
    ("asked", "pod", "num_instances", "ipus_per_replica", "problem"),
    [
        (1, "POD128", 128, 1, "--num-ilds 1 is too few: 128 instances of 1 IPUs fill 2 IPU-Link domains of 64"),
        (3, None, 4, 1, "--num-instances 4 does not divide over 3 IPU-Link domains: .* nearest: 3 or 6 instances"),
        (None, "POD16", 17, 1, "--pod POD16 has 16 IPUs, and 17 instances of 1 use 17: give fewer instances"),
        (None, "POD256", 1, 128, "a replica lies in one IPU-Link domain, and those of POD256 have 64 IPUs"),
        (None, "POD256", 65, 1, "65 does not divide over 2 IPU-Link domains: .* nearest: 64 or 66 instances"),
    ],
)
def test_what_fits_no_domains(
    asked: int | None, pod: str | None, num_instances: int, ipus_per_replica: int, problem: str
) -> None:
    """The error says what was found and what to do."""
    found = None if pod is None else named_pod(pod)
    with pytest.raises(PlanError, match=problem):
        num_ilds(asked, found, num_instances=num_instances, ipus_per_replica=ipus_per_replica)


def test_more_domains_than_instances() -> None:
    """Each domain needs an instance."""
    with pytest.raises(PlanError, match="--num-ilds 3 is more than --num-instances 2: each IPU-Link domain needs"):
        planned(num_instances=2, vipu=VipuSettings(num_ilds=3))


def test_a_plan_for_a_pod() -> None:
    """The pod's hosts and domains stand in the plan; every domain has the same number of instances."""
    pod = read_pod("name: lab\nnum_machines: 8\nmachines_per_domain: 4\nhosts: lr[1-2]", "pod.yaml")
    plan = make_plan(LaunchRequest(num_instances=8, ipus_per_replica=4), LAPTOP, pod)

    assert (plan.hosts, plan.num_ilds) == (("lr1", "lr2"), 2)
    assert [plan.ild_of(index) for index in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert "| ILDs      |       0       |       1       |" in render_plan(plan, TopologyFormat.TEXT, width=80)


def test_a_folded_plan_folds_its_domains() -> None:
    """Where the columns do not divide, one cell names all domains."""
    plan = make_plan(LaunchRequest(num_instances=1024), LAPTOP, named_pod("POD1024"))

    assert "| ILDs      |   0-15    |" in render_plan(plan, TopologyFormat.TEXT, width=80)


def test_counted_ipus_are_shares_of_the_cores() -> None:
    """Each has its share of the threads; more than there are is an error."""
    settings = VipuSettings(ipus_per_host=8)
    assert planned(num_instances=8, vipu=settings).threads_per_replica == 1
    assert planned(num_instances=1, ipus_per_replica=4, vipu=settings).threads_per_replica == 2
    with pytest.raises(
        PlanError, match="--ipus-per-host 8 is too few: the instances of a host use 9 virtual IPUs"
    ):
        planned(num_instances=9, vipu=settings)


def test_counted_gpus_are_the_first_ones() -> None:
    """The others are not touched, free or not."""
    assert planned(with_gpus("bfff"), num_instances=2, vipu=VipuSettings(ipus_per_host=2)).devices == ("0", "1")


def test_offline_takes_no_gpus_and_shows_none() -> None:
    """The programs of a job without virtual IPUs see no CUDA device."""
    plan = planned(with_gpus("ffff"), num_instances=2, vipu=VipuSettings(is_offline=True))

    assert plan.devices == ()
    assert not plan.takes_lease
    assert program_environment(plan, 0, {})["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("settings", "takes"),
    [
        ({}, False),
        ({"partition": "p"}, True),
        ({"pool": "/p"}, True),
        ({"pod": "POD16"}, True),
        ({"ipus_per_host": 4}, True),
        ({"partition": "p", "is_offline": True}, False),
    ],
)
def test_who_takes_a_lease(settings: dict[str, object], takes: bool) -> None:  # noqa: FBT001 - a row
    """A laptop asks nobody, until somebody counts or names its virtual IPUs; a job on GPUs always does."""
    vipu = VipuSettings(**settings)  # type: ignore[arg-type]

    assert planned(vipu=vipu).takes_lease == takes
    assert planned(with_gpus("f"), vipu=vipu).takes_lease != vipu.is_offline
