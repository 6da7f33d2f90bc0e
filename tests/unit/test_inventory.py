"""Which virtual IPUs there are, and which are handed out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun.plan.inventory import VirtualIpu, choose_ipus, cpu_cluster, gpu_cluster, size_of_partition
from poprun.plan.topology import Gpu, Occupant


def ipus(indices: list[int], domain_size: int) -> list[VirtualIpu]:
    """Free IPUs of a pod."""
    return [VirtualIpu(index=index, name=f"p/{index}", domain=index // domain_size) for index in indices]


@pytest.mark.parametrize(
    ("free", "domain_size", "num_ipus", "chosen"),
    [
        ([0, 1, 2, 3], 4, 2, [0, 1]),
        ([1, 2, 3], 4, 2, [2, 3]),
        ([1, 3], 4, 2, [1, 3]),
        ([0, 1, 2, 3, 5, 7], 4, 2, [5, 7]),
        ([0, 1, 2, 4, 5, 6], 4, 4, []),
        (list(range(1, 12)), 4, 8, [4, 5, 6, 7, 8, 9, 10, 11]),
        ([0, 1, 2, 3], 4, 8, []),
        ([], 4, 1, []),
    ],
)
def test_what_is_handed_out_stays_together(
    free: list[int], domain_size: int, num_ipus: int, chosen: list[int]
) -> None:
    """The fullest IPU-Link domain with room, a block that begins at its size; as few domains as it takes."""
    assert [ipu.index for ipu in choose_ipus(ipus(free, domain_size), num_ipus, domain_size)] == chosen


@given(st.sets(st.integers(0, 63)), st.sampled_from([4, 8, 16, 64]), st.integers(1, 64))
def test_handing_out_is_all_or_nothing(free: set[int], domain_size: int, num_ipus: int) -> None:
    """Exactly as many as asked for, all of them free, in order; in one domain, or in whole ones."""
    chosen = choose_ipus(ipus(sorted(free), domain_size), num_ipus, domain_size)
    indices = [ipu.index for ipu in chosen]

    assert len(indices) in (0, num_ipus)
    assert set(indices) <= free
    assert indices == sorted(set(indices))
    assert len({ipu.domain for ipu in chosen}) <= -(-num_ipus // domain_size)


def test_several_domains_have_equally_many() -> None:
    """Then the instances of a job, equally many in each, lie in one domain each."""
    free = ipus([*range(8), 9, *range(16, 24)], 8)

    assert [ipu.index for ipu in choose_ipus(free, 6, 8, num_domains=2)] == [0, 1, 2, 16, 17, 18]
    assert [ipu.index for ipu in choose_ipus(free, 12, 8)] == [0, 1, 2, 3, 4, 5, 16, 17, 18, 19, 20, 21]
    assert choose_ipus(free, 6, 8, num_domains=3) == ()


def test_a_machine_of_gpus_is_one_domain() -> None:
    """A GPU has one name for all users, the one that it has in CUDA, and those who use it."""
    bob = Occupant(pid=9, user="bob")
    cluster = gpu_cluster("box", (Gpu(name="3", uuid="GPU-a"), Gpu(name="1", uuid="GPU-b", occupants=(bob,))))

    assert [(ipu.name, ipu.device, ipu.occupants) for ipu in cluster.ipus] == [
        ("GPU-a", "3", ()),
        ("GPU-b", "1", (bob,)),
    ]
    assert (cluster.num_domains, cluster.domain_size) == (1, 2)
    assert (str(cluster.ipus[0]), str(bob)) == ("GPU 3", "process 9 of bob")


def test_cpu_slots_are_as_many_as_somebody_takes() -> None:
    """Nobody has counted them: a laptop has a thousand."""
    chosen = cpu_cluster("box", None, 2).pick(1000)({"cpu/0", "cpu/7"})

    assert [ipu.index for ipu in chosen][:8] == [1, 2, 3, 4, 5, 6, 8, 9]
    assert len(chosen) == 1000


def test_counted_cpu_slots_end() -> None:
    """What was counted is all there is."""
    assert cpu_cluster("box", 4).pick(4)({"cpu/0"}) == ()


@pytest.mark.parametrize(("num_ipus", "size"), [(1, 1), (2, 2), (3, 4), (5, 8), (64, 64), (65, 128)])
def test_partitions_are_powers_of_two(num_ipus: int, size: int) -> None:
    """The smallest one that holds as many."""
    assert size_of_partition(num_ipus) == size
