"""A program in which nothing adds up the gradients of the replicas is refused, and every other one is left alone.

Holds popdist.step.checks.optimizer_checks.
"""

from collections.abc import Callable

import pytest

from tests.contract import unwrapped_programs as programs
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS

SPLITS = [(1, 2), (2, 2), (2, 4), (4, 4)]  # instances, replicas


@pytest.mark.parametrize(
    "program",
    [
        programs.forgotten,
        programs.forgotten_after_init,
        programs.forgotten_with_a_closure,
        programs.forgotten_beside_torch,
        programs.forgotten_in_a_program_of_torch,
    ],
)
def test_a_forgotten_wrapper_is_refused(forked_world: ForkedWorlds, program: Callable[[], None]) -> None:
    """In the first step, on every instance, in every split."""
    for num_instances, num_replicas in SPLITS:
        forked_world(
            program,
            num_instances=num_instances,
            num_replicas=num_replicas,
            timeout_seconds=DEADLINE_SECONDS,
        )


def test_torchs_wrapper_is_refused_with_several_replicas_in_an_instance(forked_world: ForkedWorlds) -> None:
    """Two instances of two replicas each."""
    program = programs.with_ddp_of_several_replicas
    forked_world(program, num_instances=2, num_replicas=4, timeout_seconds=DEADLINE_SECONDS)


def test_a_wrapper_within_a_replica_is_none_over_the_replicas(forked_world: ForkedWorlds) -> None:
    """Two replicas of two instances each."""
    forked_world(programs.sharded_within_a_replica, num_instances=4, tensor=2, timeout_seconds=DEADLINE_SECONDS)


@pytest.mark.parametrize(
    "program",
    [
        programs.with_ddp,
        programs.with_fully_shard,
        programs.by_hand,
        programs.by_hand_without_init,
        programs.by_all_reduce_gradients,
        programs.beside_a_wrapped_one,
        programs.alone_on_purpose,
    ],
)
def test_who_adds_gradients_up_or_trains_alone_on_purpose_is_left_alone(
    forked_world: ForkedWorlds, program: Callable[[], None]
) -> None:
    """With one replica in each instance."""
    for number in (2, 4):
        forked_world(program, num_instances=number, timeout_seconds=DEADLINE_SECONDS)
