"""Replicas that several instances share, as the launcher plans them."""

import re
from dataclasses import asdict, replace
from typing import Any

import pytest

from poprun.errors import PlanError
from poprun.plan.advice import advise
from poprun.plan.parallelism import mapping_in_file, mapping_in_words
from poprun.plan.plan import LaunchPlan
from poprun.plan.plan_file import plan_from_dict, plan_to_dict
from poprun.plan.planner import make_advised_plan, make_plan
from poprun.plan.pods import named_pod
from poprun.plan.render import render_plan
from poprun.plan.request import AskedMapping, LaunchRequest, VipuSettings
from poprun.plan.topology import Allocation
from poprun.text.screen import TopologyFormat
from popsize.catalogue import named_model
from popsize.hardware import machines_of, named_machine
from popsize.mapping import Mapping, Training, Workload, saved
from tests.planning import LAPTOP, planned, with_gpus

SAVED = saved(
    Mapping(tensor=2, pipeline=2, replicas=2, micro_batch=4),
    Workload(
        model=named_model("gpt2", ()), machine=named_machine("8xA100", {}), training=Training(global_batch=64)
    ),
)


def shared(words: str = "tensor=2,pipeline=2", **asked: Any) -> LaunchPlan:
    """The plan of a job whose replicas are shared as ``words`` say."""
    return planned(**{"mapping": mapping_in_words(words), **asked})


def uncounted(words: str, machine: Any = LAPTOP, **asked: Any) -> LaunchPlan:
    """The plan of a job whose user has not counted the instances."""
    return make_plan(LaunchRequest(mapping=mapping_in_words(words), **asked), machine, is_counted=False)


def test_ranks_go_through_shards_then_stages_then_replicas() -> None:
    """Eight instances are two replicas of two stages of two shards, each told which part it has."""
    plan = shared(num_instances=8)
    parts = [asdict(plan.instance(index).part) for index in range(8)]

    assert plan.num_replicas == 2
    assert [(part["replica"], part["stage"], part["shard"]) for part in parts] == [
        *((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)),
        *((1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)),
    ]
    assert [plan.contract(index).replica_part.index for index in range(8)] == [0, 1, 2, 3] * 2
    assert [list(plan.instance(index).replicas) for index in (0, 3, 4, 7)] == [[0], [0], [1], [1]]
    assert {plan.contract(index).to_env()["POPDIST_NUM_LOCAL_REPLICAS"] for index in range(8)} == {"1"}


@pytest.mark.parametrize("words", ["tp=2,pp=2", "tensor=2 pipeline=2", "tensor_parallel_size=2,pp=2,dp=2"])
def test_sizes_have_the_names_of_the_field(words: str) -> None:
    """Other names of the sizes are read, too; replicas agree with the instances."""
    assert shared(words, num_instances=8) == shared(num_instances=8)


def test_counts_follow() -> None:
    """Without a number of instances a job has those of its replicas, else one replica or a host each as many."""
    hosts = ("a", "b", "c")

    assert uncounted("tp=2,pp=2").num_instances == 4
    assert uncounted("tp=2,pp=2,dp=3").num_instances == 12
    assert uncounted("tp=2,pp=2", num_replicas=3).num_instances == 12
    assert uncounted("tp=2,pp=2", num_instances=3, hosts=hosts).num_instances == 12
    assert uncounted("dp=3").num_instances == 3
    assert planned(instances_per_replica=4, num_instances=8).num_replicas == 2
    assert shared("dp=4", num_instances=2).layout.num_local_replicas == 2


def test_virtual_ipus_of_a_replica_divide_over_its_instances() -> None:
    """An instance has one of them, or as many as its part of those that were asked for, on GPUs and on the CPU."""
    on_gpus = shared(num_instances=4, ipus_per_replica=8, machine=with_gpus("ffffffff"))

    assert shared(num_instances=8).ipus_per_replica == 4
    assert [list(shared(num_instances=8).instance(index).ipus) for index in (0, 5)] == [[0], [5]]
    assert [on_gpus.instance(index).devices for index in (0, 3)] == [("0", "1"), ("6", "7")]
    assert on_gpus.contract(3).devices == (6, 7)
    assert shared(num_instances=4).threads_per_replica == 1


