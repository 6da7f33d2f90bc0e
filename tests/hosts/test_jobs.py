"""Jobs over several hosts: they run, fail and end as those of one host do."""

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import yaml

from poprun.launch.messages.proofs import KEY_BYTES
from poprun.plan.emit.kubernetes import HOST_FILE
from tests.contract import several_hosts_training
from tests.contract.forked_calls import ForkedWorlds
from tests.hosts.conftest import LOGIN
from tests.hosts.jobs import HostPoprun
from tests.hosts.network import TMPDIR, Network
from tests.process.endings import has_met, write_program
from tests.process.test_endings import wait_until
from tests.running import DEADLINE_SECONDS, MpiEnvironment, Poprun, run

if TYPE_CHECKING:
    import subprocess

WHERE_NAMES = (
    "MASTER_ADDR",
    "GLOO_SOCKET_IFNAME",
    "POPDIST_REPLICA_INDEX_OFFSET",
    "POPDIST_INSTANCE_INDEX_IN_REPLICA",
)
WHERE = f"import os, socket; print(socket.gethostname(), *map(os.environ.get, {WHERE_NAMES}))"
NAMES = "'TORCH_A', 'HF_TOKEN', 'OTHER', 'TMPDIR', 'NAMED', 'GIVEN'"
VARIABLES = f"import os; print(*map(os.environ.get, ({NAMES})))"
KEY = f"[0-9a-f]{{{2 * KEY_BYTES}}}"


def poprun_itself(process: "subprocess.Popen[str]") -> psutil.Process:
    """The process of poprun on its host; the one that was started only waits for it."""
    return psutil.Process(process.pid).children()[0]


def test_a_job_runs_on_every_host(network: Network, hosts_poprun: HostPoprun, tmp_path: Path) -> None:
    """Shards share a host, output and numbers come here, programs get an address, and the one clock is one."""
    words = ("--host", "n[1-3]", "-n", "6", "--parallelism", "tensor=2", "--report", str(tmp_path / "job.json"))
    program = f"{WHERE}; import popdist; popdist.report(number=popdist.instance_index())"
    finished = hosts_poprun(network, *words, sys.executable, "-c", program).succeeded()

    address = network.hosts["n1"].address
    assert finished.lines == [f"[{n}] n{1 + n // 2} {address} eth0 {n // 2} {n % 2}" for n in range(6)]
    assert f"eth0 {address} (n1)" in finished.err
    attempt = json.loads((tmp_path / "job.json").read_text())["attempts"][0]
    assert [it["curves"]["numbers/number"]["last"] for it in attempt["instances"]] == [*range(6)]
    clocks = attempt["clocks"]
    assert set(clocks) == {"n1", "n2", "n3"} - {hosts_poprun.host}
    assert all(abs(it["offset_seconds"]) <= it["uncertainty_seconds"] < 1 for it in clocks.values())


def test_a_function_runs_on_every_host(network: Network, tmp_path: Path) -> None:
    """It comes there, and its values come back, through a folder that the hosts share."""
    call = "print(popdist.launch(socket.gethostname, num_instances=2, host=['n2', 'n3']))"
    settings = (
        f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}",
        f"POPRUN_SSH_CONFIG={network.ssh_config}",
    )
    words = ["env", f"TMPDIR={tmp_path}", *settings, sys.executable, "-c", f"import popdist, socket; {call}"]

    assert run(network.hosts["n1"].enter(words)).succeeded().out == "['n2', 'n3']\n"


def test_instance_0_reads_what_poprun_is_given(network: Network, hosts_poprun: HostPoprun) -> None:
    """All of it and its end, on whichever host; the others read nothing, and nobody has to read."""
    words = ("--host", "n2,n1", "-n", "2", sys.executable, "-c")
    counted = hosts_poprun(network, *words, "import sys; print(len(sys.stdin.read()))", stdin="x" * 1_000_000)
    unread = hosts_poprun(network, *words, "print(1)", stdin="x" * 10_000_000)

    assert sorted(counted.succeeded().lines) == ["[0] 1000000", "[1] 0"]
    assert len(unread.succeeded().lines) == 2


def test_settings_travel_and_secrets_stay(network: Network, hosts_poprun: HostPoprun) -> None:
    """Programs have the same on all hosts: what the libraries are told, what ``-x`` names, and no secret."""
    words = ("--mpi-local-args=-x NAMED -x GIVEN=g", sys.executable, "-c", VARIABLES)
    variables = {"TORCH_A": "1", "HF_TOKEN": "t", "NAMED": "n", "OTHER": "o", "HYDRA_LAUNCHER_EXTRA_ARGS": "-q"}
    finished = hosts_poprun(network, "-v", "--host=n1,n2", "-n", "2", *words, env=variables).succeeded()

    assert finished.lines == [f"[{n}] 1 None None /run/tmp n g" for n in range(2)]
    (told,) = [line for line in finished.err.splitlines() if "variables that go to other hosts" in line]
    assert "TORCH_A" in told
    assert "HF_TOKEN" not in told


