"""Programs of JAX and TensorFlow, over several hosts.

Holds popdist.startup.jax_cluster.
"""

from tests import jax_programs
from tests.hosts.jobs import HostPoprun
from tests.hosts.network import Network


def test_jax_trains_on_two_hosts(network: Network, hosts_poprun: HostPoprun, framework_python: str) -> None:
    """Its processes connect at the address of the first host's route."""
    words = ("--host", "n1,n2", "-n", "2", "--num-replicas=4", "--tag-output=no", framework_python)
    finished = hosts_poprun(network, *words, jax_programs.PROGRAM).succeeded()

    assert set(jax_programs.expected(2)) <= set(finished.lines)