def test_automatic_instances_fill_the_free_gpus_with_whole_replicas() -> None:
    """Of seven free GPUs two replicas of three are used; without GPUs there is one replica."""
    gpus = with_gpus("fffffff")

    assert shared("tp=3", num_instances=None, machine=gpus).num_instances == 6
    assert shared("tp=3", num_instances=None, ipus_per_replica=6, machine=gpus).num_instances == 3
    assert shared("tp=3", num_instances=None).num_instances == 3
    assert shared("tp=3,dp=2", num_instances=None, machine=gpus).num_instances == 6


def test_a_saved_mapping_says_all_counts() -> None:
    """The file of poprun-size sets instances and replicas, and programs find its path."""
    mapping = mapping_in_file(SAVED, "mapping.json", "/jobs/mapping.json")
    plan = make_plan(LaunchRequest(mapping=mapping), LAPTOP, is_counted=False)

    assert (plan.num_instances, plan.num_replicas) == (8, 2)
    assert plan.contract(0).to_env()["POPDIST_MAPPING"] == "/jobs/mapping.json"
    assert plan.contract(5).replica_part.stage == 0


@pytest.mark.parametrize(
    ("kind", "gpu", "hosts", "told"),
    [
        (
            "8xA100",
            None,
            1,
            "8xA100, and the job computes on the CPU: memory and seconds are not as predicted; plan",
        ),
        ("8xA100", ("NVIDIA A100-SXM4-80GB", 81920), 1, ""),
        ("8xA100", ("", 0), 1, ""),
        ("8xA100", ("NVIDIA A100-PCIE-40GB", 40960), 1, "NVIDIA A100-PCIE-40GB with 40.00 GiB, not 79.20"),
        (
            "8xA100",
            ("NVIDIA H200", 143771),
            1,
            "NVIDIA H200 with 140.40 GiB, not 79.20: memory and seconds are not",
        ),
        ("8xA100", ("NVIDIA A100-SXM4-80GB", 81920), 2, "on 4 devices a host, not 8: memory and seconds are not"),
        ("8xcpu", None, 1, ""),
        ("8xcpu", ("NVIDIA H200", 143771), 1, "8xcpu, and the job computes on GPUs: memory and seconds are not"),
        ("8xcpu", None, 2, "4 devices a host, not 8: memory and seconds are not as predicted; nearest: 1 host"),
    ],
)
def test_a_mapping_for_other_devices_is_warned_of(
    kind: str, gpu: tuple[str, int] | None, hosts: int, told: str
) -> None:
    """What it was planned for, what the job computes on, and what is nearest."""
    cpu = {"memory_gib": 1, "tflops": 1, "memory_gb_per_second": 1, "link_gb_per_second": 1} | {
        "network_gb_per_second": 1,
        "devices_per_host": 8,
        "operator_seconds": 1e-6,
    }
    machine = named_machine(kind, machines_of({"cpu": cpu}, "m.yaml"))
    workload = Workload(model=named_model("gpt2"), machine=machine, training=Training(global_batch=64))
    asked = mapping_in_file(saved(Mapping(tensor=2, replicas=4), workload), "m.json", "/m.json")
    request = LaunchRequest(mapping=asked, hosts=tuple("ab"[:hosts]) if hosts > 1 else ())
    gpus = () if gpu is None else with_gpus("f" * 8).gpus
    found = tuple(replace(one, model=gpu[0], memory_bytes=gpu[1] << 20) for one in gpus if gpu)
    facts = replace(LAPTOP, gpus=found, cores=tuple(range(64)))

    _, advice = make_advised_plan(request, facts, is_counted=False, are_hosts_seen=True)

    lines = [line for line in advice if "m.json" in line]
    assert len(lines) == bool(told)
    assert told in "".join(lines)


