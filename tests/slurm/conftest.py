"""A Slurm for the tests of this folder, started once."""

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import missing_parts, running_cluster


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables with which Slurm's commands find a cluster of two nodes."""
    if missing := missing_parts():
        pytest.skip(
            f"no Slurm can be started here without {', '.join(missing)}: scripts/system-packages installs it"
        )
    with running_cluster(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables
