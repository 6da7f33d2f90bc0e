"""The torch backend `popdist` obeys its laws at every number of ranks, survives losses, and carries FSDP."""

import sys

import pytest

from tests.docs.markdown import ROOT
from tests.running import run

DEADLINE_SECONDS = 250.0
"""Reached only by what hangs."""

slow = pytest.mark.deadline(DEADLINE_SECONDS + 10)


def run_suite(suite: str, num_ranks: int, hosts: str = "") -> None:
    """A suite of backend_program.py on the backend, to a good end."""
    words = ["-m", "tests.contract.backend_program", suite, "popdist", str(num_ranks), hosts]
    run([sys.executable, *words], cwd=ROOT, deadline_seconds=DEADLINE_SECONDS).succeeded()


@slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5])
def test_laws(num_ranks: int) -> None:
    """Every law of backend_laws.py and backend_turns.py, on every rank."""
    run_suite("laws", num_ranks)


@slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
def test_random_calls(num_ranks: int) -> None:
    """A quarter of the ten thousand calls of backend_random.py."""
    run_suite("random", num_ranks)


@slow
@pytest.mark.parametrize("hosts", ["aaa", "aabb"])
def test_a_lost_rank(hosts: str) -> None:
    """Every way to die of backend_losses.py: all who are left are told who it was, on whichever host."""
    run_suite("losses", len(hosts), hosts)


@slow
def test_what_torch_builds_on_groups() -> None:
    """Every neighbour of backend_neighbours.py."""
    run_suite("neighbours", 2)


@slow
@pytest.mark.parametrize("hosts", ["aabb", "abc"], ids=["nodes of the tree", "each alone"])
def test_laws_on_several_hosts(hosts: str) -> None:
    """The same laws, and with them the same bits, where ranks take each other to be elsewhere."""
    run_suite("laws", len(hosts), hosts)


@slow
@pytest.mark.parametrize("suite", ["hosts", "neighbours"])
def test_what_goes_between_hosts(suite: str) -> None:
    """Each rank's share of its host, for plain collectives and for what torch builds on them."""
    run_suite(suite, 4, "aabb")
