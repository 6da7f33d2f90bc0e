"""The commands that start a plan, as golden words."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from selectors import DefaultSelector

import pytest

from poprun.launch.launchers import LaunchCommand, LauncherProcesses, StartWatch, launch_commands
from poprun.launch.routes import HostRoute, JobKey, JobNetwork
from poprun.launch.shim import read_instances
from poprun.plan.request import LauncherChoice, RemoteSettings
from poprun.plan.topology import MpiKind, MpiRuntime
from tests.planning import CLUSTER_NODE, MPICH, planned

OPEN_MPI = MpiRuntime(kind=MpiKind.OPEN_MPI, path="/opt/openmpi/bin/mpirun", version="5.0.11")


NETWORK = JobNetwork(
    control_host="10.0.0.9",
    hosts=tuple(HostRoute(name=name, address=f"10.0.0.{name[1]}", interface="eth0") for name in ("n1", "n2")),
    key=JobKey(text="00", file="/dev/shm/k"),
)

RANK_SHIM, SHIM = "start_rank_shim.py", "start_shim.py"


def test_mpich_speaks_hydra() -> None:
    """The user's global words stand before the number of processes, the local ones after it; each shim forks."""
    plan = planned(
        CLUSTER_NODE, num_instances=2, mpi_global_args=("-iface", "lo"), mpi_local_args=("-env", "A", "1")
    )
    (command,) = launch_commands(plan)

    assert command.words[:-4] == (
        *("/opt/mpich/bin/mpiexec", "-launcher", "fork", "-rmk", "user", "-bind-to", "none"),
        *("-iface", "lo", "-n", "2", "-env", "A", "1"),
    )
    assert command.words[-4:-1] == (sys.executable, "-I", "-S")
    assert Path(command.words[-1]).name == SHIM
    assert command.environment == {"POPRUN_RANK_VARIABLE": "PMI_RANK"}


def test_mpich_forks_the_jobs_of_one_machine() -> None:
    """Where it has a launcher for them; words of the user's and other hosts need Hydra."""
    forker = replace(CLUSTER_NODE, mpi=replace(MPICH, forker="/opt/mpich/bin/mpiexec.gforker"))
    host_shim, command = launch_commands(planned(forker, num_instances=2))
    plans = [
        planned(forker, num_instances=2, mpi_global_args=("-iface", "lo")),
        planned(forker, num_instances=2, mpi_local_args=("-env", "A", "1")),
        planned(forker, num_instances=2, hosts=("a", "b")),
    ]

    assert command.words[:-4] == ("/opt/mpich/bin/mpiexec.gforker", "-n", "2")
    assert Path(command.words[-1]).name == RANK_SHIM
    assert (Path(host_shim.words[-1]).name, host_shim.is_host_shim, command.is_host_shim) == (SHIM, True, False)
    assert command.environment == {"POPRUN_RANK_VARIABLE": "PMI_RANK"}
    assert host_shim.environment == {"POPRUN_RANK_VARIABLE": "POPRUN_INSTANCES", "POPRUN_INSTANCES": "0-1"}
    assert [launch_commands(plan)[0].words[0] for plan in plans[:2]] == ["/opt/mpich/bin/mpiexec"] * 2
    assert launch_commands(plans[2], NETWORK)[0].words[0] == "/opt/mpich/bin/mpiexec"


def test_open_mpi_speaks_prrte() -> None:
    """More processes than cores and root are allowed without a flag from the user."""
    plan = planned(replace(CLUSTER_NODE, mpi=OPEN_MPI), num_instances=3, mpi_local_args=("--mca", "a", "b"))
    (command,) = launch_commands(plan)

    assert command.words[:-4] == (
        *("/opt/openmpi/bin/mpirun", "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", "--allow-run-as-root"),
        *("-np", "3", "--mca", "a", "b"),
    )
    assert command.environment == {"POPRUN_RANK_VARIABLE": "OMPI_COMM_WORLD_RANK"}


