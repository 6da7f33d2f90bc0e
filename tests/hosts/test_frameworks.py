"""Programs of JAX and TensorFlow, over several hosts.

Holds popdist.startup.jax_cluster.
"""

from pathlib import Path

from tests.hosts.jobs import HostPoprun
from tests.hosts.network import Network

EXAMPLE = Path(__file__).parents[2] / "examples" / "jax_training.py"


def test_jax_trains_on_two_hosts(network: Network, hosts_poprun: HostPoprun, framework_python: str) -> None:
    """Its processes connect at the address of the first host's route."""
    words = ("--host", "n1,n2", "-n", "2", "--num-replicas=4", "--tag-output=no", framework_python, str(EXAMPLE))
    finished = hosts_poprun(network, *words).succeeded()

    assert "2 processes, 4 devices: [0. 1. 2. 3.]" in finished.lines
