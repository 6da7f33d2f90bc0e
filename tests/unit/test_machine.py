"""What the probes make of what a machine shows: control groups, MPI runtimes, programs.

Holds poprun.hosts.probe.mpi_runtimes.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from poprun.errors import ProgramNotExecutableError, ProgramNotFoundError
from poprun.hosts.probe.machine import (
    machine_facts,
    names_of_this_machine,
    read_cpus,
    read_memory_nodes,
    starter_of_many,
    usable_cores,
)
from poprun.hosts.probe.mpi_runtimes import find_mpi, read_version
from poprun.hosts.probe.program import resolve_program
from poprun.launch.pressure import count_kills
from poprun.launch.process.limits import KillCounts, cpu_quota, kill_counts
from poprun.launch.process.machine_evidence import memory_limits
from poprun.plan.topology import Cpu, MpiKind, MpiRuntime
from tests.machines import EIGHT_NODES, LAPTOP, LAPTOP_WITH_SMT, TWO_SOCKETS, TWO_SOCKETS_WITH_SMT, Machine

HYDRA = """\
HYDRA build details:
    Version:                                 5.0.2
    Release Date:                            Fri Sep 25 20:45:26 UTC 2026
    Launchers available:                     ssh rsh fork slurm
"""


@pytest.mark.parametrize(
    ("output", "kind", "version"),
    [
        (HYDRA, MpiKind.MPICH, "5.0.2"),
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/", MpiKind.OPEN_MPI, "5.0.11"),
        ("mpiexec (OpenRTE) 4.1.2\n\nReport bugs to http://www.open-mpi.org/", MpiKind.OPEN_MPI, "4.1.2"),
    ],
)
def test_mpi_runtimes_are_told_apart(output: str, kind: MpiKind, version: str) -> None:
    """By what they print about their version; the path is the launcher's."""
    runtime = read_version("/opt/mpiexec", output)

    assert runtime is not None
    assert (runtime.kind, runtime.version, runtime.path) == (kind, version, "/opt/mpiexec")


@pytest.mark.parametrize(
    "output", ["", "Intel(R) MPI Library for Linux* OS, Version 2021.8 Build 20221129", "LAM 7.1"]
)
def test_another_mpi_is_none_of_the_two(output: str) -> None:
    """A runtime of another family is not taken for one whose flags poprun knows."""
    assert read_version("/opt/mpiexec", output) is None


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/job\n", {}, None),
        ("0::/job\n", {"job/cpu.max": "max 100000"}, None),
        ("0::/job\n", {"job/cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"}, 2.0),
        ("0::/a/b\n", {"a/b/cpu.max": "100000 100000", "a/cpu.max": "200000 100000"}, 1.0),
        ("0::/gone\n", {"cpu.max": "400000 100000"}, 4.0),
        ("4:cpu,cpuacct:/j\n", {"cpu/j/cpu.cfs_quota_us": "-1", "cpu/j/cpu.cfs_period_us": "100000"}, None),
        ("4:cpu,cpuacct:/j\n", {"cpu/j/cpu.cfs_quota_us": "50000", "cpu/j/cpu.cfs_period_us": "100000"}, 0.5),
        ("4:memory:/j\n", {"cpu/j/cpu.cfs_quota_us": "50000", "cpu/j/cpu.cfs_period_us": "100000"}, None),
        ("0::/job\n", {"job/cpu.max": "nonsense"}, None),
    ],
)
def test_the_quota_of_the_control_groups(
    tmp_path: Path, membership: str, files: dict[str, str], quota: float | None
) -> None:
    """The least of all the groups around the process, as cgroups(7) has them in both versions."""
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    assert cpu_quota(str(tmp_path / "membership"), str(tmp_path / "groups")) == quota


def test_no_control_groups() -> None:
    """A machine without them sets no limit, and every process may use a core."""
    assert cpu_quota("/nowhere/membership", "/nowhere") is None
    assert usable_cores()
    assert set(usable_cores()) <= os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("membership", "files", "num_killed", "limit_bytes"),
    [
        (
            "0::/j\n",
            {"j/memory.events": "max 3\noom_kill 2", "j/memory.max": "max", "memory.max": "4096"},
            2,
            4096,
        ),
        ("0::/gone\n", {"memory.events": "oom_kill 1", "memory.max": "8192"}, 1, 8192),
        ("4:memory:/j\n", {"memory/j/memory.oom_control": "under_oom 0\noom_kill 5"}, 5, None),
        ("4:memory:/j\n", {"memory/j/memory.limit_in_bytes": "9223372036854771712"}, None, None),
        ("0::/j\n", {"j/memory.events": "nonsense"}, None, None),
    ],
)
def test_what_the_control_groups_say_of_memory(
    tmp_path: Path, membership: str, files: dict[str, str], num_killed: int | None, limit_bytes: int | None
) -> None:
    """The count of the innermost group that has one, the least limit of all, in both versions."""
    (tmp_path / "membership").write_text(membership)
    (tmp_path / "vmstat").write_text("pgfault 9\noom_kill 7\n")
    for name, text in files.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    names = str(tmp_path / "membership"), str(tmp_path / "groups")

    assert kill_counts(*names, str(tmp_path / "vmstat")) == KillCounts(in_group=num_killed, on_machine=7)
    assert count_kills(membership, names[1])[0] == num_killed
    assert memory_limits(*names).group_bytes == limit_bytes


