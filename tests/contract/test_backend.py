"""The torch backend `popdist` obeys its laws at every number of ranks, survives losses, and carries FSDP.

Holds popdist.process_group.group_calls, popdist.process_group.torch_process_group and popdist.transport.hosts.
"""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.contract import backend_program
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS

NUM_CALLS = 200
NUM_EXAMPLES = 1 + 2
"""The first example is the smallest: no call at all."""


@pytest.fixture
def run_suite(forked_world: ForkedWorlds) -> Callable[..., None]:
    """Run a suite of backend_program.py on the backend, to a good end."""

    def run(suite: str, num_ranks: int, hosts: str = "", seeds: Sequence[int] = ()) -> None:
        arguments = (suite, "popdist", num_ranks, hosts, seeds)
        forked_world(backend_program.run_suite, *arguments, num_instances=1, timeout_seconds=DEADLINE_SECONDS)

    return run


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_laws(run_suite: Callable[..., None], num_ranks: int) -> None:
    """Every law of backend_laws.py and backend_turns.py, on every rank."""
    run_suite("laws", num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4, 5])
@settings(
    max_examples=NUM_EXAMPLES,
    phases=[Phase.generate],  # to make what fails smaller takes hundreds of worlds; the error names the call
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(seeds=st.lists(st.integers(0, 2**32 - 1), min_size=NUM_CALLS, max_size=NUM_CALLS))
def test_random_calls(run_suite: Callable[..., None], num_ranks: int, seeds: list[int]) -> None:
    """Hundreds of calls of backend_random.py; each example is a world of its own."""
    run_suite("random", num_ranks, seeds=seeds)


@pytest.mark.parametrize("hosts", ["aaa", "aabb"])
def test_a_lost_rank(run_suite: Callable[..., None], hosts: str) -> None:
    """Every way to die of backend_losses.py: all who are left are told who it was, on whichever host."""
    run_suite("losses", len(hosts), hosts)


def test_what_torch_builds_on_groups(run_suite: Callable[..., None]) -> None:
    """Every neighbour of backend_neighbours.py."""
    run_suite("neighbours", 2)


@pytest.mark.parametrize("hosts", ["aabb", "abc"], ids=["nodes of the tree", "each alone"])
def test_laws_on_several_hosts(run_suite: Callable[..., None], hosts: str) -> None:
    """The same laws, and with them the same bits, where ranks take each other to be elsewhere."""
    run_suite("laws", len(hosts), hosts)


@pytest.mark.parametrize("suite", ["hosts", "neighbours"])
def test_what_goes_between_hosts(run_suite: Callable[..., None], suite: str) -> None:
    """Each rank's share of its host, for plain collectives and for what torch builds on them."""
    run_suite(suite, 4, "aabb")
