"""The virtual IPUs of a job as plans count them, and its IPU-Link domains.

Holds poprun.plan.domains.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun.errors import PlanError
from poprun.plan.plan import LaunchPlan
from poprun.plan.planner import make_plan
from poprun.plan.pods import named_pod, read_pod
from poprun.plan.program_environment import program_environment
from poprun.plan.render import render_plan
from poprun.plan.request import LaunchRequest, VipuSettings
from poprun.text.screen import TopologyFormat
from tests.planning import CLUSTER_NODE, LAPTOP, planned, with_gpus

LAB = read_pod(
    "name: lab\nnum_machines: 12\nmachines_per_domain: 4\nhosts: n[1-2]\nallocations: {ann: 2-5}", "lab"
)
"""Three domains of 16 IPUs; 24 for each host, and an allocation of two halves of a domain."""


def job(
    pod: str | None, instances: int, replicas: int, ipus: int = 1, **vipu: str | int | None
) -> tuple[LaunchPlan, int | None]:
    """A job on a pod, and the IPU-Link domains that it spans."""
    settings = VipuSettings(pod=pod, **vipu)  # type: ignore[arg-type]
    request = LaunchRequest(
        num_instances=instances, num_replicas=replicas, ipus_per_replica=ipus, hosts=("box",), vipu=settings
    )
    plan = make_plan(request, LAPTOP, LAB if pod == "lab" else named_pod(pod or ""))
    return plan, plan.vipu.num_ilds


@pytest.mark.parametrize(
    ("asked", "pod", "instances", "replicas", "ipus", "expected"),
    [
        (None, None, 8, 8, 1, None),
        (2, None, 8, 8, 1, 2),
        (None, "POD64", 1, 16, 4, 1),
        (None, "POD64", 4, 64, 1, 1),
        (None, "POD16", 4, 4, 4, 1),
        (None, "POD256", 1, 1, 1, 1),
        (None, "POD256", 2, 128, 1, 2),
        (None, "POD256", 4, 256, 1, 4),
        (None, "POD256", 256, 256, 1, 4),
        (None, "POD256", 8, 8, 16, 2),
        (None, "POD256", 2, 2, 48, 2),
        (None, "POD256", 3, 120, 1, 3),
        (None, "POD256", 81, 81, 1, 3),
        (4, "POD256", 8, 8, 16, 4),
        (None, "POD4096", 64, 1024, 4, 64),
    ],
)
def test_the_domains_of_a_job(
    asked: int | None, pod: str | None, instances: int, replicas: int, ipus: int, expected: int | None
) -> None:
    """As few as hold its instances, each in one and equally many in each; more where that is asked for."""
    assert job(pod, instances, replicas, ipus, num_ilds=asked)[1] == expected


@pytest.mark.parametrize(
    ("pod", "counts", "vipu", "problem"),
    [
        (
            "POD128",
            (128, 128),
            {"num_ilds": 1},
            "128 instances of 1 IPUs on POD128, which has 2 IPU-Link domains of 64: give 2",
        ),
        (
            None,
            (4, 4),
            {"num_ilds": 3},
            "does not divide over 3 IPU-Link domains: each holds .*; give other replicas",
        ),
        (None, (4, 12), {"num_ilds": 3}, "--num-instances 4 does not divide over 3 .* nearest: 3 or 6 instances"),
        ("POD256", (65, 65), {}, "65 does not divide over the IPU-Link domains of POD256, 4 of 64 IPUs"),
        ("POD128", (3, 120), {}, "nearest: 2 or 4 instances"),
        ("POD256", (1, 1, 128), {}, "a replica lies in one IPU-Link domain, and those of POD256 have 64 IPUs"),
        (
            "POD256",
            (1, 64, 4),
            {},
            "64 replicas of 4 IPUs use 256, where a domain of POD256 has 64: give at least --num-instances 4",
        ),
        ("POD128", (1, 127), {}, "where a domain of POD128 has 64: give fewer replicas"),
        (
            "POD16",
            (1, 17),
            {},
            "POD16 has 16 IPUs, and 17 replicas of 1 IPU use 17: give at most --num-replicas 16",
        ),
        ("POD64", (4, 24, 4), {}, "24 replicas of 4 IPUs use 96: give at most --num-replicas 16, or a larger pod"),
        ("POD16", (32, 32), {}, "give at most 16 replicas and instances, or a larger pod"),
        ("POD16", (1, 1, 32), {}, "give a smaller --ipus-per-replica, or a larger pod"),
        (
            "lab",
            (1, 20),
            {"allocation": "ann"},
            "allocation ann of lab has 16 IPUs, and 20 replicas of 1 IPU use 20",
        ),
        ("lab", (1, 16), {"allocation": "ann"}, "where a domain of lab has 8: give at least --num-instances 2"),
    ],
)
def test_what_fits_no_pod(pod: str | None, counts: tuple[int, ...], vipu: dict[str, Any], problem: str) -> None:
    """The error says what was found and what would fit."""
    with pytest.raises(PlanError, match=problem):
        job(pod, *counts, **vipu)


def test_what_fits_the_share_of_no_host() -> None:
    """A pod that names hosts is shared out to them, and a job uses equally many IPUs of each."""
    for num_replicas, hosts in ((24, ("n1",)), (48, ("n1", "n2"))):
        asked = {"num_instances": 6, "num_replicas": num_replicas, "hosts": hosts}
        assert make_plan(LaunchRequest(**asked), LAPTOP, LAB).num_replicas == num_replicas  # type: ignore[arg-type]
    with pytest.raises(
        PlanError, match="n1 has 24 IPUs of lab, and 30 replicas of 1 IPU use 30 there: give at most"
    ):
        make_plan(LaunchRequest(num_instances=6, num_replicas=30, hosts=("n1",)), LAPTOP, LAB)


def test_auto_fills_no_more_than_a_pod() -> None:
    """As many instances as there are free GPUs, a replica in each, while the pod has IPUs for them."""
    for name, num_instances in (("POD4", 4), ("POD64", 8)):
        asked = LaunchRequest(num_instances=None, vipu=VipuSettings(pod=name))
        assert make_plan(asked, with_gpus("f" * 8), named_pod(name)).num_instances == num_instances


def test_the_replicas_of_a_job_fill_a_pod() -> None:
    """Every replica has its own virtual IPUs: 16 of 4 IPUs use the 64 of a POD64, and so do 64 in 4 instances."""
    for counts, per_instance in (((1, 16, 4), 64), ((4, 16, 4), 16), ((4, 64, 1), 16)):
        plan, _ = job("POD64", *counts)
        assert (plan.num_ipus_per_host, plan.num_ipus_per_instance) == (64, per_instance)
        numbers = [ipu for instance in plan.instances() for ipu in instance.ipus]
        assert numbers == list(range(64))


@given(st.sampled_from([1, 2, 4]), st.integers(1, 8), st.integers(1, 2), st.sampled_from(["", "f" * 8]))
def test_what_a_program_gets_is_its_own(num_instances: int, turns: int, ipus: int, gpus: str) -> None:
    """The GPUs, their numbers and the cores of an instance are the same, however many replicas take turns."""
    asked = {"num_instances": num_instances, "ipus_per_replica": ipus, "threads_per_replica": 1}
    one, many = (planned(with_gpus(gpus), num_replicas=num_instances * count, **asked) for count in (1, turns))

    assert many.num_ipus_per_instance == turns * ipus
    for index in range(num_instances):
        first = tuple(range(index * ipus, (index + 1) * ipus)) if gpus else ()
        assert many.instance(index).ordinals == first
        assert many.instance(index).devices == tuple(str(number) for number in first)
        assert many.instance(index).cores == one.instance(index).cores
        assert many.contract(index).devices == first
        names = [program_environment(plan, index, {}).get("CUDA_VISIBLE_DEVICES") for plan in (one, many)]
        assert names[0] == names[1]


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
    for num_instances in (1, 2):
        split = planned(CLUSTER_NODE, num_instances=num_instances, num_replicas=2, vipu=settings)
        assert split.threads_per_replica == 8
    few = (
        "--ipus-per-host 8 is too few: 12 replicas of 1 IPU use 12 virtual IPUs; give --ipus-per-host 12 or more, "
    )
    with pytest.raises(PlanError, match=few + "or at most --num-replicas 8"):
        planned(num_instances=4, num_replicas=12, vipu=settings)
    with pytest.raises(
        PlanError, match=r"5 replicas of 2 IPUs on each host use 10 virtual IPUs; .* --num-replicas 8"
    ):
        planned(hosts=("a", "b"), num_instances=2, num_replicas=10, ipus_per_replica=2, vipu=settings)


def test_counted_gpus_are_the_first_ones() -> None:
    """The others are not touched, free or not; more virtual IPUs than GPUs take turns on those."""
    counted = VipuSettings(ipus_per_host=2)
    assert planned(with_gpus("bfff"), num_instances=2, vipu=counted).devices == ("0", "1")
    assert planned(with_gpus("ffff"), num_instances=None, vipu=counted).devices == ("0", "1")
    assert planned(with_gpus("ff"), num_replicas=8, vipu=VipuSettings(ipus_per_host=8)).devices == ("0",)


def test_offline_takes_no_gpus_and_shows_none() -> None:
    """The programs of a job without virtual IPUs see no device of any maker."""
    plan = planned(with_gpus("ffff"), num_instances=2, vipu=VipuSettings(is_offline=True))

    assert plan.devices == ()
    assert not plan.takes_lease
    told = program_environment(plan, 0, {})
    assert (told["CUDA_VISIBLE_DEVICES"], told["HIP_VISIBLE_DEVICES"]) == ("", "-1")
    assert told["ONEAPI_DEVICE_SELECTOR"] == "*:cpu"


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