def test_a_kernel_that_says_nothing_of_memory() -> None:
    """Nothing is known then, nor how much more it is than before, and that is no error."""
    assert kill_counts("/nowhere", "/nowhere", "/nowhere") == KillCounts()
    assert KillCounts(in_group=4).since(KillCounts(in_group=3, on_machine=9)) == KillCounts(in_group=1)
    assert memory_limits("/nowhere", "/nowhere").group_bytes is None


def test_facts_of_this_machine() -> None:
    """Its names contain localhost and its own, its map every core; what the user set is passed on."""
    facts = machine_facts({"OMP_NUM_THREADS": "3"}, with_mpi=False)

    assert {cpu.number for cpu in facts.cpus} == os.sched_getaffinity(0)
    assert {"localhost", facts.hostname} <= facts.host_aliases
    assert (facts.mpi, facts.user_num_threads) == (None, "3")


def test_a_name_that_resolves_to_here_is_this_machine() -> None:
    """An address of this machine is one of its names; one of another machine, or no address, is not."""
    assert "127.0.0.9" in names_of_this_machine(["127.0.0.9"])
    assert "192.0.2.1" not in names_of_this_machine(["192.0.2.1"])
    assert "x" * 300 not in names_of_this_machine(["x" * 300])
    assert "127.0.0.9" not in names_of_this_machine(["127.0.0.9", "localhost"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with programs of every kind."""
    for name, text, mode in [
        ("train.py", "print()", 0o644),
        ("bare.py", "print()", 0o755),
        ("tool.py", "#!/usr/bin/env python\n", 0o755),
        ("run", "#!/bin/sh\n", 0o755),
        ("notes.txt", "", 0o644),
        ("bin/prog", "#!/bin/sh\n", 0o755),
        ("bin/notes", "", 0o644),
        ("bin/bare_there.py", "print()", 0o755),
        ("old", "#! /nowhere/python -u\n", 0o755),
        ("windows", "#!/bin/sh\r\n", 0o755),
    ]:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(mode)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        ((), ()),
        (("prog", "-x"), ("{}/bin/prog", "-x")),
        (("./run", "a b"), ("{}/run", "a b")),
        (("run",), ("{}/run",)),
        (("bin/prog",), ("{}/bin/prog",)),
        (("train.py", "--lr", "1"), (sys.executable, "train.py", "--lr", "1")),
        (("./train.py",), (sys.executable, "./train.py")),
        (("bare.py",), (sys.executable, "bare.py")),
        (("bare_there.py",), (sys.executable, "{}/bin/bare_there.py")),
        (("tool.py",), ("{}/tool.py",)),
    ],
)
def test_programs(folder: Path, words: tuple[str, ...], argv: tuple[str, ...]) -> None:
    """A path is a path; a name is looked for on PATH, then here; Python files that cannot run alone are run."""
    expected = tuple(word.format(folder) for word in argv)

    assert resolve_program(words, str(folder), f"/nowhere:{folder}/bin") == expected


@pytest.mark.parametrize(
    ("program", "what"),
    [
        ("porg", "there is no program porg on PATH and no file of that name in {}; nearest: prog"),
        ("trian.py", "nearest: train.py"),
        ("./trian.py", "there is no file ./trian.py; nearest: train.py"),
        ("qqqqqqqq", "in {}"),
        ("", "the name of the program is empty"),
        ("/nowhere/at/all", "there is no file /nowhere/at/all"),
        ("./old", "./old is a script for /nowhere/python, which is not there"),
        ("./windows", "mend it with sed -i 's/\\r$//' ./windows"),
    ],
)
def test_programs_that_are_not_there(folder: Path, program: str, what: str) -> None:
    """The error names the nearest programs and files there are."""
    with pytest.raises(ProgramNotFoundError) as caught:
        resolve_program((program,), str(folder), f"{folder}/bin")
    assert what.format(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("program", "what"),
    [
        ("notes.txt", "notes.txt is not executable: make it so with chmod +x notes.txt, or name the program"),
        ("bin", "bin is a directory: give the program inside it"),
        ("notes", "there is no program"),
    ],
)
def test_programs_that_cannot_run(folder: Path, program: str, what: str) -> None:
    """What lacks the permission is no program on PATH, and an error in the working directory."""
    with pytest.raises((ProgramNotExecutableError, ProgramNotFoundError)) as caught:
        resolve_program((program,), str(folder), f"{folder}/bin")
    assert what in str(caught.value)


def test_the_first_launcher_of_a_known_family_counts(tmp_path: Path) -> None:
    """Others before it are named, each once; MPICH's launcher for one machine lies beside it."""
    for name, says in (("other/mpiexec", "Intel(R) MPI Library"), ("mpich/mpiexec", HYDRA), ("mpich/mpirun", "")):
        launcher = tmp_path / name
        launcher.parent.mkdir(exist_ok=True)
        launcher.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
        launcher.chmod(0o755)
    (tmp_path / "other/mpirun").symlink_to("mpiexec")
    found = MpiRuntime(kind=MpiKind.MPICH, path=f"{tmp_path}/mpich/mpiexec", version="5.0.2")
    path, unknown = f"/nowhere:{tmp_path}/other", (f"{tmp_path}/other/mpiexec",)

    assert find_mpi(path, f"{tmp_path}/mpich") == (found, unknown)
    (tmp_path / "mpich/mpiexec.gforker").symlink_to("mpirun")
    found = replace(found, forker=f"{tmp_path}/mpich/mpiexec.gforker")
    assert find_mpi(path, f"{tmp_path}/mpich") == (found, unknown)
    assert find_mpi(path, "/nowhere") == (None, unknown)


@pytest.mark.parametrize("machine", [LAPTOP, LAPTOP_WITH_SMT, TWO_SOCKETS, TWO_SOCKETS_WITH_SMT, EIGHT_NODES])
def test_every_core_is_where_it_is(tmp_path: Path, machine: Machine) -> None:
    """Node, socket, last-level cache and physical core are those of the machine."""
    machine.write(tmp_path)

    assert read_cpus(range(1000), str(tmp_path)) == machine.cpus()
    assert read_memory_nodes(str(tmp_path), "/nowhere") == tuple(sorted({cpu.node for cpu in machine.cpus()}))


def test_two_sockets_in_numbers(tmp_path: Path) -> None:
    """One map written out: even numbers on one socket, odd ones on the other."""
    replace(TWO_SOCKETS, num_cores=2).write(tmp_path)

    assert read_cpus(range(4), str(tmp_path)) == (
        Cpu(number=0, core=0, cache=0, node=0, socket=0),
        Cpu(number=1, core=1, cache=1, node=1, socket=1),
        Cpu(number=2, core=2, cache=0, node=0, socket=0),
        Cpu(number=3, core=3, cache=1, node=1, socket=1),
    )


def test_what_is_not_allowed_is_not_on_the_map(tmp_path: Path) -> None:
    """The affinity of the process, and with it the cpuset of its control group, bounds the map."""
    TWO_SOCKETS.write(tmp_path)

    assert [cpu.number for cpu in read_cpus({1, 3, 4}, str(tmp_path))] == [1, 3, 4]


def test_cores_that_are_offline(tmp_path: Path) -> None:
    """They are left out, and the remaining thread of a physical core stands for it."""
    LAPTOP_WITH_SMT.write(tmp_path, offline=[0, 3])
    found = {cpu.number: cpu.core for cpu in read_cpus(range(8), str(tmp_path))}

    assert found == {1: 1, 2: 2, 4: 4, 5: 1, 6: 2, 7: 7}


def test_a_machine_that_tells_nothing() -> None:
    """Without /sys every core stands alone on one node, and no memory is known."""
    assert read_cpus({2, 5}, "/nowhere") == (
        Cpu(number=2, core=2, cache=-1, node=0, socket=0),
        Cpu(number=5, core=5, cache=-1, node=0, socket=0),
    )
    assert read_memory_nodes("/nowhere", "/nowhere") == ()


def test_memory_that_is_not_allowed(tmp_path: Path) -> None:
    """Nodes without memory, and those that the control group withholds, are no nodes to take memory from."""
    EIGHT_NODES.write(tmp_path)
    (tmp_path / "node/has_memory").write_text("0-5\n")
    (tmp_path / "status").write_text("Name:\tx\nMems_allowed:\tff\nMems_allowed_list:\t1,4-7\n")

    assert read_memory_nodes(str(tmp_path), str(tmp_path / "status")) == (1, 4, 5)


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({"PMI_SIZE": "2"}, "mpiexec"),
        ({"OMPI_COMM_WORLD_SIZE": "16"}, "mpiexec"),
        ({"WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}, "torchrun"),
        ({"PMI_SIZE": "1", "WORLD_SIZE": "4"}, ""),
        ({"OMPI_COMM_WORLD_SIZE": "2", "POPDIST_NUM_TOTAL_REPLICAS": "2"}, ""),
        ({}, ""),
    ],
)
def test_who_has_started_many(variables: dict[str, str], launcher: str) -> None:
    """A variable that is left over, and a job within a job of poprun, are none of these."""
    assert starter_of_many(variables) == launcher