def test_a_failure_on_one_host_ends_the_job_on_all(
    network: Network, hosts_poprun: HostPoprun, tmp_path: Path
) -> None:
    """The first failure gives poprun's exit code, and the report names its host."""
    words = write_program(tmp_path, "ready()\nsys.exit(7) if rank == 3 else hang()")
    sharing = ("--parallelism", "pipeline=2")
    finished = hosts_poprun(network, "--host", "n1,n2", "-n", "4", *sharing, sys.executable, *words)

    assert finished.code == 7
    assert "instance 3 failed first: exit code 7 (host n2, replica 1, stage 1, shard 0)" in finished.err


def test_no_key_stands_where_others_look_and_a_killed_poprun_leaves_nothing(
    network: Network, hosts_poprun: HostPoprun, tmp_path: Path
) -> None:
    """Not in a command line, nor in variables that are sent; and whoever is out of reach ends by itself."""
    words = write_program(tmp_path, "ready()\nhang()")
    with hosts_poprun.started(network, "--host", "n[1-3]", "-n", "3", sys.executable, *words) as process:
        wait_until(lambda: has_met(tmp_path, 3))
        lines = [line for host in network.hosts.values() for line in host.processes()]
        shims = network.hosts["n2"].init.children(recursive=True)
        variables = [text for one in shims for text in one.environ().values()]
        held = [host.run("ls", "/dev/shm").split() for host in network.hosts.values()]
        poprun_itself(process).send_signal(signal.SIGKILL)
        process.communicate()

    assert any("mpi" in line for line in lines)
    assert [text for text in (*lines, *variables) if re.search(KEY, text)] == []
    assert [name for names in held for name in names if "key" in name] == []


def test_what_an_mpi_job_of_kubernetes_runs(network: Network, mpi: MpiEnvironment, tmp_path: Path) -> None:
    """The launcher's words of the manifest start the program of the image, where ssh passes no variables on."""
    poprun = Poprun(python=mpi.python)
    program = ("python", "-c", "import os, sys; print(sys.prefix, os.environ['POPDIST_NUM_TOTAL_REPLICAS'])")
    path = {"PATH": f"{mpi.python.parent}{os.pathsep}{os.environ['PATH']}"}
    written = poprun("--emit=mpijob", "--image=i", "-H", "a,b", "-n2", *program, env=path).succeeded().out
    pods = yaml.safe_load(written.replace(HOST_FILE, str(tmp_path / "hostfile")).replace("$$", "$"))
    (container,) = pods["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    slots = "{}:1\n" if mpi.name == "mpich" else "{} slots=1\n"
    (tmp_path / "hostfile").write_text("".join(map(slots.format, ("n2", "n3"))))
    variables = path | {it["name"]: f"{it['value']} -F {network.ssh_config}" for it in container["env"]}
    told = [f"{name}={value}" for name, value in (variables | {"TMPDIR": TMPDIR}).items()]
    words = network.hosts["n1"].enter(["env", *told, *container["command"]])
    finished = run(words).succeeded()

    assert finished.lines == [f"{mpi.python.parents[1]} 2"] * 2


def test_a_training_has_the_same_bits_on_any_number_of_hosts(
    network: Network, mpi_environments: dict[str, MpiEnvironment], forked_world: ForkedWorlds
) -> None:
    """Four replicas on one host, on two through MPICH, and on four through Open MPI."""
    if set(mpi_environments) != {"mpich", "openmpi"}:
        pytest.skip("this takes both MPI runtimes: scripts/test makes an environment for each")
    ((_, one),) = forked_world(
        several_hosts_training.train, num_instances=1, num_replicas=4, timeout_seconds=DEADLINE_SECONDS
    )
    program = (
        "--num-replicas=4",
        "--threads-per-replica=1",
        sys.executable,
        "-m",
        several_hosts_training.__name__,
    )
    two, four = (
        HostPoprun(python=mpi_environments[name].python, name=name, host=caller)(
            network, "--host", hosts, "-n", number, "--no-tag-output", *program
        ).succeeded()
        for name, caller, hosts, number in (("mpich", LOGIN, "n1,n2", "2"), ("openmpi", "n1", "n[1-4]", "4"))
    )

    assert two.lines == [one] * 2
    assert four.lines == [one] * 4
