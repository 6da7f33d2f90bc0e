"""The torch backend `popdist` obeys its laws at every number of ranks, survives losses, and carries FSDP.

Holds popdist.exchange.host_memory.messages, popdist.exchange.process_group.group_calls,
popdist.exchange.process_group.message_calls, popdist.exchange.process_group.torch_process_group and
popdist.exchange.transport.hosts.
"""

import secrets
from collections.abc import Callable

import pytest

from tests.contract import backend_program
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS


@pytest.fixture
def run_suite(forked_world: ForkedWorlds) -> Callable[..., None]:
    """Run a suite of backend_program.py on the backend, to a good end."""

    def run(suite: str, num_ranks: int, hosts: str = "", seed: int = 0) -> None:
        arguments = (suite, "popdist", num_ranks, hosts, seed)
        forked_world(backend_program.run_suite, *arguments, num_instances=1, timeout_seconds=DEADLINE_SECONDS)

    return run


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_laws(run_suite: Callable[..., None], num_ranks: int) -> None:
    """Every law of backend_laws.py and backend_turns.py, on every rank."""
    run_suite("laws", num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_random_calls(run_suite: Callable[..., None], num_ranks: int) -> None:
    """Hundreds of calls of backend_random.py, of a new seed each time, which is in the error."""
    run_suite("random", num_ranks, seed=secrets.randbelow(2**32))


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
