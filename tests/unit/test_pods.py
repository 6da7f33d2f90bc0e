"""Pods by their names and from YAML.

Holds poprun.devices.pool.clusters.
"""

import pytest

from poprun.devices.pool.clusters import check_names, choose_cluster
from poprun.errors import PartitionError, PlanError
from poprun.plan.pods import allocation_of, named_pod, on_machine, read_pod
from poprun.plan.request import VipuSettings
from poprun.plan.topology import Gpu

PODS = """
name: lab
num_machines: 8
machines_per_domain: 4
hosts: lr[1-2]
memory_per_ipu_bytes: 900000000
allocations: {alice: 0-3, bob: 4-6, eve: 7}
"""


@pytest.mark.parametrize(
    ("name", "num_ipus", "num_domains", "domain_size"),
    [
        ("POD4", 4, 1, 4),
        ("pod16", 16, 1, 16),
        ("Bow-POD64", 64, 1, 64),
        ("POD256", 256, 4, 64),
        ("POD_1024", 1024, 16, 64),
    ],
)
def test_a_pod_has_a_shape_by_its_name(name: str, num_ipus: int, num_domains: int, domain_size: int) -> None:
    """As many IPUs as its name says, in IPU-Link domains of at most 64."""
    pod = named_pod(name)

    assert pod is not None
    assert (len(pod.ipus), pod.num_domains, pod.domain_size) == (num_ipus, num_domains, domain_size)
    assert pod.ipus[-1].name == f"POD{num_ipus}/{num_ipus - 1}"


def test_other_words_are_no_pods() -> None:
    """Another word may be a file."""
    assert named_pod("pod.yaml") is None
    with pytest.raises(PlanError, match="a pod has a multiple of 4 IPUs"):
        named_pod("POD6")


def test_a_described_pod() -> None:
    """Machines of 4 IPUs, domains of machines, parts by name."""
    pod = read_pod(PODS, "pod.yaml")

    assert (pod.name, len(pod.ipus), pod.num_domains, pod.domain_size) == ("lab", 32, 2, 16)
    assert (pod.hosts, pod.memory_bytes) == (("lr1", "lr2"), 900_000_000)
    assert pod.allocations == {"alice": range(16), "bob": range(16, 28), "eve": range(28, 32)}
    assert [ipu.index for ipu in pod.pick(4, "bob")({"lab/16"})] == [20, 21, 22, 23]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "pod.yaml: no YAML"),
        ("- 1", "pod.yaml: the file must be a mapping"),
        ("name: p", "pod.yaml: num_machines is missing"),
        ("name: p\nnum_machines: 1\nsize: 3", "pod.yaml: size is no key"),
        ("name: p\nnum_machines: many", "pod.yaml: num_machines must be a whole number, not 'many'"),
        ("name: p\nnum_machines: 0", "pod.yaml: num_machines must be a whole number from 1 to 262144, not 0"),
        ("name: p\nnum_machines: 6\nmachines_per_domain: 4", "no multiple of machines_per_domain 4"),
        (
            "name: p\nnum_machines: 32\nmachines_per_domain: 32",
            "machines_per_domain must be a whole number from 1 to 16",
        ),
        ("name: a/b\nnum_machines: 1", "'a/b' is no name"),
        ("name: p\nnum_machines: 2\nallocations: {a: 0-2}", "allocations.a: give neighbours of 0 to 1"),
        ("name: p\nnum_machines: 2\nallocations: {a: x}", "allocations.a: 'x' is no list of numbers"),
    ],
)
def test_what_describes_no_pod(text: str, problem: str) -> None:
    """The error names the file and the key."""
    with pytest.raises(PlanError) as caught:
        read_pod(text, "pod.yaml")
    assert problem in str(caught.value)


def test_a_host_of_a_pod_has_its_share() -> None:
    """Hosts share a pod evenly, in the order in which it names them; another machine stands for all of it."""
    pod = read_pod(PODS, "pods.yaml")

    assert [ipu.index for ipu in on_machine(pod, ("lr2", "lr2.example.org")).ipus] == list(range(16, 32))
    assert on_machine(pod, ("box",)) == pod


@pytest.mark.parametrize(
    ("settings", "allocation"),
    [({}, None), ({"allocation": "bob"}, "bob"), ({"cluster": "bob"}, "bob"), ({"cluster": "lab"}, None)],
)
def test_an_allocation_has_two_names(settings: dict[str, str], allocation: str | None) -> None:
    """The option's older one is for clusters, and a pod is one of those; a pod without parts is one, too."""
    vipu = VipuSettings(**settings)  # type: ignore[arg-type]

    assert allocation_of(read_pod(PODS, "pods.yaml"), vipu) == allocation
    assert allocation_of(read_pod("name: p\nnum_machines: 1", "p"), vipu) is None


def test_what_a_machine_hands_out() -> None:
    """Its share of a pod whatever it computes on, else its GPUs or the first of them, else shares of its cores."""
    pod, gpus = (
        read_pod(PODS, "pods.yaml"),
        tuple(Gpu(name=str(number), uuid=f"GPU-{number}") for number in range(4)),
    )

    assert choose_cluster("lr2.example.org", gpus, 8, pod=pod).ipus == pod.ipus[16:]
    assert [ipu.name for ipu in choose_cluster("box", gpus, 8, ipus_per_host=2).ipus] == ["GPU-0", "GPU-1"]
    assert len(choose_cluster("box", gpus, 8, ipus_per_host=16).ipus) == 4
    assert len(choose_cluster("box", (), 8, ipus_per_host=2).ipus) == 2
    assert choose_cluster("box", (), 8).is_open


def test_a_part_that_is_not_there() -> None:
    """The error names those that are."""
    pod = read_pod(PODS, "pods.yaml")

    check_names(pod, "bob", "lab")
    with pytest.raises(PartitionError, match="there is no allocation mallory: there is alice, bob, eve"):
        check_names(pod, "mallory")
    with pytest.raises(PartitionError, match="there is no cluster attic: there is lab"):
        check_names(pod, None, "attic")
