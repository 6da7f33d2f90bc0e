"""What a user is told of a plan that is legal and may not be what they want."""

from dataclasses import replace
from typing import Any

import pytest

from poprun.errors import PlanError
from poprun.plan.advice import advise, check_gpus, idle_options
from poprun.plan.request import VipuSettings
from poprun.plan.topology import Gpu, MachineFacts
from tests.machines import TWO_SOCKETS, facts_of
from tests.planning import LAPTOP, planned, with_gpus

CROWD = "{} instances with {} threads each share 4 cores: they slow each other down; --threads-per-replica {} fits"
TURNS = "the {} replicas of each instance take turns on {}; --num-instances {}"


@pytest.mark.parametrize(
    ("machine", "asked", "lines"),
    [
        (LAPTOP, {}, ()),
        (LAPTOP, {"num_instances": 4}, ()),
        (with_gpus("ff"), {"num_instances": 2}, ()),
        (LAPTOP, {"num_instances": 8}, ("8 instances share 4 cores: they slow each other down",)),
        (
            LAPTOP,
            {"num_instances": 8, "threads_per_replica": 2},
            (CROWD.format(8, 2, 1),),
        ),
        (
            replace(LAPTOP, user_num_threads="64"),
            {"num_instances": 2},
            (CROWD.format(2, 64, 2),),
        ),
        (LAPTOP, {"num_replicas": 4}, (TURNS.format(4, "1 of 4 cores", "4 uses all of them"),)),
        (LAPTOP, {"num_replicas": 2}, (TURNS.format(2, "2 of 4 cores", "2 uses all of them"),)),
        (
            LAPTOP,
            {"num_instances": 2, "num_replicas": 6},
            (TURNS.format(3, "2 of 4 cores", "6 uses all of them"),),
        ),
        (LAPTOP, {"num_replicas": 3}, (TURNS.format(3, "1 of 4 cores", "3 uses 3"),)),
        (LAPTOP, {"num_replicas": 4, "threads_per_replica": 4}, ()),
        (replace(LAPTOP, user_num_threads="4"), {"num_replicas": 4}, ()),
        (
            replace(LAPTOP, user_num_threads="2"),
            {"num_replicas": 4},
            (TURNS.format(4, "2 of 4 cores", "2 uses all of them"),),
        ),
        (replace(LAPTOP, user_num_threads="2,1"), {"num_replicas": 4}, ()),
        (with_gpus("ffff"), {"num_replicas": 4}, (TURNS.format(4, "1 of 4 GPUs", "4 uses all of them"),)),
        (with_gpus("fffb"), {"num_replicas": 4}, (TURNS.format(4, "1 of 3 GPUs", "2 uses 2"),)),
        (with_gpus("fbb"), {"num_replicas": 4}, ()),
        (
            with_gpus("ff"),
            {"num_instances": 4},
            (
                (
                    "computing on the CPU: 4 instances use 4 GPUs, and there are 2; --num-instances 2 fits the "
                    "GPUs, and --share-devices lets instances share them"
                ),
            ),
        ),
        (
            with_gpus("f"),
            {"ipus_per_replica": 2},
            ("computing on the CPU: 1 instance uses 2 GPUs, and there is 1",),
        ),
        (with_gpus("ff"), {"num_instances": 4, "vipu": VipuSettings(is_offline=True)}, ()),
        (
            with_gpus("ff"),
            {"num_instances": 3, "vipu": VipuSettings(shares_devices=True)},
            (
                (
                    "3 instances share GPUs 0, 1: their tensors are exchanged over the memory of the host, which "
                    "takes longer, and the bits are the same"
                ),
            ),
        ),
        (
            replace(LAPTOP, gpus=(Gpu(name="0", model="H100"), Gpu(name="1", model="H200"))),
            {"num_instances": 2},
            (
                (
                    "the job's GPUs are of several kinds (H100, H200), which compute other bits: another split of "
                    "the replicas may give other weights; choose GPUs of one kind with CUDA_VISIBLE_DEVICES"
                ),
            ),
        ),
        (replace(LAPTOP, gpu_problems=("the driver is asleep",)), {}, ("the driver is asleep",)),
        (replace(LAPTOP, gpu_problems=("the driver is asleep",)), {"vipu": VipuSettings(is_offline=True)}, ()),
        (with_gpus("b"), {}, ()),
        (
            with_gpus("b"),
            {"vipu": VipuSettings(shares_devices=True)},
            ("another process holds memory on GPU 0, and the job shares it",),
        ),
        (facts_of(TWO_SOCKETS), {"num_instances": 4}, ()),
        (facts_of(TWO_SOCKETS, 0, 1), {"num_instances": 2}, ()),
        (
            facts_of(TWO_SOCKETS, 1, 1),
            {"num_instances": 2},
            (
                (
                    "2 instances with 8 threads each are bound to the 8 cores near their GPUs: "
                    "--process-placement disabled lets them use all 16, --threads-per-replica 4 fits"
                ),
            ),
        ),
        (LAPTOP, {"hosts": ("a", "b"), "num_instances": 2}, ()),
    ],
)
def test_advice(machine: MachineFacts, asked: dict[str, Any], lines: tuple[str, ...]) -> None:
    """One line for each thing worth knowing, none for a plan that uses what there is."""
    assert advise(planned(machine, **asked), machine) == lines


