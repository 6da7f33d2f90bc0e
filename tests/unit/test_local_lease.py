"""Which cores a job that wants its own is offered, beside those that other jobs have."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from poprun.devices.lease.local_lease import CoreClaim
from poprun.plan.topology import ProcessPlacement
from tests.machines import LAPTOP, LAPTOP_WITH_SMT, TWO_SOCKETS, Machine, facts_of
from tests.planning import planned


def offered(
    machine: Machine,
    taken: Collection[int],
    *,
    is_fixed: bool = False,
    **asked: Any,
) -> list[int]:
    """The cores that a job on ``machine`` is offered while others hold those that are ``taken``."""
    facts = facts_of(machine)
    plan = planned(facts, **asked)
    claim = CoreClaim(plan, None if is_fixed else facts, plan.named_devices)
    offer = [
        core.index for core in claim.request().choose({f"core/{number}" for number in taken} | {"cpu/0", "GPU-1"})
    ]
    if offer:
        bindings = claim.devices_with(plan.named_devices, ()).bindings
        assert sorted(core for binding in bindings for core in binding.cores) == offer
    return offer


COMPACT: dict[str, Any] = {"placement": ProcessPlacement.COMPACT, "threads_per_replica": 1}
CORE: dict[str, Any] = {"placement": ProcessPlacement.CORE, "threads_per_replica": 1}


@pytest.mark.parametrize(
    ("machine", "asked", "taken", "offer"),
    [
        (LAPTOP, COMPACT, [], [0]),
        (LAPTOP, COMPACT, [0, 2], [1]),
        (LAPTOP, {**COMPACT, "num_instances": 2}, [0, 2], [1, 3]),
        (LAPTOP, {**COMPACT, "num_instances": 2}, [0, 1, 2], []),
        (LAPTOP, COMPACT, [0, 1, 2, 3], []),
        (LAPTOP, CORE, [1], [0, 2, 3]),
        (LAPTOP, {**CORE, "num_instances": 2}, [1], [0, 2]),
        (LAPTOP_WITH_SMT, COMPACT, [4], [1, 5]),
        (LAPTOP_WITH_SMT, COMPACT, [0, 1, 2, 7], []),
        (TWO_SOCKETS, {**COMPACT, "num_instances": 2}, [0, 2, 4, 6, 8, 10, 12], [1, 3]),
    ],
)
def test_cores_beside_those_of_others(
    machine: Machine, asked: dict[str, Any], taken: list[int], offer: list[int]
) -> None:
    """Free ones only, whole physical cores, and nothing when they do not suffice."""
    assert offered(machine, taken, **asked) == offer


@pytest.mark.parametrize(("taken", "offer"), [([], [0, 1]), ([3], [0, 1]), ([1], [])])
def test_a_plan_file_names_its_cores(taken: list[int], offer: list[int]) -> None:
    """It gets just those, or waits for them."""
    assert offered(LAPTOP, taken, is_fixed=True, **COMPACT | {"num_instances": 2}) == offer


def test_a_job_wants_as_many_cores_as_it_has_threads() -> None:
    """Those that its user has set for all programs, too."""
    facts = replace(facts_of(LAPTOP), user_num_threads="2")
    plan = planned(facts, num_instances=2, placement=ProcessPlacement.COMPACT)

    assert CoreClaim(plan, facts, plan.named_devices).request().num_ipus == 4
