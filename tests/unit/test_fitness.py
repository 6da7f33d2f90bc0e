"""A plan from elsewhere is compared with the machine that is to carry it out."""

from dataclasses import replace

import pytest

from poprun.errors import PlanError
from poprun.plan.advice import check_fitness
from poprun.plan.topology import MachineFacts
from tests.machines import LAPTOP, TWO_SOCKETS, facts_of
from tests.planning import planned, with_gpus

SMALL = facts_of(LAPTOP)


def test_a_plan_of_this_machine_fits() -> None:
    """There is nothing to say of it."""
    for machine in (SMALL, facts_of(TWO_SOCKETS), facts_of(TWO_SOCKETS, 0, 1), with_gpus("ff")):
        assert check_fitness(planned(machine, num_instances=2), machine, "plan.json") == ()


@pytest.mark.parametrize(
    ("made_on", "here", "what"),
    [
        (with_gpus("ff"), SMALL, "plan.json: devices names GPUs 0, 1, and no GPU is found here: make a new plan"),
        (with_gpus("ff"), with_gpus("f"), "plan.json: devices names GPU 1, and this machine has GPU 0: "),
        (with_gpus("ff"), replace(SMALL, gpus=with_gpus("bbbb").gpus[2:]), "and this machine has GPUs 2, 3: "),
        (
            facts_of(TWO_SOCKETS),
            SMALL,
            (
                "plan.json: bindings names cores 4-15, and this process may use cores 0-3: make a new plan here "
                "with --dry-run --topology-format json instead of plan.json, or leave bindings empty to bind none"
            ),
        ),
        (facts_of(TWO_SOCKETS), replace(SMALL, cpus=(), cores=tuple(range(15))), "bindings names core 15, and"),
    ],
)
def test_what_is_not_here(made_on: MachineFacts, here: MachineFacts, what: str) -> None:
    """A GPU that is named, or a core that an instance is to be bound to."""
    with pytest.raises(PlanError) as caught:
        check_fitness(planned(made_on, num_instances=2), here, "plan.json")
    assert what in str(caught.value)


def test_fewer_cores() -> None:
    """Without bindings they are a warning: the threads were counted for more."""
    plan = planned(replace(SMALL, cores=tuple(range(64)), cpus=()), num_instances=2)

    (warning,) = check_fitness(plan, SMALL, "plan.json")
    assert warning == (
        "plan.json counts on 64 cores, and there are 4 here: the instances slow each other down; the 32 threads "
        "of each replica stay as planned"
    )