def test_hosts_that_nobody_has_looked_at_are_taken_to_be_like_this_machine() -> None:
    """Which is said, because a plan of a laptop may be for a cluster."""
    several = planned(LAPTOP, hosts=("a", "b"), num_instances=2)

    assert advise(several, LAPTOP, are_hosts_seen=False) == (
        "planned as if each of the 2 hosts had what this machine has: cores 0-3",
    )
    assert advise(planned(LAPTOP), LAPTOP, are_hosts_seen=False) == ()


@pytest.mark.parametrize("gpus", ["", "ffff"])
@pytest.mark.parametrize("replicas", [2, 3, 4, 6, 8, 12])
def test_advice_followed_is_no_longer_given(gpus: str, replicas: int) -> None:
    """The number of instances that a line names leaves nothing more to name."""
    machine = with_gpus(gpus)
    (line,) = advise(planned(machine, num_replicas=replicas), machine)
    better = int(line.partition("--num-instances ")[2].partition(" ")[0])

    assert "take turns" not in " ".join(
        advise(planned(machine, num_instances=better, num_replicas=replicas), machine)
    )


ALLOCATIONS = {"vipu-allocation", "vipu-cluster"}
PARTITIONS = {"vipu-partition-attempts", "update-partition", "reset-partition", "remove-partition"}
LEASES = {"wait-for-devices", "vipu-server-timeout"}


@pytest.mark.parametrize(
    ("gpus", "vipu", "idle"),
    [
        ("", VipuSettings(), {"share-devices"} | ALLOCATIONS | PARTITIONS | LEASES),
        ("", VipuSettings(ipus_per_host=4), {"share-devices"} | ALLOCATIONS | PARTITIONS),
        ("", VipuSettings(partition="p"), {"share-devices"} | ALLOCATIONS),
        ("", VipuSettings(partition="p", pod="POD16"), {"share-devices"} | ALLOCATIONS),
        ("", VipuSettings(partition="p", pod="lab.yaml"), {"share-devices"}),
        ("ff", VipuSettings(), ALLOCATIONS | PARTITIONS),
        ("ff", VipuSettings(partition="p", pod="lab.yaml"), set()),
        ("", VipuSettings(server_host="h"), {"share-devices", "pool"} | PARTITIONS),
        ("ff", VipuSettings(server_host="h"), PARTITIONS),
    ],
)
def test_what_has_nothing_to_act_on(gpus: str, vipu: VipuSettings, idle: set[str]) -> None:
    """An option is idle exactly where the job has no partition, allocation, lease or GPU for it."""
    assert set(idle_options(planned(with_gpus(gpus, LAPTOP), num_instances=2, vipu=vipu))) == idle


def test_offline_takes_nothing_at_all() -> None:
    """Not even the partition that is named."""
    idle = idle_options(planned(with_gpus("ff"), num_instances=2, vipu=VipuSettings(is_offline=True)))

    assert {"vipu-partition", "pool", *ALLOCATIONS, *PARTITIONS, *LEASES} <= set(idle)
    assert set(idle.values()) == {"--offline-mode takes no virtual IPUs"}


def test_fewer_gpus_than_a_job_needs_are_an_error() -> None:
    """With the counts that fit; who asks for the CPU, shares GPUs or counts virtual IPUs gets that."""
    machine = with_gpus("ffff")
    with pytest.raises(PlanError) as caught:
        check_gpus(planned(machine, num_instances=8), machine)
    assert str(caught.value) == (
        "8 instances use 8 GPUs, and there are 4; --num-instances 4 fits the GPUs, and --share-devices lets "
        "instances share them; --offline-mode computes on the CPU"
    )
    for vipu in ({"is_offline": True}, {"shares_devices": True}, {"ipus_per_host": 16}, {"server_host": "h"}):
        check_gpus(planned(machine, num_instances=8, vipu=VipuSettings(**vipu)), machine)
    check_gpus(planned(LAPTOP, num_instances=8), LAPTOP)
