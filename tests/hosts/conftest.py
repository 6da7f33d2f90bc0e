"""Hosts for the tests of this folder, and what a job on them must leave there: nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.jobs import HostPoprun
from tests.hosts.network import Network, missing_reason
from tests.running import MpiEnvironment

NAMES = ("n1", "n2", "n3", "n4")
LOGIN = "login"
"""A machine from which jobs are started, and that takes part in none."""


@pytest.fixture(scope="session")
def _can_make_hosts() -> None:
    """Skip where there can be no hosts, and say why."""
    if reason := missing_reason():
        pytest.skip(reason)


@pytest.fixture(scope="package")
def shared_network(_can_make_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Four hosts and a login machine for all tests that leave them as they are."""
    with Network((*NAMES, LOGIN), tmp_path_factory.mktemp("network")) as network:
        yield network


@pytest.fixture
def network(shared_network: Network) -> Iterator[Network]:
    """Four hosts, on which nothing runs and to which nothing has happened; so they must be left."""
    yield shared_network
    assert shared_network.leftovers() == []


@pytest.fixture
def own_network(_can_make_hosts: None, tmp_path: Path) -> Iterator[Network]:
    """Three hosts and a login machine that a test may cut off and switch off."""
    (tmp_path / "network").mkdir()
    with Network((*NAMES[:3], LOGIN), tmp_path / "network") as network:
        yield network


@pytest.fixture
def hosts_poprun(mpi: MpiEnvironment) -> HostPoprun:
    """The command with each MPI runtime in turn: MPICH's on the first host of the job, Open MPI's elsewhere."""
    return HostPoprun(python=mpi.python, name=mpi.name, host="n1" if mpi.name == "mpich" else LOGIN)