@pytest.mark.parametrize(("num_instances", "told"), [(1, "0-0"), (3, "0-2")])
def test_without_mpi_one_shim_forks_all_agents(num_instances: int, told: str) -> None:
    """It is told its instances by poprun itself."""
    plan = planned(CLUSTER_NODE, num_instances=num_instances, launcher=LauncherChoice.LOCAL)
    (command,) = launch_commands(plan)

    assert command.environment == {"POPRUN_RANK_VARIABLE": "POPRUN_INSTANCES", "POPRUN_INSTANCES": told}
    assert command.words[1:3] == ("-I", "-S")
    assert list(read_instances(told)) == list(range(num_instances))


def test_a_runtime_tells_each_shim_its_rank() -> None:
    """That is one instance."""
    assert list(read_instances("2")) == [2]


def test_other_hosts_are_named_and_no_value_is() -> None:
    """Each runtime is told the hosts, how to call ssh, and the names of what the shims need."""
    asked = {"hosts": ("n1", "n2"), "num_instances": 4, "remote": RemoteSettings(ssh_config="/c")}
    names = ("POPRUN_CONTROL", "POPRUN_CONTROL_KEY_FILE", "POPRUN_RANK_VARIABLE")
    (mpich,) = launch_commands(planned(CLUSTER_NODE, **asked), NETWORK)
    (open_mpi,) = launch_commands(planned(replace(CLUSTER_NODE, mpi=OPEN_MPI), **asked), NETWORK)

    assert mpich.words[1:9] == (
        *("-launcher", "ssh", "-localhost", "10.0.0.9", "-genvlist", ",".join(names), "-hosts", "n1:2,n2:2"),
    )
    assert list(mpich.environment)[-1] == "HYDRA_LAUNCHER_EXTRA_ARGS"
    assert open_mpi.words[1:3] == ("--host", "n1:2,n2:2")
    assert open_mpi.words[5].startswith("ssh -F /c -o BatchMode=yes")
    assert [word for word in open_mpi.words if word.startswith("POPRUN_")] == list(names)


def test_the_end_of_what_poprun_has_started_is_seen_once() -> None:
    """The end of a child that it has adopted is none."""
    with DefaultSelector() as selector:
        processes = LauncherProcesses(selector)
        start = LaunchCommand(words=("sleep", "0.5"), environment={}, death_signal=signal.SIGKILL)
        processes.start([start], os.environ, "/")
        adopted = os.posix_spawn("/bin/true", ["true"], {})
        os.waitid(os.P_PID, adopted, os.WEXITED | os.WNOWAIT)
        assert not processes.reap()
        (pid,) = processes.running
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert [processes.reap(), processes.reap()] == [True, False]
        for key in list(selector.get_map().values()):
            list(key.data())
        assert processes.has_ended


def test_a_shim_that_reports_is_not_lost() -> None:
    """Its process id is known from its agent, and its end is then the agent's to tell."""
    watch = StartWatch(0.0, None)
    watch.note_living({10, 11}, set(), 1.0)
    watch.note_living({10, 11, 12}, {10, 12}, 2.0)
    watch.note_living({11}, {10, 12}, 3.0)
    watch.note_living(set(), {10, 11, 12}, 4.0)

    assert not watch.has_lost_one


def test_a_shim_that_vanishes_is_lost() -> None:
    """Whoever was seen, has not reported, and is gone will never report."""
    watch = StartWatch(0.0, None)
    watch.note_living({10, 11}, set(), 1.0)
    watch.note_living({10}, {10}, 2.0)

    assert watch.has_lost_one


def test_a_launcher_that_starts_nothing_is_idle() -> None:
    """The time runs while there is no shim that may still report."""
    watch = StartWatch(0.0, None)
    watch.note_living(set(), set(), 5.0)
    watch.note_living(set(), set(), 7.0)
    assert watch.idle_seconds == 2.0
    watch.note_living({10}, set(), 8.0)
    assert watch.idle_seconds == 0.0
    watch.note_living({10}, {10}, 9.0)
    watch.note_living({10}, {10}, 9.5)
    assert watch.idle_seconds == 0.5


def test_a_launcher_that_was_slow_with_its_first_shim_is_not_idle() -> None:
    """The time that it took ends with the first report, also between two looks at the processes."""
    watch = StartWatch(0.0, MPICH)
    watch.update((), set(), 5.0)
    watch.update((), set(), 7.0)
    assert watch.idle_seconds == 2.0
    watch.update((), {10}, 7.1)
    assert watch.idle_seconds == 0.0
