"""A host that is lost, or the way to it: the job ends everywhere, and the report names the host."""

import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.faults.targets import bare_interpreters
from tests.hosts.jobs import HostPoprun
from tests.hosts.network import Host, Network
from tests.hosts.test_jobs import poprun_itself
from tests.process.endings import has_met, write_program
from tests.process.test_endings import wait_until
from tests.running import MpiEnvironment

STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nready()\nhang()"


@pytest.mark.parametrize(
    ("runtime", "lose", "restarts"), [("mpich", Host.cut, 0), ("openmpi", Host.kill, 1)], ids=["link", "host"]
)
def test_what_is_lost_ends_the_job_on_every_host(
    own_network: Network,
    mpi_environments: dict[str, MpiEnvironment],
    tmp_path: Path,
    runtime: str,
    lose: Callable[[Host], None],
    restarts: int,
) -> None:
    """Nobody tells that the packets stay away: both sides find out, nothing is left, nothing starts without it."""
    if runtime not in mpi_environments:
        pytest.skip(f"no environment with the {runtime} wheel: scripts/test makes it")
    poprun = HostPoprun(python=mpi_environments[runtime].python, name=runtime)
    words = write_program(tmp_path, STUBBORN)
    options = (f"--max-restarts={restarts}", "--stop-timeout=1", "--host", "n[1-3]", "-n", "3")
    with poprun.started(own_network, *options, sys.executable, *words) as process:
        wait_until(lambda: has_met(tmp_path, 3))
        lose(own_network.hosts["n2"])
        _, err = process.communicate()

    assert process.returncode == 68
    assert "instance 1 failed first: its host does not answer any more (host n2, replica 1)" in err
    assert ("  n2    it does not answer  see that" in err) is bool(restarts)
    assert "Traceback" not in err
    assert own_network.leftovers(apart_from="sshd:") == []


def test_what_is_frozen_on_another_host_ends_with_the_job(own_network: Network, tmp_path: Path) -> None:
    """Its shim and its agent are stopped (SIGSTOP): they hear of Ctrl-C as soon as the MPI runtime ends there."""
    poprun = HostPoprun(python=Path(sys.executable), name="mpich")
    words = write_program(tmp_path, "ready()\nhang()")
    with poprun.started(
        own_network, "--host=n1,n2", "-n2", "--stop-timeout=0.2", sys.executable, *words
    ) as process:
        wait_until(lambda: has_met(tmp_path, 2))
        for one in bare_interpreters(own_network.hosts["n2"].init.pid):
            one.suspend()
        poprun_itself(process).send_signal(signal.SIGINT)
        process.communicate()

    assert process.returncode == 130
    assert own_network.leftovers() == []


def test_a_process_of_the_launcher_that_is_killed_is_named(
    network: Network, hosts_poprun: HostPoprun, tmp_path: Path
) -> None:
    """A shim, and what started it: the host and an instance there, not the code and words of the MPI runtime."""
    for victim, whose in (("shim", "its shim"), ("proxy", "the MPI launcher's process on its host")):
        (tmp_path / victim).mkdir()
        words = write_program(tmp_path / victim, "ready()\nhang()")
        with hosts_poprun.started(network, "--host=n1,n2", "-n2", sys.executable, *words) as process:
            wait_until(partial(has_met, tmp_path / victim, 2))
            family = bare_interpreters(network.hosts["n2"].init.pid)
            (shim,) = [one for one in family if one.parent() not in family]
            (shim if victim == "shim" else shim.parent() or shim).kill()
            _, err = process.communicate()

        assert process.returncode == 137
        assert f"instance 1 failed first: {whose} was killed (host n2, replica 1)" in err
        assert "HYD" not in err