def test_a_task_of_slurm_is_an_instance() -> None:
    """An allocation says the number of instances where nobody does, and must have those of the mapping."""
    tasks = Allocation(job_id="7", nodes=("n0", "n1"), tasks_per_node=(4, 4))
    inside = replace(LAPTOP, allocation=tasks)

    assert uncounted("tp=4", inside).num_replicas == 2
    assert uncounted("tp=4", replace(LAPTOP, allocation=replace(tasks, tasks_per_node=()))).num_instances == 4
    with pytest.raises(PlanError, match="--num-instances 4 does not fit Slurm's job 7, which has 8 tasks"):
        uncounted("tp=4,dp=1", inside)


def test_a_plan_of_shared_replicas_is_written_and_read() -> None:
    """It says how they are shared, which other plans do not; numbers that do not fit together are refused."""
    plan = shared(num_instances=4)
    values = plan_to_dict(plan)

    assert plan_from_dict(values, "plan.json") == plan
    assert "parallelism" not in plan_to_dict(planned(num_instances=4))
    for sizes, told in (
        ({"tensor": 3}, "plan.json: parallelism: tensor=3 times pipeline=2 must be the 4 instances of a replica"),
        ({"instances_per_replica": 8, "tensor": 4}, "plan.json: num_instances 4 does not divide into replicas"),
    ):
        broken = values | {"parallelism": {"instances_per_replica": 4, "tensor": 2, "pipeline": 2} | sizes}
        with pytest.raises(PlanError, match=re.escape(told)):
            plan_from_dict(broken, "plan.json")
    with pytest.raises(PlanError, match=r"plan\.json: mapping_path '' is not possible: it is a path"):
        plan_from_dict(values | {"mapping_path": ""}, "plan.json")


@pytest.mark.parametrize(
    ("words", "asked", "told"),
    [
        ("tp=2,pp=2", {"num_instances": 6}, "6 does not divide into replicas of 4 instances; nearest: 4 or 8"),
        ("tp=4", {"num_instances": 6, "hosts": ("a", "b", "c", "d")}, "4 instances and 4 hosts; nearest: 4 or 8"),
        ("tp=2", {"num_instances": 4, "num_replicas": 4}, "which are 2 replicas of 2 instances: leave out"),
        ("tp=2,dp=4", {"num_instances": 4}, "4 contradicts --parallelism tp=2,dp=4, which is for 8 devices"),
        ("tp=2,dp=4", {"num_instances": 8, "num_replicas": 2}, "give --num-replicas 4, or --parallelism tensor"),
        ("tp=2", {"instances_per_replica": 4}, "--instances-per-replica 4 contradicts --parallelism tp=2"),
        ("tp=2", {"num_instances": 2, "ipus_per_replica": 3}, "3 does not divide over the 2 instances of a"),
        (
            "tp=2,dp=2",
            {"num_instances": 4, "machine": with_gpus("ff")},
            "is for 4 GPUs, and found are 2; nearest: ",
        ),
        ("tp=2,b=4", {}, "micro_batch is for the program: leave it out, or give the file"),
        ("tp=2", {"num_replicas": -1}, "--num-replicas -1 is not possible"),
        ("tensr=2", {}, "a mapping has no 'tensr': nearest are tensor"),
        ("tp=65536x65536", {}, "asks for 4294967296 instances a replica: at most"),
    ],
)
def test_contradictions_are_refused_with_what_is_nearest(words: str, asked: dict[str, Any], told: str) -> None:
    """What was asked, which rule it breaks, and what is nearest."""
    with pytest.raises(PlanError, match=re.escape(told)):
        shared(words, **asked)


def test_a_mapping_for_more_gpus_runs_on_the_cpu_if_asked() -> None:
    """Offline nothing is counted: one replica's instances compute on the CPU."""
    plan = shared("tp=2,dp=2", num_instances=4, machine=with_gpus("ff"), vipu=VipuSettings(is_offline=True))

    assert plan.devices == ()


