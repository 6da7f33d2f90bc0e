"""Options for virtual IPUs that have nothing to act on in a job are said, with the reason."""

import pytest

from poprun.plan.advice import idle_options
from poprun.plan.settings import VipuSettings
from tests.planning import LAPTOP, planned, with_gpus

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
