"""Pods by their names and from YAML."""

import pytest

from poprun.errors import PartitionError, PlanError
from poprun.plan.pods import named_pod, on_machine, read_pod
from poprun.plan.topology import Gpu, Occupant
from poprun.pool.clusters import gpus_within

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
        ("name: p\nnum_machines: 0", "pod.yaml: num_machines 0: it is 1 to"),
        ("name: p\nnum_machines: 6\nmachines_per_domain: 4", "no multiple of machines_per_domain 4"),
        ("name: p\nnum_machines: 32\nmachines_per_domain: 32", "IPU-Links connect 1 to 16 IPU-Machines"),
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


def test_a_pod_on_a_machine_with_gpus_is_those_first() -> None:
    """The first IPUs of the pod are the machine's GPUs, under the names that all its users know them by."""
    pod = named_pod("POD4")
    assert pod is not None
    bob = Occupant(pid=9, user="bob")
    gpus = (Gpu(name="0", uuid="GPU-a"), Gpu(name="1", uuid="GPU-b", occupants=(bob,)))

    found = on_machine(pod, ("box",), gpus)

    assert [(ipu.name, ipu.device) for ipu in found.ipus] == [
        ("GPU-a", "0"),
        ("GPU-b", "1"),
        ("POD4/2", ""),
        ("POD4/3", ""),
    ]
    assert found.ipus[1].occupants == (bob,)
    assert on_machine(pod, ("box",), gpus * 3).ipus[3].device == "1"
    assert on_machine(pod, ("box",), ()) == pod


def test_a_host_of_a_pod_has_its_share() -> None:
    """Hosts share a pod evenly, in the order in which it names them; another machine stands for all of it."""
    pod = read_pod(PODS, "pods.yaml")
    second = on_machine(pod, ("lr2", "lr2.example.org"), (Gpu(name="0"),))

    assert [ipu.index for ipu in second.ipus] == list(range(16, 32))
    assert [ipu.name for ipu in second.ipus[:2]] == ["0", "lab/17"]
    assert len(on_machine(pod, ("box",), ()).ipus) == 32


def test_an_allocation_has_the_gpus_of_its_part() -> None:
    """Who asks for a part of the pod gets no GPU outside of it."""
    text = "name: box\nnum_machines: 2\nallocations: {ann: 0, bob: 1}\n"
    gpus = tuple(Gpu(name=str(number)) for number in range(8))

    assert gpus_within(read_pod(text, "pod"), "bob", "box", gpus) == gpus[4:]
    assert gpus_within(read_pod(text, "pod"), None, "box", gpus) == gpus
    with pytest.raises(PartitionError, match="there is no allocation eve: there is ann, bob"):
        gpus_within(read_pod(text, "pod"), "eve", "box", gpus)