@pytest.mark.parametrize("content", ["", "{}", "[" * 100_000, '{"schema": 1, "mapping": [], "training": {}}'])
def test_files_that_hold_no_mapping(content: str) -> None:
    """Whatever the file holds, an error names it."""
    with pytest.raises(PlanError, match=r"--parallelism m\.json is no mapping that poprun-size --save wrote"):
        mapping_in_file(content, "m.json", "/m.json")
    with pytest.raises(PlanError, match=r"--parallelism m\.json: tensor=-2: give a whole number"):
        mapping_in_file('{"schema": 1, "mapping": {"tensor": -2}}', "m.json", "/m.json")


def on_pod(pod: str, **asked: Any) -> LaunchPlan:
    """The plan of a job with replicas of 2 stages of 3 shards on a pod with domains of 16 or 64 IPUs."""
    request = LaunchRequest(
        mapping=AskedMapping(text="tp=3,pp=2", tensor=3, pipeline=2), vipu=VipuSettings(pod=pod), **asked
    )
    return make_plan(request, LAPTOP, named_pod(pod))


def test_a_pod_has_whole_replicas_in_a_domain_or_whole_domains_in_a_replica() -> None:
    """What has no such place, or no room, is refused with what has."""
    assert on_pod("POD64", num_instances=12).vipu.num_ilds == 1
    assert on_pod("POD128", num_instances=72).vipu.num_ilds == 2
    assert on_pod("POD128", num_instances=6, ipus_per_replica=96).vipu.num_ilds == 2
    for asked, told in (
        ({"num_instances": 66}, "does not divide over the IPU-Link domains of POD128, 2 of 64 IPUs"),
        ({"num_instances": 132}, "give at most 21 replicas, or a larger pod"),
        ({"num_instances": 6, "ipus_per_replica": 390}, "POD128 has 128 IPUs, and 1 replica of 390 IPUs use 390"),
    ):
        with pytest.raises(PlanError, match=re.escape(told)):
            on_pod("POD128", **asked)
    with pytest.raises(PlanError, match=re.escape("is too few: 3 instances of 1 IPU on each host use 3 virtual")):
        shared("tp=6", num_instances=6, hosts=("a", "b"), vipu=VipuSettings(ipus_per_host=2))


@pytest.mark.parametrize(
    ("words", "num_instances", "told"),
    [
        ("tp=2,pp=2", 8, ""),
        ("tp=2,pp=4", 16, ""),
        ("tp=2", 12, ""),
        (
            "tp=4",
            12,
            "part the 4 shards of a layer unevenly: some lie on more hosts than others, and the slowest hold",
        ),
        ("pp=4", 12, "part the 4 instances of a replica unevenly"),
        ("tp=8", 8, "each layer is exchanged between hosts; tensor=4,pipeline=2 keeps it on one"),
    ],
)
def test_advice_on_replicas_that_lie_far_apart(words: str, num_instances: int, told: str) -> None:
    """Shards on several hosts, or unevenly on hosts, are slow, and what is faster is said."""
    plan = shared(words, num_instances=num_instances, hosts=("a", "b"), machine=with_gpus("f" * 8))

    found = [line for line in advise(plan, with_gpus("f" * 8)) if "unevenly" in line or "exchanged" in line]
    assert [told in line for line in found] == [True] * bool(told)


def test_the_table_shows_the_place_of_each_instance() -> None:
    """It has columns for stage and shard, or for the part; PopRun's table has rows for them."""
    table = render_plan(shared(num_instances=8), TopologyFormat.TABLE)
    text = render_plan(shared(num_instances=4), TopologyFormat.TEXT)
    parts = render_plan(planned(num_instances=4, instances_per_replica=2), TopologyFormat.TABLE)

    assert "8 instances · 2 replicas of 4 instances (2 stages of 2 shards) · 8 virtual IPUs" in table
    assert [line.split()[:4] for line in table.splitlines()[9:11]] == [["5", "1", "0", "1"], ["6", "1", "1", "0"]]
    assert "threads    1 per instance" in table
    assert [re.findall("[0-9]+", line) for line in text.splitlines()[7:15:2]] == [
        *(["0"], ["0", "1"], ["0", "1", "0", "1"], ["0", "1", "2", "3"])
    ]
    assert "part" in parts
    assert "2 replicas of 2 instances ·" in parts
